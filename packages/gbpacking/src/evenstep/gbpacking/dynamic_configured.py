"""Read from a model's configuration and process groups what dynamic context parallelism needs."""

from typing import cast

from evenstep.gbpacking.configured import capacity_of, load_of, microbatch_multiple
from evenstep.gbpacking.dynamic_plan import DynamicCpOptions, DynamicStepRules
from evenstep.gbpacking.dynamic_step import DomainGroups, DynamicStepScheduler
from evenstep.gbpacking.links import communication_device
from evenstep.gbpacking.sample import padding_multiple
from evenstep.gbpacking.stage import ModelGroups, needed_keys

_UNSUPPORTED = {
    "mtp_num_layers": "its layers shift tokens over the CP group that the model was built with",
    "multi_latent_attention": "its attention refuses a CP group per micro-batch",
    "is_hybrid_model": "Mamba layers run on the CP group that the model was built with",
}
"""What released Megatron-Core does not run on a group per micro-batch, by setting, and why."""


def dynamic_step_scheduler(
    name: str, model_config: object, groups: ModelGroups, options: DynamicCpOptions | None
) -> DynamicStepScheduler:
    """Return our scheduler, set up as the model's configuration and process groups say.

    Args:
        name: The scheduler.
        model_config: Megatron-Core's `TransformerConfig`.
        groups: The model's process groups, with `dp_cp`.
        options: What the user tunes; None for the defaults.

    Raises:
        ValueError: If the configuration lacks what packing needs, or has what cannot run.
    """
    options = options or DynamicCpOptions()
    _check_layers(model_config)
    domain = with_domain(groups)
    rules = DynamicStepRules(
        scheduler=name,
        tokens_per_rank=capacity_of(model_config),
        num_ranks=domain.dp_cp.size(),
        multiple=microbatch_multiple(model_config, groups),
        min_cp_size=options.min_cp_size or _configured_min_size(model_config),
        load=options.load or load_of(model_config),
        options=options,
    )
    return DynamicStepScheduler(
        rules,
        domain,
        keys=needed_keys(
            groups.pp.rank(), groups.pp.size(), vp_stage=None, vp_size=None, has_mtp=False
        ),
        multiple=padding_multiple(
            context_parallel_size=groups.cp.size(),
            data_parallel_size=groups.dp.size(),
            tensor_parallel_size=groups.tp.size(),
            sequence_parallel=getattr(model_config, "sequence_parallel", None) is True,
            dynamic_context_parallel=True,
        ),
        device=options.device or communication_device(groups.tp),
    )


def _check_layers(model_config: object) -> None:
    for setting, why in _UNSUPPORTED.items():
        value = getattr(model_config, setting, None)
        if isinstance(value, int) and value:
            raise ValueError(
                f"{setting} is {value!r} with dynamic context parallelism; {why}; use a fixed CP "
                "size with this model"
            )


def with_domain(groups: ModelGroups) -> DomainGroups:
    """Return the groups, if they have that of the domain, in the order of its ranks."""
    dp_cp = getattr(groups, "dp_cp", None)
    if dp_cp is None:
        raise ValueError(
            "the process groups have no dp_cp; dynamic context parallelism forms its groups from "
            "all data- and context-parallel ranks, pass a ProcessGroupCollection with dp_cp"
        )
    place = groups.dp.rank() * groups.cp.size() + groups.cp.rank()
    if dp_cp.size() != groups.dp.size() * groups.cp.size() or dp_cp.rank() != place:
        raise ValueError(
            f"this is rank {dp_cp.rank()} of {dp_cp.size()} in dp_cp, rank {groups.dp.rank()} of "
            f"{groups.dp.size()} in dp and {groups.cp.rank()} of {groups.cp.size()} in cp; dp_cp "
            "must hold the ranks of each cp group in a row, use Megatron-Core's default order"
        )
    return cast("DomainGroups", groups)


def _configured_min_size(model_config: object) -> int:
    size = getattr(model_config, "min_dynamic_context_parallel_size", None)
    return size if type(size) is int else 1
