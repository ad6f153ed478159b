"""One window's samples between ranks of one node: packed where the receivers read them."""

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from evenstep.exchange.errors import PeerLostError, ProtocolError
from evenstep.exchange.host_memory import CPU, HOST_MEMORY
from evenstep.exchange.moves import Moves
from evenstep.exchange.node import Node
from evenstep.exchange.shared_region import Handle, MappedRegion, Region
from evenstep.exchange.waiting import MOVING, POLL_S, Patience
from evenstep.serialize import SampleLayout, pack_samples

_PAUSE_S = 0.0005


class _Taken(NamedTuple):
    """What a peer handed over: its region, the number of the content, and this rank's part."""

    region: MappedRegion
    number: int
    content: torch.Tensor


class Handover:
    """The samples that leave this rank for others of its node, and those that come from them.

    Args:
        node: The node.
        samples: The samples to hand over, by destination.
        layouts: Their layouts.
        moves: Whose splits apply.
        device: Where the samples are, and where those that arrive shall be.

    Attributes:
        message: What the peers must hear before they `take`; empty if there is nothing for them.
    """

    def __init__(
        self,
        node: Node,
        samples: Sequence[Mapping[str, torch.Tensor | None]],
        layouts: Sequence[SampleLayout],
        moves: Moves,
        *,
        device: torch.device,
    ) -> None:
        self._node, self._moves, self._device = node, moves, device
        self._region: Region | None = None
        self._number = 0
        self._taken: dict[int, _Taken] = {}
        self._dropped = weakref.finalize(self, _give_back, self._taken, os.getpid())
        self._dropped.atexit = False
        self.message = b""
        splits = [moves.send_splits[rank] if moves.shared[rank] else 0 for rank in node.ranks]
        if any(splits):
            self._region, self._number = node.region(sum(splits))
            room = self._region.fill(self._number, splits)
            if device == CPU:
                pack_samples(samples, layouts=layouts, out=room)
            else:
                room.copy_(pack_samples(samples, layouts=layouts))
            self.message = self._region.handle.encode()

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
            content = region.take(handle.content, nbytes)
            self._taken[peer] = _Taken(region, handle.content, content)

    def bytes_from(self, peer: int, *, borrow: bool) -> torch.Tensor:
        """Return what a rank handed over, uint8 [bytes], on the samples' device.

        Args:
            peer: A rank of this node that had samples for this one.
            borrow: Return the peer's memory itself, which is void once `release` is called.
        """
        if not self._moves.recv_splits[peer]:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        content = self._taken[peer].content
        if self._device != CPU:
            return content.to(self._device)
        if not borrow:
            return HOST_MEMORY.empty(content.shape, torch.uint8).copy_(content)
        self._dropped.detach()  # the views may outlive this object
        return content

    def wait(self, patience: Patience) -> None:
        """Wait until the peers have mapped what this rank packed, so that it may even exit.

        Raises:
            ExchangeError: If one of them is lost or late.
        """
        patience.until(self._is_taken, doing=MOVING, absent=self._absent)

    def release(self) -> None:
        """Give the peers their memory back."""
        _give_back(self._taken, os.getpid())

    def _is_taken(self) -> bool:
        give_up = time.monotonic() + POLL_S
        while late := self._late():
            ended = [place for place in late if self._node.has_ended(place)]
            # One may have mapped its samples, and ended, since it was found to be late.
            if lost := [self._node.ranks[place] for place in self._late() if place in ended]:
                raise PeerLostError(lost, doing=MOVING, cause="the process has ended")
            if time.monotonic() > give_up:
                return False
            time.sleep(_PAUSE_S)
        return True

    def _late(self) -> list[int]:
        return [] if self._region is None else self._region.late(self._number)

    def _absent(self) -> list[int]:
        return [self._node.ranks[place] for place in self._late()]


def _give_back(taken: dict[int, _Taken], process: int) -> None:
    """Tell the owners of what was taken that it is not read any more; a forked copy does not."""
    while taken and os.getpid() == process:
        _, (region, number, _) = taken.popitem()
        region.done(number)
