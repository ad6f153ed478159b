"""The rules a run's settings must keep for global-batch packing, and how to mend each violation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from evenstep.gbpacking.choice import DYNAMIC_SCHEDULERS, SCHEDULERS
from evenstep.gbpacking.megatron_api import probe_global_batch_packing_support

LOADER_TYPES: Final = ("single", "cyclic", "external")
"""Loaders that hand out one sample at a time. ("batch" pads a whole global batch to one length.)"""


class Violation(NamedTuple):
    """One setting that global-batch packing cannot work with."""

    setting: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.setting} is {self.value!r}; {self.rule}; {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSettings:
    """The settings of a run that matter to packing, under Megatron-Core's names where it has them.

    Attributes:
        micro_batch_size: Samples per micro-batch that the loader yields.
        max_sequence_length: Tokens of the longest sample, padding included.
        max_seqlen_per_dp_cp_rank: Tokens that one rank may hold; None if not set.
        calculate_per_token_loss: Whether the loss is summed over tokens and divided once per step.
        average_in_collective: Whether the gradient reduction averages over the ranks.
        dataloader_type: "single", "cyclic", "batch" or "external".
        cuda_graphs: The CUDA graph implementation, "none" if there is none.
        other_packing: Names of the other packing modes that are switched on.
        context_parallel_size: Static CP size.
        pipeline_parallel_size: Pipeline stages.
        virtual_pipeline_size: Model chunks per stage, None without interleaving.
        microbatch_group_size_per_vp_stage: Micro-batches that an interleaved schedule runs per
            chunk in a row, None for Megatron-Core's default, the pipeline size.
        variable_seq_lengths: Whether pipeline stages announce the shape of what they send.
        hybrid_context_parallel: Megatron-Core's own hybrid context parallelism.
        dynamic_context_parallel: Whether the CP size is chosen per micro-batch.
        scheduler: Name of the packing scheduler, None if not to be checked.
        data_parallel_size: Data-parallel ranks without CP, None if not known.
    """

    micro_batch_size: int
    max_sequence_length: int
    max_seqlen_per_dp_cp_rank: int | None
    calculate_per_token_loss: bool
    average_in_collective: bool
    dataloader_type: str = "single"
    cuda_graphs: str = "none"
    other_packing: tuple[str, ...] = ()
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    virtual_pipeline_size: int | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    variable_seq_lengths: bool = False
    hybrid_context_parallel: bool = False
    dynamic_context_parallel: bool = False
    scheduler: str | None = None
    data_parallel_size: int | None = None

    @classmethod
    def from_model_config(
        cls,
        model_config: object,
        *,
        micro_batch_size: int,
        max_sequence_length: int,
        average_in_collective: bool,
        dataloader_type: str = "single",
        other_packing: tuple[str, ...] = (),
        data_parallel_size: int | None = None,
    ) -> "PackingSettings":
        """Read from a Megatron-Core `TransformerConfig` what it knows, take the rest as arguments.

        Args:
            model_config: The model's configuration. Attributes that it lacks count as not set.
            micro_batch_size: Samples per micro-batch that the loader yields.
            max_sequence_length: Tokens of the longest sample, padding included.
            average_in_collective: Of Megatron-Core's `DistributedDataParallelConfig`.
            dataloader_type: Kind of loader.
            other_packing: Names of the other packing modes that are switched on.
            data_parallel_size: Data-parallel ranks without CP, None if not known.
        """
        scheduler = getattr(model_config, "sequence_packing_scheduler", None)

        def read(name: str, default: object) -> object:
            value = getattr(model_config, name, None)
            return default if value is None else value

        def whole(name: str) -> int | None:
            value = read(name, None)
            return value if type(value) is int else None

        legacy_graphs = read("enable_cuda_graph", False) is True
        return cls(
            micro_batch_size=micro_batch_size,
            max_sequence_length=max_sequence_length,
            max_seqlen_per_dp_cp_rank=whole("max_seqlen_per_dp_cp_rank"),
            calculate_per_token_loss=read("calculate_per_token_loss", False) is True,
            average_in_collective=average_in_collective,
            dataloader_type=dataloader_type,
            cuda_graphs="local" if legacy_graphs else str(read("cuda_graph_impl", "none")),
            other_packing=other_packing,
            context_parallel_size=whole("context_parallel_size") or 1,
            pipeline_parallel_size=whole("pipeline_model_parallel_size") or 1,
            virtual_pipeline_size=whole("virtual_pipeline_model_parallel_size"),
            microbatch_group_size_per_vp_stage=whole("microbatch_group_size_per_vp_stage"),
            variable_seq_lengths=read("variable_seq_lengths", False) is True,
            hybrid_context_parallel=read("hybrid_context_parallel", False) is True,
            dynamic_context_parallel=read("dynamic_context_parallel", False) is True,
            scheduler=scheduler if isinstance(scheduler, str) else None,
            data_parallel_size=data_parallel_size,
        )


def packing_violations(settings: PackingSettings) -> list[Violation]:
    """Return every rule that the settings break, each with its remedy; empty if none."""
    rules = (_scheduler, _loss_and_loader, _capacity, _execution, _dynamic_cp)
    return [violation for rule in rules for violation in rule(settings)]


def check_packing_settings(settings: PackingSettings) -> None:
    """Raise one `ValueError` that lists every violation, or return if there is none."""
    violations = packing_violations(settings)
    if violations:
        lines = "\n".join(f"  - {violation}" for violation in violations)
        raise ValueError(f"global-batch packing cannot run with these settings:\n{lines}")


def _scheduler(s: PackingSettings) -> Iterator[Violation]:
    own = {**SCHEDULERS, **DYNAMIC_SCHEDULERS}
    if s.scheduler is None or s.scheduler in own:
        return
    refusal = probe_global_batch_packing_support(s.scheduler, dynamic_cp=s.dynamic_context_parallel)
    if refusal is not None:
        yield Violation(
            "sequence_packing_scheduler",
            s.scheduler,
            f"evenstep has no such scheduler, and Megatron-Core cannot run it: {refusal}",
            f"choose one of {', '.join(own)}",
        )


def _loss_and_loader(s: PackingSettings) -> Iterator[Violation]:
    if s.micro_batch_size != 1:
        yield Violation(
            "micro_batch_size",
            s.micro_batch_size,
            "packing decides what shares a micro-batch, so the loader yields single samples",
            "set micro_batch_size=1",
        )
    if not s.calculate_per_token_loss:
        yield Violation(
            "calculate_per_token_loss",
            False,
            "packs hold different numbers of tokens, so a mean per micro-batch weighs them wrongly",
            "set calculate_per_token_loss=True",
        )
    if s.average_in_collective:
        yield Violation(
            "average_in_collective",
            True,
            "gradients are summed over ranks and divided by the step's tokens",
            "set average_in_collective=False in the DDP config",
        )
    if s.dataloader_type not in LOADER_TYPES:
        yield Violation(
            "dataloader_type",
            s.dataloader_type,
            "the loader must hand out single, unpadded samples",
            f"choose one of {', '.join(LOADER_TYPES)}",
        )
    for mode in s.other_packing:
        yield Violation(
            "other_packing", mode, "only one packing mode can run at a time", f"switch off {mode}"
        )


def _capacity(s: PackingSettings) -> Iterator[Violation]:
    name = "max_seqlen_per_dp_cp_rank"
    capacity = s.max_seqlen_per_dp_cp_rank
    if capacity is None or capacity < 1:
        yield Violation(
            name,
            capacity,
            "the capacity of a pack is never guessed",
            "set it to the tokens that fit into one rank's memory",
        )
    elif not s.dynamic_context_parallel and (
        capacity * s.context_parallel_size < s.max_sequence_length
    ):
        yield Violation(
            name,
            capacity,
            f"times context_parallel_size {s.context_parallel_size} it must cover the longest "
            f"sample, {s.max_sequence_length} tokens",
            f"set it to at least {-(-s.max_sequence_length // s.context_parallel_size)}, or raise "
            "the CP size, or drop longer samples",
        )


def _execution(s: PackingSettings) -> Iterator[Violation]:
    if s.cuda_graphs != "none":
        yield Violation(
            "cuda_graph_impl",
            s.cuda_graphs,
            "every pack has its own shape, and a CUDA graph replays one",
            'set cuda_graph_impl="none"',
        )
    if s.hybrid_context_parallel:
        yield Violation(
            "hybrid_context_parallel",
            True,
            "Megatron-Core's hybrid context parallelism schedules micro-batches itself",
            "set hybrid_context_parallel=False",
        )
    if s.pipeline_parallel_size > 1 and not s.variable_seq_lengths:
        yield Violation(
            "variable_seq_lengths",
            False,
            "pipeline stages exchange packs of different lengths",
            "set variable_seq_lengths=True",
        )
    if s.virtual_pipeline_size is not None and s.pipeline_parallel_size < 2:
        yield Violation(
            "virtual_pipeline_size",
            s.virtual_pipeline_size,
            "an interleaved schedule needs at least two pipeline stages",
            "raise pipeline_model_parallel_size or drop the virtual pipeline",
        )
    group = s.microbatch_group_size_per_vp_stage
    interleaved = s.virtual_pipeline_size is not None
    if interleaved and group is not None and group < s.pipeline_parallel_size:
        yield Violation(
            "microbatch_group_size_per_vp_stage",
            group,
            f"an interleaved schedule needs at least the {s.pipeline_parallel_size} stages",
            f"set it to {s.pipeline_parallel_size} or more",
        )


def _dynamic_cp(s: PackingSettings) -> Iterator[Violation]:
    wanted = s.scheduler in DYNAMIC_SCHEDULERS
    if s.scheduler and wanted is not s.dynamic_context_parallel:
        yield Violation(
            "dynamic_context_parallel",
            s.dynamic_context_parallel,
            f"the scheduler {s.scheduler} {'chooses' if wanted else 'does not choose'} a CP size "
            "per micro-batch",
            f"set it to {wanted}, or name another scheduler",
        )
    ranks = s.context_parallel_size * (s.data_parallel_size or 0)
    capacity = s.max_seqlen_per_dp_cp_rank or 0
    if s.dynamic_context_parallel and 0 < capacity * ranks < s.max_sequence_length:
        yield Violation(
            "max_seqlen_per_dp_cp_rank",
            capacity,
            f"times the {ranks} data- and context-parallel ranks it must cover the longest "
            f"sample, {s.max_sequence_length} tokens",
            f"set it to at least {-(-s.max_sequence_length // ranks)}, or drop longer samples",
        )
