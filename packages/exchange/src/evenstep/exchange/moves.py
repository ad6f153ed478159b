"""Which samples a rank keeps, sends and receives: pure, from a plan and the samples' sizes."""

import ctypes
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from evenstep.balance import Route, RouteColumns
from evenstep.exchange.garbage import collection_paused

DIGEST_BYTES = 8
"""Length of `Moves.digest`."""

# Up to so many values Python looks through a column before an operator of torch has begun.
_FEW = 512


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
            routed to a rank that does not exist, or columns differ in length.
        ValueError: If `holders` and `nbytes` are not of those shapes.
    """
    if nbytes.ndim != 1 or holders.shape != (len(nbytes), 2):
        raise ValueError(
            f"holders is {[*holders.shape]} and nbytes {[*nbytes.shape]}; give rank and local "
            "index, and the bytes, of each sample"
        )
    # The samples of the window stay in columns; only this rank's become tuples.
    index, slot, owner, position = table = _table(deliveries)
    if len({*map(len, table)}) > 1:
        raise RuntimeError(
            f"the plan's columns have {[*map(len, table)]} entries; give each as many"
        )
    if index is not (each := _counted(len(holders))) and index != each:
        delivered = int64_tensor(index)
        _check_coverage(delivered, int64_tensor(owner), len(holders), world_size)
        holders, nbytes = holders[delivered], nbytes[delivered]
    _check_owners(owner, world_size)
    held, sizes = int64_array(holders.T), int64_array(nbytes)
    holder, local = held[: len(sizes)], held[len(sizes) :]
    kept: list[Placement] = []
    sends: list[list[Placement]] = [[] for _ in range(world_size)]
    receives: list[list[Placement]] = [[] for _ in range(world_size)]
    send_splits, recv_splits = [0] * world_size, [0] * world_size
    for at in {*_places(holder, rank), *_places(owner, rank)}:
        source, to, count = holder[at], owner[at], sizes[at]
        place = Placement(slot[at], position[at], local[at])
        if source == to:
            kept.append(place)
        elif source == rank:
            sends[to].append(place)
            send_splits[to] += count
        else:
            receives[source].append(place)
            recv_splits[source] += count
    hosts = hosts or range(world_size)
    shift_peaks, peak_total = (0,) * world_size, 0
    if len({*hosts}) > 1:
        host, sender, receiver = torch.tensor(hosts), int64_tensor(holder), int64_tensor(owner)
        apart = (host[sender] != host[receiver]).nonzero().view(-1)
        if len(apart):
            pair = (sender * world_size + receiver)[apart]
            remote = _Pairs.of(pair, int64_tensor(sizes)[apart], world_size)
            shift_peaks, peak_total = remote.shift_peaks(), remote.peak_total()
    return Moves(
        kept=tuple(sorted(kept)),
        sends=tuple([tuple(sorted(places)) for places in sends]),
        receives=tuple([tuple(sorted(places)) for places in receives]),
        send_splits=tuple(send_splits),
        recv_splits=tuple(recv_splits),
        shared=tuple([host == hosts[rank] and peer != rank for peer, host in enumerate(hosts)]),
        shift_peaks=shift_peaks,
        peak_total=peak_total,
        digest=_digest([*table, held, sizes]),
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
        shift = (self.receiver - self.sender) % self.world_size
        return tuple(self._zeros().scatter_reduce_(0, shift, self.nbytes, "amax").tolist())

    def peak_total(self) -> int:
        """Return the most bytes of a rank in one direction."""
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


def int64_array(values: Tensor) -> "array[int]":
    """Return a copy of a host tensor as an array of type "q"."""
    values = values.long().contiguous()
    copied = array("q")
    copied.frombytes(ctypes.string_at(values.data_ptr(), values.nbytes))
    return copied


def _places(column: "array[int]", value: int) -> list[int]:
    """Return where a column has a value."""
    if len(column) > _FEW:
        found: list[int] = (int64_tensor(column) == value).nonzero().view(-1).tolist()
        return found
    return [at for at, other in enumerate(column) if other == value]


def _check_owners(owner: "array[int]", world_size: int) -> None:
    if not owner:
        return
    bounds = int64_tensor(owner).aminmax() if len(owner) > _FEW else (min(owner), max(owner))
    first, last = map(int, bounds)
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


def _digest(columns: "Iterable[array[int]]") -> bytes:
    """Return a digest of where each sample goes, who holds it, and how large it is."""
    digest = hashlib.sha256()  # for which processors have instructions
    for column in columns:
        digest.update(column)
    return digest.digest()[:DIGEST_BYTES]
