"""One `SampleExchange` per process group and set of rules, kept between the steps.

The exchange's metadata goes over Gloo. Where a group is NCCL, a Gloo twin of it is made at first
use, by its members alone.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from evenstep.exchange import (
    MismatchError,
    Offer,
    Patience,
    PeerFailedError,
    SampleExchange,
    Setting,
)

_exchanges: dict[tuple[ProcessGroup, str], SampleExchange] = {}  # by group and settings
_latest: dict[ProcessGroup, SampleExchange] = {}  # the one that was used last
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
    group: ProcessGroup, settings: Mapping[str, Setting], patience: Patience
) -> SampleExchange:
    """Return the group's exchange, made at first use; then every rank of the group must call.

    Args:
        group: Whose ranks exchange.
        settings: What they must have set alike.
        patience: How long to wait for peers. It may differ between ranks, and is that of the
            exchange's first use from then on.

    Raises:
        MismatchError: On every rank, if settings differ at first use.
        ProtocolError: On every rank, if only some ranks come with settings that are new.
        PeerFailedError: If a rank failed.
    """
    _forget_destroyed()
    # Their text, as it is what the ranks compare: a setting of a wrong type may have no hash.
    key = (group, repr(sorted(settings.items())))
    if key not in _exchanges:
        _exchanges[key] = _new_exchange(group, settings, patience)
        try:
            _exchanges[key].compare_settings()
        except (MismatchError, PeerFailedError):
            del _exchanges[key]  # on all ranks, so that they may try again
            raise
    _latest[group] = _exchanges[key]
    return _exchanges[key]


def tell_failure(group: ProcessGroup, failure: Exception) -> None:
    """Fail this rank's next round over a group, so that no peer waits for it in vain.

    That can be done without knowing the settings, because a report of failure is read before the
    settings are compared. Where an exchange is kept, its rounds are counted, so it must be the one
    that the peers use: the latest.

    Args:
        group: Whose ranks to tell; they must all call, this or a round.
        failure: What they are told.

    Raises:
        Exception: `failure`; or what keeps the peers from hearing of it.
    """

    def offer() -> Offer:
        raise failure

    _forget_destroyed()
    exchange = _latest.get(group) or _new_exchange(group, {}, Patience())
    exchange.agree(offer)


def _new_exchange(
    group: ProcessGroup, settings: Mapping[str, Setting], patience: Patience
) -> SampleExchange:
    alone = group.size() == 1
    return SampleExchange(
        rank=group.rank(),
        world_size=group.size(),
        control_group=None if alone else _control_group(group),
        payload_group=None if alone else group,
        settings=settings,
        patience=patience,
    )


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
    for group in gone & _latest.keys():
        del _latest[group]
