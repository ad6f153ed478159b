"""What a configuration asks for: these functions only look at it."""

DYNAMIC_CP_SCHEDULERS: tuple[str, ...] = ("default_dynamic_cp",)
"""Scheduler names that form dynamic context-parallel groups per micro-batch."""


def global_batch_packing_enabled(model_config: object) -> bool:
    """Return whether an online packing scheduler is configured on the model.

    Only a scheduler's name counts: a stand-in that answers every attribute (a mock, a partial
    namespace) must not send a step through the scheduler.

    Args:
        model_config: Megatron-Core's `TransformerConfig`, or anything in its place.
    """
    scheduler = getattr(model_config, "sequence_packing_scheduler", None)
    return isinstance(scheduler, str) and bool(scheduler)


def dynamic_context_parallel_enabled(model_config: object) -> bool:
    """Return whether dynamic context parallelism is configured: True itself, not any truthy value.

    Args:
        model_config: Megatron-Core's `TransformerConfig`, or anything in its place.
    """
    return getattr(model_config, "dynamic_context_parallel", None) is True
