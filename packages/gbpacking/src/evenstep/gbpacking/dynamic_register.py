"""Put our scheduler of dynamic context parallelism into Megatron-Core's registry (dev)."""

from collections.abc import Sequence
from typing import Final

from evenstep.balance import SequenceLoad, plan_dynamic_cp
from evenstep.gbpacking.choice import DYNAMIC_SCHEDULERS
from evenstep.gbpacking.dynamic_plan import DynamicCpOptions
from evenstep.gbpacking.register import register

_NAME: Final = "evenstep_dynamic_cp"


def register_dynamic_with_megatron(
    load: SequenceLoad, *, options: DynamicCpOptions | None = None
) -> str:
    """Register `evenstep_dynamic_cp` with the installed Megatron-Core; twice replaces the first.

    Afterwards `sequence_packing_scheduler="evenstep_dynamic_cp"` works in Megatron-Core's own loop,
    on its own groups. Call it on every rank, before the first step, with the same arguments.

    Args:
        load: Load of a sequence, for example `SequenceLoad.from_hidden_size(hidden_size)`:
            Megatron-Core does not tell its schedulers the model's width.
        options: Tuning; of it, `load`, `timeout_s` and `device` have no meaning here.

    Returns:
        The scheduler's name.

    Raises:
        RuntimeError: If the installed Megatron-Core has no registry with `default_dynamic_cp`; ours
            then runs without being told.
    """
    chosen = options or DynamicCpOptions()
    register(
        _NAME,
        based_on="default_dynamic_cp",
        derive=lambda base: _scheduler_class(base, load, chosen),
    )
    return _NAME


def _scheduler_class(base: type, load: SequenceLoad, options: DynamicCpOptions) -> type:
    """Return a scheduler that keeps Megatron-Core's loop and replaces how groups are chosen."""

    class EvenstepDynamicCpScheduler(base):  # type: ignore[misc] # the installed release's own
        """Balances groups over all DP x CP ranks."""

        def get_groups_and_subsamples(
            self, sample_id_seqlens: Sequence[tuple[int, int]], *_: object, **__: object
        ) -> list[list[list[int]]]:
            """Return `[micro-batch][dp_cp rank][sample ids]`: the ranks of a group are alike."""
            plan = plan_dynamic_cp(
                [int(length) for _, length in sample_id_seqlens],
                tokens_per_rank=self.max_seqlen_per_dp_cp_rank,
                num_ranks=self.dp_size * self.cp_size,
                load=load,
                communication=options.communication,
                min_cp_size=options.min_cp_size or 1,
                cp_sizes=options.cp_sizes,
                microbatch_multiple=self.microbatch_group_size_per_vp_stage or 1,
                extra_microbatches=options.extra_microbatches,
                strategy=DYNAMIC_SCHEDULERS[_NAME],
            )
            ids = [sample_id for sample_id, _ in sample_id_seqlens]
            return [
                [[ids[i] for i in group.sequences] for group in groups for _ in range(group.size)]
                for groups in plan.microbatches
            ]

    return EvenstepDynamicCpScheduler
