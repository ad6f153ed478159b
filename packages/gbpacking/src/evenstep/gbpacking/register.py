"""Put our scheduler into Megatron-Core's own registry, where it has one (main and dev)."""

import enum
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

from evenstep.balance import PackingStrategy, SequenceLoad, Synchronize, plan_packing
from evenstep.gbpacking.choice import SCHEDULERS, choice_for
from evenstep.gbpacking.megatron_api import megatron_version, scheduler_api

logger = logging.getLogger(__name__)

_NAME: Final = "evenstep_balanced"
_STRATEGY: Final[PackingStrategy] = SCHEDULERS[_NAME]


def register_with_megatron(
    load: SequenceLoad, *, synchronize: Synchronize = "microbatch", extra_microbatches: float = 0.5
) -> str:
    """Register `evenstep_balanced` with the installed Megatron-Core; twice replaces the first.

    Afterwards `sequence_packing_scheduler="evenstep_balanced"` works in Megatron-Core's own loop.
    Call it on every rank, before the first step, with the same arguments.

    Args:
        load: Load of a sequence, for example `SequenceLoad.from_hidden_size(hidden_size)`:
            Megatron-Core does not tell its schedulers the model's width.
        synchronize: As in `PackingOptions`.
        extra_microbatches: As in `PackingOptions`.

    Returns:
        The scheduler's name.

    Raises:
        RuntimeError: If the installed Megatron-Core has no registry; releases have none, and run
            ours without being told.
    """
    register(
        _NAME,
        based_on="dp_balanced",
        derive=lambda base: _scheduler_class(base, load, synchronize, extra_microbatches),
    )
    return _NAME


def register(name: str, *, based_on: str, derive: Callable[[type], type]) -> None:
    """Put a scheduler into Megatron-Core's registry.

    Args:
        name: Its name.
        based_on: The registered scheduler that it derives from.
        derive: Makes its class from that one's.

    Raises:
        RuntimeError: If the installed Megatron-Core has no registry with that scheduler.
    """
    try:
        scheduler_api()
        module = importlib.import_module("megatron.core.datasets.data_schedule")
        registry = module.scheduler_map
        known = next(key for key in registry if getattr(key, "value", key) == based_on)
    except (ImportError, AttributeError, StopIteration) as error:
        raise RuntimeError(
            f"Megatron-Core {megatron_version()} has no scheduler registry to register with "
            f"that knows {based_on} ({error!r}); the entry points of evenstep.gbpacking run {name} "
            "there by themselves"
        ) from error
    key = _enum_member(type(known), name) if isinstance(known, enum.Enum) else name
    registry[key] = derive(registry[known])
    choice_for.cache_clear()
    logger.info("registered %s with Megatron-Core %s", name, megatron_version())


def _scheduler_class(
    base: type, load: SequenceLoad, synchronize: Synchronize, extra_microbatches: float
) -> type:
    """Return a scheduler that keeps Megatron-Core's loop and replaces only how packs are chosen."""

    class EvenstepBalancedScheduler(base):  # type: ignore[misc] # the installed release's own
        """Balances packs over the data-parallel ranks."""

        def get_groups_and_subsamples(
            self, sample_id_seqlens: Sequence[tuple[int, int]], *_: object, **__: object
        ) -> list[list[list[int]]]:
            """Return `[micro-batch][dp_cp rank][sample ids]`; the CP ranks of a pack are alike."""
            plan = plan_packing(
                [int(length) for _, length in sample_id_seqlens],
                capacity=self.max_seqlen_per_dp_cp_rank * self.cp_size,
                num_ranks=self.dp_size,
                load=load,
                microbatch_multiple=self.microbatch_group_size_per_vp_stage or 1,
                synchronize=synchronize,
                extra_microbatches=extra_microbatches,
                strategy=_STRATEGY,
            )
            ids = [sample_id for sample_id, _ in sample_id_seqlens]
            return [
                [[ids[index] for index in pack] for pack in packs for _ in range(self.cp_size)]
                for packs in plan.microbatches
            ]

    return EvenstepBalancedScheduler


def _enum_member(schedulers: type[enum.Enum], name: str) -> enum.Enum:
    """Return the member for a name, added to the enum if it is not there yet.

    Python has no public way to extend an enum that has members. Megatron-Core looks schedulers up
    by member name or by value; both tables are filled.
    """
    label = name.upper()
    if label in schedulers.__members__:
        return schedulers[label]
    member = object.__new__(schedulers)
    member._name_, member._value_ = label, name
    setattr(schedulers, label, member)
    schedulers._member_map_[label] = member
    schedulers._value2member_map_[name] = member
    schedulers._member_names_.append(label)
    return member
