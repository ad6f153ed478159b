"""Which samples a rank keeps, sends and receives: pure, from a plan and the samples' sizes."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from evenstep.balance import Route


class Placement(NamedTuple):
    """Where a sample of some rank goes; in the order in which bytes are packed.

    Attributes:
        dst_slot: The micro-batch of the window.
        canonical_pos: The place in that micro-batch over all ranks.
        local_idx: The sample's local index on the rank that holds it.
    """

    dst_slot: int
    canonical_pos: int
    local_idx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """One rank's part of a plan.

    Attributes:
        kept: The samples that stay.
        sends: The samples for each rank.
        receives: The samples from each rank.
        send_splits: Bytes for each rank.
        recv_splits: Bytes from each rank.
        shift_peaks: For each distance d, the most bytes that any rank r sends to r + d, modulo
            the number of ranks; equal on all ranks.
        peak_total: The most bytes that any rank sends or receives; equal on all ranks.
        digest: Of the whole plan with all its splits; equal on all ranks.
    """

    kept: tuple[Placement, ...]
    sends: tuple[tuple[Placement, ...], ...]
    receives: tuple[tuple[Placement, ...], ...]
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    shift_peaks: tuple[int, ...]
    peak_total: int
    digest: bytes


def plan_moves(
    deliveries: Iterable[tuple[int, Route]],
    *,
    holders: Sequence[tuple[int, int]],
    nbytes: Sequence[int],
    rank: int,
    world_size: int,
) -> Moves:
    """Derive what `rank` keeps, sends and receives.

    Sender and receiver sort by (dst_slot, canonical_pos, local_idx), so the bytes line up.

    Args:
        deliveries: Global index and route of each sample. A sample may go to several ranks, but
            only once to each.
        holders: `(rank, local index)` of each sample, by global index.
        nbytes: Serialized bytes of each sample, by global index.
        rank: This rank in the group.
        world_size: Number of ranks in the group.

    Raises:
        RuntimeError: If the plan is broken: a sample is left out, delivered twice to a rank, or
            routed to a rank that does not exist.
    """
    deliveries = tuple(deliveries)
    _check(deliveries, len(holders), world_size)
    kept: list[Placement] = []
    sends: list[list[Placement]] = [[] for _ in range(world_size)]
    receives: list[list[Placement]] = [[] for _ in range(world_size)]
    splits: dict[int, int] = {}
    for index, (slot, owner, position) in deliveries:
        holder, local = holders[index]
        if holder != owner:
            pair = holder * world_size + owner
            splits[pair] = splits.get(pair, 0) + nbytes[index]
            if holder == rank:
                sends[owner].append(Placement(slot, position, local))
            elif owner == rank:
                receives[holder].append(Placement(slot, position, local))
        elif holder == rank:
            kept.append(Placement(slot, position, local))
    peers = range(world_size)
    return Moves(
        kept=tuple(sorted(kept)),
        sends=tuple(tuple(sorted(samples)) for samples in sends),
        receives=tuple(tuple(sorted(samples)) for samples in receives),
        send_splits=tuple(splits.get(rank * world_size + peer, 0) for peer in peers),
        recv_splits=tuple(splits.get(peer * world_size + rank, 0) for peer in peers),
        shift_peaks=_shift_peaks(splits, world_size),
        peak_total=_peak_total(splits, world_size),
        digest=_digest(deliveries, splits),
    )


def _check(deliveries: tuple[tuple[int, Route], ...], num_samples: int, world_size: int) -> None:
    seen = {index * world_size + route[1] for index, route in deliveries}
    if len(seen) != len(deliveries):
        raise RuntimeError("the plan delivers a sample twice to one rank")
    owners = {route[1] for _, route in deliveries}
    if owners and not 0 <= min(owners) <= max(owners) < world_size:
        raise RuntimeError(
            f"the plan names owner ranks {min(owners)} to {max(owners)} in a group of {world_size}"
        )
    planned = {index for index, _ in deliveries}
    if planned != {*range(num_samples)}:
        odd = min(planned ^ {*range(num_samples)})
        raise RuntimeError(
            f"the plan covers {len(planned)} samples of {num_samples}; look at global index {odd}"
        )


def _shift_peaks(splits: dict[int, int], world_size: int) -> tuple[int, ...]:
    peaks = [0] * world_size
    for pair, nbytes in splits.items():
        sender, receiver = divmod(pair, world_size)
        shift = (receiver - sender) % world_size
        peaks[shift] = max(peaks[shift], nbytes)
    return tuple(peaks)


def _peak_total(splits: dict[int, int], world_size: int) -> int:
    sent, received = [0] * world_size, [0] * world_size
    for pair, nbytes in splits.items():
        sender, receiver = divmod(pair, world_size)
        sent[sender] += nbytes
        received[receiver] += nbytes
    return max(*sent, *received)


def _digest(deliveries: tuple[tuple[int, Route], ...], splits: dict[int, int]) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    digest.update(array("q", [index for index, _ in deliveries]).tobytes())
    digest.update(array("q", chain.from_iterable(route for _, route in deliveries)).tobytes())
    digest.update(array("q", chain.from_iterable(sorted(splits.items()))).tobytes())
    return digest.digest()
