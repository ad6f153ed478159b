"""Which scheduler runs a step, and whose loop: Megatron-Core's where it can, else ours."""

import logging
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from evenstep.balance import DynamicCpStrategy, PackingStrategy
from evenstep.gbpacking.enabled import (
    dynamic_context_parallel_enabled,
    global_batch_packing_enabled,
)
from evenstep.gbpacking.megatron_api import probe_global_batch_packing_support

logger = logging.getLogger(__name__)

SCHEDULERS: Final[Mapping[str, PackingStrategy]] = MappingProxyType(
    {"dp_balanced": "arrival", "evenstep_balanced": "balanced"}
)
"""Schedulers that need no Megatron-Core that has one, by name."""

DYNAMIC_SCHEDULERS: Final[Mapping[str, DynamicCpStrategy]] = MappingProxyType(
    {"default_dynamic_cp": "bucketed", "evenstep_dynamic_cp": "balanced"}
)
"""The same for dynamic context parallelism, which they need switched on."""


class SchedulerChoice(NamedTuple):
    """What runs, where, and why.

    Attributes:
        name: The scheduler.
        loop: Whose loop runs it.
        reason: Why, for the log.
    """

    name: str
    loop: Literal["megatron-core", "evenstep"]
    reason: str


def choose_scheduler(model_config: object) -> SchedulerChoice:
    """Return which scheduler the configuration asks for and whose loop runs it; logged once.

    Megatron-Core runs every scheduler that it has registered; `register_with_megatron` adds ours
    where it has a registry. Otherwise evenstep's own loop runs, if it knows the name.

    Raises:
        ValueError: If no scheduler is configured, or neither side can run the one that is.
    """
    if not global_batch_packing_enabled(model_config):
        raise ValueError(
            "sequence_packing_scheduler is not set on the model's configuration; name one of "
            f"{', '.join([*SCHEDULERS, *DYNAMIC_SCHEDULERS])}"
        )
    name = str(getattr(model_config, "sequence_packing_scheduler", ""))
    return choice_for(name, dynamic_context_parallel_enabled(model_config))


@cache
def choice_for(name: str, dynamic_cp: bool) -> SchedulerChoice:
    """Return the choice for a scheduler's name; cached, it is asked once per micro-batch."""
    refusal = probe_global_batch_packing_support(name, dynamic_cp=dynamic_cp)
    if refusal is None:
        choice = SchedulerChoice(name, "megatron-core", "Megatron-Core has it registered")
    elif name in (DYNAMIC_SCHEDULERS if dynamic_cp else SCHEDULERS):
        choice = SchedulerChoice(name, "evenstep", refusal)
    else:
        raise ValueError(
            f"sequence_packing_scheduler is {name!r}"
            f"{' with dynamic_context_parallel' if dynamic_cp else ''}; {refusal} evenstep itself "
            f"runs {', '.join(SCHEDULERS)}, and with dynamic_context_parallel=True "
            f"{', '.join(DYNAMIC_SCHEDULERS)}"
        )
    logger.info("sequence packing: %s runs in %s's loop: %s", *choice)
    return choice
