"""The ranks of a group that run on one machine and can read each other's memory."""

import ctypes
import os
import secrets
import select
import struct
import sys
import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from evenstep.exchange.errors import ExchangeError, PeerLostError
from evenstep.exchange.host_memory import rounded
from evenstep.exchange.local_links import Links
from evenstep.exchange.peer_memory import read_memory
from evenstep.exchange.rounds import Kind, Rounds
from evenstep.exchange.shared_region import Handle, MappedRegion, Region
from evenstep.exchange.waiting import MOVING

VARIABLE = "EVENSTEP_SHARED_MEMORY"
"""Environment variable; "0" on a rank lets all its samples go over the network, "packed" through
shared memory in any case."""

_CARD = struct.Struct("<16sqiQ16s")  # the fields of _Card
_LEAST_REGION_BYTES = 1 << 20


class _Card(NamedTuple):
    """How a rank can be reached; all zero if it cannot be.

    Attributes:
        machine: Which one it runs on.
        process: Its id.
        descriptor: Of a file that holds the secret.
        address: Of the secret in its memory; 0 if that shall not be read.
        secret: Random bytes.
    """

    machine: bytes
    process: int
    descriptor: int
    address: int
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
        lends: Whether all of them may read each other's memory where samples lie.
    """

    rank: int
    hosts: tuple[int, ...]
    ranks: tuple[int, ...]
    processes: tuple[int, ...] = ()
    lends: bool = False
    _regions: list[Region] = field(default_factory=list)
    _mapped: dict[tuple[int, int], MappedRegion] = field(default_factory=dict)
    _watches: dict[int, int] = field(default_factory=dict)
    _contents: int = 0
    _recent_peak: int = 0

    def __post_init__(self) -> None:
        weakref.finalize(self, _close, self._watches).atexit = False

    @classmethod
    def alone(cls, rank: int, world_size: int) -> "Node":
        """Return the node of a rank that shares memory with no other, and no other does."""
        return cls(rank=rank, hosts=tuple(range(world_size)), ranks=(rank,))

    @classmethod
    def meet(cls, rank: int, rounds: Rounds) -> "Node":
        """Find the ranks that share memory, in two rounds; every rank must call this.

        The ranks of a machine are one node if each of them can read the memory of every other,
        which containers, for example, may prevent. If all ranks are one node, they connect in a
        third round, and hold later ones over these connections.

        Raises:
            ExchangeError: As `Rounds.gather`.
        """
        with ExitStack() as kept:
            own, told = rounds.gather(Kind.MEETING, lambda: _shown(kept))
            cards = [_Card(*_CARD.unpack(card)) for card in told]
            secrets = [card.secret for card in cards]
            links = Links(rank, secrets, [card.process for card in cards])

            def read() -> tuple[None, bytes]:
                reached = [peer for peer, card in enumerate(cards) if _is_readable(card, own)]
                in_place = [~peer for peer in reached if _is_readable_in_place(cards[peer])]
                if len(reached) == len(cards):
                    links.listen()
                return None, array("q", reached + in_place).tobytes()

            try:
                _, told = rounds.gather(Kind.MEETING, read)
            except BaseException:
                links.close()
                raise
        node = cls._of(rank, cards, [{*memoryview(peers).cast("q")} for peers in told])
        if len(node.ranks) == len(cards) > 1:
            channel = rounds.link(links)
            if channel is not None:
                channel.has_ended = node.has_ended
                for place in range(len(cards)):
                    with suppress(OSError):  # one that has ended, or no descriptor left
                        node.watch(place)
        else:
            links.close()
        return node

    @classmethod
    def _of(cls, rank: int, cards: Sequence[_Card], reached: Sequence[set[int]]) -> "Node":
        hosts = _hosts(cards, reached)
        ranks = tuple(peer for peer, host in enumerate(hosts) if host == hosts[rank])
        processes = tuple(cards[peer].process for peer in ranks)
        lends = all(~peer in reached[reader] for peer in ranks for reader in ranks)
        return cls(rank=rank, hosts=hosts, ranks=ranks, processes=processes, lends=lends)

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
            region.retire()
            self._regions.remove(region)
        region = Region(max(rounded(nbytes), _LEAST_REGION_BYTES), len(self.ranks))
        self._regions.append(region)
        return region, self._contents

    def mapped(self, peer: int, handle: Handle) -> MappedRegion:
        """Return a region of a rank of this node.

        Raises:
            PeerLostError: If the rank is gone.
            ExchangeError: If this rank cannot map it.
        """
        key = peer, handle.identity
        if key not in self._mapped:
            for retired in [key for key, region in self._mapped.items() if region.is_retired]:
                del self._mapped[retired]
            there, here = self.ranks.index(peer), self.ranks.index(self.rank)
            try:
                self.watch(there)  # before the mapping proves that the process is the peer
                self._mapped[key] = MappedRegion(
                    self.processes[there], handle, num_ranks=len(self.ranks), place=here
                )
            except (FileNotFoundError, ProcessLookupError) as error:
                raise PeerLostError([peer], doing=MOVING, cause=str(error)) from error
            except Exception as error:
                raise ExchangeError(
                    f"this rank cannot map {handle.nbytes} bytes of rank {peer}: {error}; raise "
                    f"its limits (ulimit -n, ulimit -v), or set {VARIABLE}=0"
                ) from error
        return self._mapped[key]

    def has_ended(self, place: int) -> bool:
        """Return whether the process of a rank, by its place on the node, is known to be gone."""
        try:
            self.watch(place)
        except ProcessLookupError:
            return True
        except OSError:  # such as no descriptor left
            return False
        poll = select.poll()
        poll.register(self._watches[place], select.POLLIN)
        return bool(poll.poll(0))

    def watch(self, place: int) -> None:
        """Make sure that `has_ended` will know, even once another process has the rank's id.

        Raises:
            ProcessLookupError: If the process is gone.
            OSError: If this process has no descriptor left.
        """
        assert sys.platform == "linux"
        if place not in self._watches:
            self._watches[place] = os.pidfd_open(self.processes[place])


def _close(watches: Mapping[int, int]) -> None:
    for descriptor in watches.values():
        os.close(descriptor)


# A node must not hold its group, or neither would ever be freed.
_nodes: "WeakKeyDictionary[dist.ProcessGroup, Node]" = WeakKeyDictionary()


def node_of(group: dist.ProcessGroup, rank: int, rounds: Rounds) -> Node:
    """Return the node of this rank; the first call for a group is `Node.meet` on all its ranks."""
    node = _nodes.get(group)
    if node is None:
        node = _nodes[group] = Node.meet(rank, rounds)
    return node


def _shown(kept: ExitStack) -> tuple[_Card, bytes]:
    """Return how peers can reach this rank, and that as bytes; what they shall read is `kept`."""
    card = _Card(bytes(16), 0, 0, 0, bytes(16))
    if sys.platform == "linux" and os.environ.get(VARIABLE) != "0":
        secret = secrets.token_bytes(16)
        # Without /proc, or in a Python or a sandbox without these calls, the card stays empty.
        with suppress(OSError, AttributeError):
            os.close(os.pidfd_open(os.getpid()))
            descriptor = os.memfd_create("evenstep", os.MFD_CLOEXEC)
            kept.callback(os.close, descriptor)
            os.pwrite(descriptor, secret, 0)
            buffer = ctypes.create_string_buffer(secret, len(secret))
            kept.enter_context(memoryview(buffer))  # keeps it
            address = 0 if os.environ.get(VARIABLE) == "packed" else ctypes.addressof(buffer)
            card = _Card(_machine(), os.getpid(), descriptor, address, secret)
    return card, _CARD.pack(*card)


def _machine() -> bytes:
    """Return what processes that see each other's ids and interfaces share, and no others do."""
    known = blake2b(Path("/proc/sys/kernel/random/boot_id").read_bytes(), digest_size=16)
    for namespace in ("pid", "net"):  # hosts are simulated by namespaces of the network
        known.update(bytes(Path("/proc/self/ns", namespace).readlink()))
    return known.digest()


def _is_readable(card: _Card, own: _Card) -> bool:
    if not card.process or card.machine != own.machine:
        return False
    with suppress(OSError), ExitStack() as closing:
        path = f"/proc/{card.process}/fd/{card.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        closing.callback(os.close, descriptor)
        return os.pread(descriptor, len(card.secret), 0) == card.secret
    return False


def _is_readable_in_place(card: _Card) -> bool:
    read = ctypes.create_string_buffer(len(card.secret))
    with suppress(OSError):
        if card.address:
            read_memory(card.process, [(ctypes.addressof(read), card.address, len(card.secret))])
    return read.raw == card.secret


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
