"""One `SampleExchange` per process group and set of rules, kept between the steps.

The exchange's metadata goes over Gloo. Where a group is NCCL, a Gloo twin of it is made at first
use, by its members alone.
"""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from evenstep.exchange import Patience, SampleExchange, Setting

_exchanges: dict[tuple[ProcessGroup, tuple[tuple[str, Setting], ...]], SampleExchange] = {}
_twins: dict[ProcessGroup, ProcessGroup] = {}


def communication_device(group: ProcessGroup) -> torch.device:
    """Return where tensors must be for the group's collectives."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def ranks_of(group: ProcessGroup) -> list[int] | None:
    """Return the global ranks of a group in its order, None if it was destroyed."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return None


def exchange_over(
    group: ProcessGroup, settings: dict[str, Setting], *, timeout_s: float
) -> SampleExchange:
    """Return the group's exchange, made at first use; then every rank of the group must call.

    Args:
        group: Whose ranks exchange.
        settings: What they must have set alike.
        timeout_s: Seconds to wait for peers.

    Raises:
        MismatchError: On every rank, if settings differ.
    """
    _forget_destroyed()
    key = (group, (*sorted(settings.items()), ("timeout_s", timeout_s)))
    exchange = _exchanges.get(key)
    if exchange is None:
        alone = group.size() == 1
        exchange = SampleExchange(
            rank=group.rank(),
            world_size=group.size(),
            control_group=None if alone else _control_group(group),
            payload_group=None if alone else group,
            settings=settings,
            patience=Patience(timeout_s=timeout_s),
        )
        exchange.compare_settings()
        _exchanges[key] = exchange
    return exchange


def _control_group(group: ProcessGroup) -> ProcessGroup:
    if communication_device(group).type == "cpu":
        return group
    if group not in _twins:
        twin = dist.new_group(
            dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
        )
        assert isinstance(twin, ProcessGroup)  # this rank is a member
        _twins[group] = twin
    return _twins[group]


def _forget_destroyed() -> None:
    """Drop what belongs to groups that were destroyed, so that they do not live on here."""
    used = {group for group, _ in _exchanges} | {*_twins.keys(), *_twins.values()}
    gone = {group for group in used if ranks_of(group) is None}
    for group, twin in [*_twins.items()]:
        if {group, twin} & gone:
            del _twins[group]
            gone.add(group)  # its exchange speaks over the twin
    for key in [key for key in _exchanges if key[0] in gone]:
        del _exchanges[key]
