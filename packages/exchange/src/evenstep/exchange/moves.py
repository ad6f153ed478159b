"""Which samples a rank keeps, sends and receives: pure, from a plan and the samples' sizes."""

import ctypes
import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from evenstep.balance import Route, RouteColumns
from evenstep.exchange.garbage import collection_paused

DIGEST_BYTES = 8
"""Length of `Moves.digest`."""


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


# `Placement(...)` in C, as there is one for each sample.
_NEW_PLACEMENT: Callable[[tuple[int, ...]], Placement] = partial(tuple.__new__, Placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """One rank's part of a plan.

    Attributes:
        kept: The samples that stay.
        sends: The samples for each rank.
        receives: The samples from each rank.
        send_splits: Bytes for each rank.
        recv_splits: Bytes from each rank.
        shared: For each rank, whether bytes go through memory that this rank shares with it, and
            not over the network.
        shift_peaks: For each distance d, the most bytes that any rank r sends to r + d, modulo
            the number of ranks, over the network; equal on all ranks.
        peak_total: The most bytes that any rank sends or receives over the network; equal on all
            ranks.
        digest: Of the whole plan with all its splits; equal on all ranks.
    """

    kept: tuple[Placement, ...]
    sends: tuple[tuple[Placement, ...], ...]
    receives: tuple[tuple[Placement, ...], ...]
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    shared: tuple[bool, ...]
    shift_peaks: tuple[int, ...]
    peak_total: int
    digest: bytes

    def over_network(self, splits: Sequence[int]) -> list[int]:
        """Return splits without the bytes that go through shared memory."""
        return [0 if shared else nbytes for nbytes, shared in zip(splits, self.shared, strict=True)]


@collection_paused()
def plan_moves(
    deliveries: Iterable[tuple[int, Route]] | RouteColumns,
    *,
    holders: Tensor,
    nbytes: Tensor,
    rank: int,
    world_size: int,
    hosts: Sequence[int] | None = None,
) -> Moves:
    """Derive what `rank` keeps, sends and receives.

    Sender and receiver sort by (dst_slot, canonical_pos, local_idx), so the bytes line up.

    Args:
        deliveries: Global index and route of each sample. A sample may go to several ranks, but
            only once to each. Or the routes of all samples, each delivered once, as columns.
        holders: int64 [samples, 2], rank and local index of each sample, by global index.
        nbytes: int64 [samples], serialized bytes of each sample, by global index.
        rank: This rank in the group.
        world_size: Number of ranks in the group.
        hosts: A number for each rank; ranks of equal numbers share memory. None: no ranks do.

    Raises:
        RuntimeError: If the plan is broken: a sample is left out, delivered twice to a rank, or
            routed to a rank that does not exist.
    """
    # The columns of all samples of the window are tensors; only this rank's become tuples.
    table = _table(deliveries)
    index, slot, owner, position = map(int64_tensor, table)
    if table[0] != _counted(len(holders)):  # not each sample once, in order
        _check_coverage(index, owner, len(holders), world_size)
        holders, nbytes = holders[index], nbytes[index]
    _check_owners(owner, world_size)
    holder, local = holders.unbind(1)
    kept: list[Placement] = []
    sends: list[list[Placement]] = [[] for _ in range(world_size)]
    receives: list[list[Placement]] = [[] for _ in range(world_size)]
    send_splits, recv_splits = [0] * world_size, [0] * world_size
    mine = ((holder == rank) | (owner == rank)).nonzero().view(-1)
    columns = torch.stack([holder, owner, nbytes, slot, position, local])[:, mine]
    sources, owners, counts, *placed = columns.tolist()
    for source, to, count, place in zip(
        sources, owners, counts, map(_NEW_PLACEMENT, zip(*placed, strict=True)), strict=True
    ):
        if source == to:
            kept.append(place)
        elif source == rank:
            sends[to].append(place)
            send_splits[to] += count
        else:
            receives[source].append(place)
            recv_splits[source] += count
    hosts = hosts or range(world_size)
    none = torch.empty(0, dtype=torch.int64)
    remote = _Pairs(none, none, none, world_size)
    if len({*hosts}) > 1:
        host = torch.tensor(hosts)
        apart = (host[holder] != host[owner]).nonzero().view(-1)
        remote = _Pairs.of((holder * world_size + owner)[apart], nbytes[apart], world_size)
    return Moves(
        kept=tuple(sorted(kept)),
        sends=tuple([tuple(sorted(places)) for places in sends]),
        receives=tuple([tuple(sorted(places)) for places in receives]),
        send_splits=tuple(send_splits),
        recv_splits=tuple(recv_splits),
        shared=tuple([host == hosts[rank] and peer != rank for peer, host in enumerate(hosts)]),
        shift_peaks=remote.shift_peaks(),
        peak_total=remote.peak_total(),
        digest=_digest(table, holders, nbytes),
    )


class _Pairs(NamedTuple):
    """The pairs of ranks between which bytes go over the network, ascending: int64 tensors."""

    sender: Tensor
    receiver: Tensor
    nbytes: Tensor
    world_size: int

    @classmethod
    def of(cls, pair: Tensor, nbytes: Tensor, world_size: int) -> Self:
        """Add up samples by pair, which is sender * world_size + receiver."""
        distinct, where = torch.unique(pair, return_inverse=True)
        total = torch.zeros_like(distinct).index_add_(0, where, nbytes)
        return cls(distinct // world_size, distinct % world_size, total, world_size)

    def shift_peaks(self) -> tuple[int, ...]:
        """Return the most bytes of a pair at each distance."""
        if not len(self.nbytes):
            return (0,) * self.world_size
        shift = (self.receiver - self.sender) % self.world_size
        return tuple(self._zeros().scatter_reduce_(0, shift, self.nbytes, "amax").tolist())

    def peak_total(self) -> int:
        """Return the most bytes of a rank in one direction."""
        if not len(self.nbytes):
            return 0
        sent, received = (
            self._zeros().index_add_(0, side, self.nbytes) for side in (self.sender, self.receiver)
        )
        return int(torch.maximum(sent, received).max())

    def _zeros(self) -> Tensor:
        return torch.zeros(self.world_size, dtype=torch.int64)


def _table(deliveries: Iterable[tuple[int, Route]] | RouteColumns) -> "list[array[int]]":
    """Return the columns of deliveries: global index, slot, owner, canonical position."""
    if isinstance(deliveries, RouteColumns):
        return [_counted(len(deliveries.dst_slot)), *deliveries]
    indices, routes = tuple(zip(*deliveries, strict=True)) or ((), ())
    routed = tuple(zip(*routes, strict=True)) or ((), (), ())
    return [array("q", column) for column in (indices, *routed)]


@lru_cache(4)
def _counted(count: int) -> "array[int]":
    return array("q", range(count))


def int64_tensor(values: "array[int]") -> Tensor:
    """Return a tensor on the memory of an array of type "q"."""
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0).long()


def _check_owners(owner: Tensor, world_size: int) -> None:
    if not len(owner):
        return
    first, last = map(int, owner.aminmax())
    if not 0 <= first <= last < world_size:
        raise RuntimeError(
            f"the plan names owner ranks {first} to {last} in a group of {world_size}"
        )


def _check_coverage(index: Tensor, owner: Tensor, num_samples: int, world_size: int) -> None:
    if not len(index):
        raise RuntimeError(f"the plan names no sample; there are {num_samples}")
    first, last = map(int, index.aminmax())
    if not 0 <= first <= last < num_samples:
        raise RuntimeError(f"the plan names samples {first} to {last}; there are {num_samples}")
    times = torch.bincount(index, minlength=num_samples)
    if not times.all():
        raise RuntimeError(
            f"the plan covers {int(times.count_nonzero())} samples of {num_samples}; look at "
            f"global index {int(times.argmin())}"
        )
    if len(index) > num_samples and len(torch.unique(index * world_size + owner)) < len(index):
        raise RuntimeError("the plan delivers a sample twice to one rank")


def _digest(table: "Sequence[array[int]]", holders: Tensor, nbytes: Tensor) -> bytes:
    """Return a digest of who holds what, how large it is, and where it goes."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for values in table:
        digest.update(values)
    for column in (holders.contiguous(), nbytes.contiguous()):
        digest.update(ctypes.string_at(column.data_ptr(), column.nbytes))
    return digest.digest()
