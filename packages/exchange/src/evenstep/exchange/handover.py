"""One window's samples between ranks of one node: lent where they lie, or packed for them."""

import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from evenstep.exchange.errors import PeerLostError, ProtocolError
from evenstep.exchange.host_memory import CPU, HOST_MEMORY
from evenstep.exchange.loan import PART_BYTES, Loan, parts_to_lend
from evenstep.exchange.moves import Moves
from evenstep.exchange.node import Node
from evenstep.exchange.shared_region import Handle, MappedRegion, Region
from evenstep.exchange.waiting import MOVING, POLL_S, Patience
from evenstep.serialize import LaidOutSample, Manifest, PackedSamples, SampleLayout, pack_samples

_PAUSE_S = 0.0005
_LOOK_S = 0.02


class _Taken(NamedTuple):
    """What a peer handed over: its region, the number of the content, and this rank's part."""

    region: MappedRegion
    number: int
    content: torch.Tensor
    lends: bool


class Handover:
    """The samples that leave this rank for others of its node, and those that come from them.

    Args:
        node: The node.
        samples: The samples to hand over, by destination.
        layouts: Their layouts.
        moves: Whose splits apply.
        arriving: The layouts of the samples from each rank of the node.
        device: Where the samples are, and where those that arrive shall be.

    Attributes:
        message: What the peers must hear before they `take`; empty if there is nothing for them.
        packed_nbytes: How many bytes were copied for the peers.
    """

    def __init__(
        self,
        node: Node,
        samples: Sequence[Mapping[str, torch.Tensor | None]],
        layouts: Sequence[SampleLayout],
        moves: Moves,
        *,
        arriving: Mapping[int, Sequence[SampleLayout]],
        device: torch.device,
    ) -> None:
        self._node, self._moves, self._device = node, moves, device
        self._arriving = arriving
        self._process = os.getpid()
        self._region: Region | None = None
        self._number = 0
        self._lent: Sequence[object] = ()
        self._taken: dict[int, _Taken] = {}
        self._borrowed: dict[int, _Taken] = {}  # views of what these hold may outlive this object
        weakref.finalize(self, _give_back, self._taken, self._process).atexit = False
        self.message = b""
        self.packed_nbytes = 0
        splits = [moves.send_splits[rank] if moves.shared[rank] else 0 for rank in node.ranks]
        if any(splits):
            if not self._lend(samples, layouts, splits):
                self._pack(samples, layouts, splits)
            assert self._region is not None
            self.message = self._region.handle.encode()

    def _lend(
        self,
        samples: Sequence[Mapping[str, torch.Tensor | None]],
        layouts: Sequence[SampleLayout],
        splits: Sequence[int],
    ) -> bool:
        """Tell the peers where the samples lie; return False if they had better be packed."""
        places = zip(self._node.ranks, splits, strict=True)
        counts = [len(self._moves.sends[rank]) if nbytes else 0 for rank, nbytes in places]
        if not self._node.lends or self._device != CPU or sum(counts) < len(samples):
            return False
        parts = parts_to_lend(samples, layouts)
        if parts is None:
            return False
        rest = iter(layouts)
        nbytes = [_parts_nbytes(islice(rest, count)) for count in counts]
        region, number = self._node.region(sum(nbytes))
        region.fill(number, nbytes, lends=True).copy_(torch.frombuffer(parts, dtype=torch.uint8))
        weakref.finalize(self, _withdraw, region, number, self._process).atexit = False
        _lenders.add(self)
        self._region, self._number, self._lent = region, number, samples
        return True

    def _pack(
        self,
        samples: Sequence[Mapping[str, torch.Tensor | None]],
        layouts: Sequence[SampleLayout],
        splits: Sequence[int],
    ) -> None:
        """Copy the samples into shared memory."""
        self.packed_nbytes = sum(splits)
        self._region, self._number = self._node.region(self.packed_nbytes)
        room = self._region.fill(self._number, splits)
        if self._device == CPU:
            pack_samples(samples, layouts=layouts, out=room)
        else:
            room.copy_(pack_samples(samples, layouts=layouts))

    @property
    def lends(self) -> bool:
        """Whether peers copy samples from where they lie."""
        return bool(self._lent)

    def take(self, messages: Sequence[memoryview]) -> None:
        """Map what the peers have packed, once all have committed.

        Args:
            messages: Of every rank of the group.

        Raises:
            ProtocolError: If a message is damaged.
            ExchangeError: If a peer is gone, or this rank cannot map its memory.
        """
        if self._region is not None:
            self._region.is_committed = True
        for peer in self._node.ranks:
            nbytes = self._moves.recv_splits[peer]
            if not (self._moves.shared[peer] and nbytes):
                continue
            try:
                handle = Handle.decode(messages[peer])
            except ValueError as error:
                raise ProtocolError(f"the commitment of rank {peer}: {error}") from None
            region = self._node.mapped(peer, handle)
            if handle.lends:
                nbytes = _parts_nbytes(self._arriving[peer])
            content = region.take(handle.content, nbytes)
            self._taken[peer] = _Taken(region, handle.content, content, handle.lends)

    def samples_from(self, peer: int, *, borrow: bool) -> Iterable[LaidOutSample]:
        """Return the samples that a rank of this node handed over, on the samples' device.

        Args:
            peer: A rank of this node that had samples for this one.
            borrow: Leave them in the peer's memory, so that they are void once `release` is called.

        Raises:
            ExchangeError: If its memory cannot be read.
        """
        layouts = self._arriving[peer]
        if not self._moves.recv_splits[peer]:
            return _packed(layouts, torch.empty(0, dtype=torch.uint8, device=self._device))
        taken = self._taken[peer]
        if taken.lends:
            lent = Loan(
                self._node, peer, layouts, taken.content, lambda: taken.region.holds(taken.number)
            ).samples()
            if borrow:
                return lent
            room = HOST_MEMORY.empty([self._moves.recv_splits[peer]], torch.uint8)
            return _packed(layouts, pack_samples([*lent], layouts=layouts, out=room))
        if self._device != CPU:
            return _packed(layouts, taken.content.to(self._device))
        if borrow:
            self._borrowed[peer] = self._taken.pop(peer)
            return _packed(layouts, taken.content)
        room = HOST_MEMORY.empty(taken.content.shape, torch.uint8)
        return _packed(layouts, room.copy_(taken.content))

    def wait(self, patience: Patience) -> None:
        """Wait until no peer needs this process for its samples, so that it may even exit.

        They have mapped what it packed, or are done with what it lends.

        Raises:
            ExchangeError: If one of them is lost or late.
        """
        patience.until(self._is_taken, doing=MOVING, absent=self._absent)
        self._lent = ()

    def settle(self, *, grace_s: float) -> None:
        """Wait for peers that are alive, so long at most, and then lend no longer."""
        give_up = time.monotonic() + grace_s
        try:
            while not all(map(self._node.has_ended, self._late())) and time.monotonic() < give_up:
                time.sleep(_PAUSE_S)
        finally:
            self.withdraw()

    def withdraw(self) -> None:
        """Lend the samples no longer, so that whoever is not done with them gets an error."""
        if self._region is not None:
            _withdraw(self._region, self._number, self._process)
        self._lent = ()

    def give_back(self) -> None:
        """Give back what peers lend, not what they packed."""
        _give_back(self._taken, self._process, packed=False)

    def release(self) -> None:
        """Give the peers their memory back."""
        _give_back(self._borrowed, self._process)
        _give_back(self._taken, self._process)

    def _is_taken(self) -> bool:
        look = now = time.monotonic()
        give_up = now + POLL_S
        while late := self._late():
            if now >= look:  # not at each turn: whoever waits takes time from those who copy
                look = now + _LOOK_S
                ended = [place for place in late if self._node.has_ended(place)]
                # One may have mapped its samples, and ended, since it was found to be late.
                if lost := [self._node.ranks[place] for place in self._late() if place in ended]:
                    raise PeerLostError(lost, doing=MOVING, cause="the process has ended")
            if now > give_up:
                return False
            time.sleep(_PAUSE_S)
            now = time.monotonic()
        return True

    def _late(self) -> list[int]:
        return [] if self._region is None else self._region.late(self._number)

    def _absent(self) -> list[int]:
        return [self._node.ranks[place] for place in self._late()]


def _packed(layouts: Sequence[SampleLayout], content: torch.Tensor) -> PackedSamples:
    return PackedSamples(Manifest(tuple(layouts)), content)


def _parts_nbytes(layouts: Iterable[SampleLayout]) -> int:
    return PART_BYTES * sum([len(layout.placed) for layout in layouts])


_lenders: "weakref.WeakSet[Handover]" = weakref.WeakSet()


def _withdraw_all() -> None:
    for lender in _lenders:
        lender.withdraw()


# When Python ends it runs finalizers in the reverse order of their making: this one behind those of
# whatever settles its transfers, and before the samples' memory is freed.
weakref.finalize(Handover, _withdraw_all)


def _withdraw(region: Region, number: int, process: int) -> None:
    """Tell the peers that samples are not lent any more; a forked copy does not."""
    if os.getpid() == process:
        region.withdraw(number)


def _give_back(taken: dict[int, _Taken], process: int, *, packed: bool = True) -> None:
    """Tell the owners of what was taken that it is not read any more; a forked copy does not."""
    for peer in [*taken]:
        one = taken.get(peer)  # None if a signal's handler has given it back meanwhile
        if one is not None and os.getpid() == process and (packed or one.lends):
            one.region.done(one.number)
            taken.pop(peer, None)
