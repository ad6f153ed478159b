"""Read from a model's configuration and process groups what our scheduler needs."""

from evenstep.balance import SequenceLoad
from evenstep.gbpacking.fixed_step import FixedStepScheduler
from evenstep.gbpacking.links import communication_device
from evenstep.gbpacking.sample import padding_multiple
from evenstep.gbpacking.stage import ModelGroups, mtp_reads_here, needed_keys
from evenstep.gbpacking.step_plan import PackingOptions, StepRules


def step_scheduler(
    name: str, model_config: object, groups: ModelGroups, options: PackingOptions | None
) -> FixedStepScheduler:
    """Return our scheduler, set up as the model's configuration and process groups say.

    Args:
        name: The scheduler.
        model_config: Megatron-Core's `TransformerConfig`.
        groups: The model's process groups.
        options: What the user tunes; None for the defaults.

    Raises:
        ValueError: If the configuration lacks what packing needs.
    """
    options = options or PackingOptions()
    vp_size = virtual_pipeline_size(model_config)
    rules = StepRules(
        scheduler=name,
        capacity=capacity_of(model_config) * groups.cp.size(),
        num_ranks=groups.dp.size(),
        multiple=microbatch_multiple(model_config, groups),
        load=options.load or load_of(model_config),
        options=options,
    )
    has_mtp = mtp_reads_here(model_config, groups, vp_stage=None, vp_size=vp_size)
    return FixedStepScheduler(
        rules,
        groups,
        keys=needed_keys(
            groups.pp.rank(), groups.pp.size(), vp_stage=None, vp_size=vp_size, has_mtp=has_mtp
        ),
        multiple=padding_multiple(
            context_parallel_size=groups.cp.size(),
            tensor_parallel_size=groups.tp.size(),
            sequence_parallel=getattr(model_config, "sequence_parallel", None) is True,
        ),
        device=options.device or communication_device(groups.tp),
    )


def capacity_of(model_config: object) -> int:
    """Return the most tokens of a rank.

    Raises:
        ValueError: If the configuration does not say.
    """
    tokens_per_rank = getattr(model_config, "max_seqlen_per_dp_cp_rank", None)
    if type(tokens_per_rank) is not int or tokens_per_rank < 1:
        raise ValueError(
            f"max_seqlen_per_dp_cp_rank is {tokens_per_rank!r} on the model's configuration; set "
            "it to the tokens that fit into one rank's memory"
        )
    return tokens_per_rank


def microbatch_multiple(model_config: object, groups: ModelGroups) -> int:
    """Return what the number of micro-batches must be a multiple of for the pipeline schedule.

    Raises:
        ValueError: If the configuration has a group size that is none.
    """
    if virtual_pipeline_size(model_config) is None:
        return 1
    group_size = getattr(model_config, "microbatch_group_size_per_vp_stage", None)
    if group_size is None:
        return groups.pp.size()
    if type(group_size) is not int or group_size < 1:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {group_size!r} on the model's configuration; "
            "it must be a positive integer, or None for the pipeline size"
        )
    return group_size


def load_of(model_config: object) -> SequenceLoad:
    """Return the load of a sequence for a dense model of the configured width.

    Raises:
        ValueError: If the configuration has no width.
    """
    hidden_size = getattr(model_config, "hidden_size", None)
    if type(hidden_size) is not int or hidden_size < 1:
        raise ValueError(
            f"hidden_size is {hidden_size!r} on the model's configuration; it must be a positive "
            "integer, or pass options with load=SequenceLoad(...)"
        )
    return SequenceLoad.from_hidden_size(hidden_size)


def virtual_pipeline_size(model_config: object) -> int | None:
    """Return the model chunks per pipeline stage, None without interleaving.

    Only an integer counts: a stand-in that answers every attribute has no chunks.
    """
    size = getattr(model_config, "virtual_pipeline_model_parallel_size", None)
    return size if type(size) is int and size > 0 else None
