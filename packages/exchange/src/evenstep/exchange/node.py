"""The ranks of a group that run on one machine and can read each other's memory."""

import os
import secrets
import select
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import torch.distributed as dist

from evenstep.exchange.errors import PeerLostError
from evenstep.exchange.host_memory import rounded
from evenstep.exchange.rounds import Kind, Rounds
from evenstep.exchange.shared_region import Handle, MappedRegion, Region

VARIABLE = "EVENSTEP_SHARED_MEMORY"
"""Environment variable; "0" on a rank lets all its samples go over the network."""

_CARD = struct.Struct("<16sqi16s")  # machine, process, descriptor, what can be read there
_LEAST_REGION_BYTES = 1 << 20
_MOST_MAPPED = 8  # regions of one peer: windows that are resident, and those that they outgrew


class _Card(NamedTuple):
    """How a rank can be reached; all zero if it cannot be."""

    machine: bytes
    process: int
    descriptor: int
    secret: bytes


@dataclass(kw_only=True)
class Node:
    """The ranks that share memory with this one, and the regions that they share.

    Attributes:
        rank: This rank in the group.
        hosts: For every rank of the group, the first rank of its node. A rank that shares memory
            with no other is a node of its own. Equal on all ranks.
        ranks: The ranks of this node, ascending.
        processes: Their process ids.
    """

    rank: int
    hosts: tuple[int, ...]
    ranks: tuple[int, ...]
    processes: tuple[int, ...] = ()
    _regions: list[Region] = field(default_factory=list)
    _mapped: dict[tuple[int, int], MappedRegion] = field(default_factory=dict)
    _watches: dict[int, int] = field(default_factory=dict)
    _contents: int = 0
    _recent_peak: int = 0

    @classmethod
    def alone(cls, rank: int, world_size: int) -> "Node":
        """Return the node of a rank that shares memory with no other, and no other does."""
        return cls(rank=rank, hosts=tuple(range(world_size)), ranks=(rank,))

    @classmethod
    def meet(cls, rank: int, rounds: Rounds) -> "Node":
        """Find the ranks that share memory, in two rounds; every rank must call this.

        The ranks of a machine are one node if each of them can read the memory of every other,
        which containers, for example, may prevent.

        Raises:
            ExchangeError: As `Rounds.gather`.
        """
        with _Probe() as probe:
            _, told = rounds.gather(Kind.MEETING, lambda: (None, _CARD.pack(*probe.card)))
            cards = [_Card(*_CARD.unpack(card)) for card in told]
            reached = [peer for peer, card in enumerate(cards) if _is_readable(card, probe.card)]
            text = array("q", reached).tobytes()
            _, told = rounds.gather(Kind.MEETING, lambda: (None, text))
        hosts = _hosts(cards, [{*memoryview(peers).cast("q")} for peers in told])
        ranks = tuple(peer for peer, host in enumerate(hosts) if host == hosts[rank])
        processes = tuple(cards[peer].process for peer in ranks)
        return cls(rank=rank, hosts=hosts, ranks=ranks, processes=processes)

    def region(self, nbytes: int) -> tuple[Region, int]:
        """Return a region with room for `nbytes`, and a number for its new content."""
        self._contents += 1
        self._recent_peak = max(nbytes, self._recent_peak - self._recent_peak // 1024)
        most = max(4 * self._recent_peak, _LEAST_REGION_BYTES)
        free = [region for region in self._regions if region.is_free]
        fitting = [region for region in free if nbytes <= region.capacity <= most]
        if fitting:
            return min(fitting, key=lambda region: region.capacity), self._contents
        for region in free:
            self._regions.remove(region)
        region = Region(max(rounded(nbytes), _LEAST_REGION_BYTES), len(self.ranks))
        self._regions.append(region)
        return region, self._contents

    def mapped(self, peer: int, handle: Handle) -> MappedRegion:
        """Return a region of a rank of this node.

        Raises:
            PeerLostError: If the rank is gone.
        """
        key = peer, handle.identity
        region = self._mapped.pop(key, None)
        if region is None:
            process = self.processes[self.ranks.index(peer)]
            place = self.ranks.index(self.rank)
            try:
                region = MappedRegion(process, handle, num_ranks=len(self.ranks), place=place)
            except OSError as error:
                raise PeerLostError([peer], doing="moving samples", cause=str(error)) from error
        self._mapped[key] = region  # the last one used is the last one forgotten
        of_peer = [other for other in self._mapped if other[0] == peer]
        for stale in of_peer[:-_MOST_MAPPED]:
            del self._mapped[stale]
        return region

    def check_alive(self, places: Sequence[int]) -> None:
        """Raise if a rank of this node has ended.

        Args:
            places: Those to look at, by place on the node.

        Raises:
            PeerLostError: Naming them.
        """
        if lost := [self.ranks[place] for place in places if self._has_ended(place)]:
            raise PeerLostError(lost, doing="moving samples", cause="the process has ended")

    def _has_ended(self, place: int) -> bool:
        assert sys.platform == "linux"
        try:
            if place not in self._watches:
                self._watches[place] = os.pidfd_open(self.processes[place])
        except ProcessLookupError:
            return True
        poll = select.poll()
        poll.register(self._watches[place], select.POLLIN)
        return bool(poll.poll(0))

    def __del__(self) -> None:
        for descriptor in self._watches.values():
            os.close(descriptor)


# A node must not hold its group, or neither would ever be freed.
_nodes: "WeakKeyDictionary[dist.ProcessGroup, Node]" = WeakKeyDictionary()


def node_of(group: dist.ProcessGroup, rank: int, rounds: Rounds) -> Node:
    """Return the node of this rank; the first call for a group is `Node.meet` on all its ranks."""
    node = _nodes.get(group)
    if node is None:
        node = _nodes[group] = Node.meet(rank, rounds)
    return node


class _Probe:
    """A file in memory that peers try to read, while it is entered."""

    def __init__(self) -> None:
        self.card = _Card(bytes(16), 0, 0, bytes(16))
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        if sys.platform == "linux" and os.environ.get(VARIABLE) != "0":
            secret = secrets.token_bytes(16)
            try:
                machine = _machine()
                self._descriptor = os.memfd_create("evenstep probe", os.MFD_CLOEXEC)
                os.write(self._descriptor, secret)
            except OSError:  # such as no /proc: then this rank is a node of its own
                return self
            self.card = _Card(machine, os.getpid(), self._descriptor, secret)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _machine() -> bytes:
    """Return what processes that see each other's ids and interfaces share, and no others do."""
    known = blake2b(Path("/proc/sys/kernel/random/boot_id").read_bytes(), digest_size=16)
    for namespace in ("pid", "net"):  # hosts are simulated by namespaces of the network
        known.update(bytes(Path("/proc/self/ns", namespace).readlink()))
    return known.digest()


def _is_readable(card: _Card, own: _Card) -> bool:
    if not card.process or card.machine != own.machine:
        return False
    try:
        descriptor = os.open(f"/proc/{card.process}/fd/{card.descriptor}", os.O_RDWR)
    except OSError:
        return False
    try:
        return os.pread(descriptor, len(card.secret), 0) == card.secret
    finally:
        os.close(descriptor)


def _hosts(cards: Sequence[_Card], reached: Sequence[set[int]]) -> tuple[int, ...]:
    """Return the first rank of every rank's node."""
    machines: dict[bytes, set[int]] = {}
    for rank, card in enumerate(cards):
        if card.process:
            machines.setdefault(card.machine, set()).add(rank)
    hosts = [*range(len(cards))]
    for members in machines.values():
        if all(members <= reached[rank] for rank in members):
            for rank in members:
                hosts[rank] = min(members)
    return tuple(hosts)
