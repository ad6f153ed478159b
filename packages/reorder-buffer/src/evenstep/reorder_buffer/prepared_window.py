"""A window that all ranks have committed to: launched, joined, and parted from."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, NamedTuple

from evenstep.exchange import Transfer
from evenstep.reorder_buffer.balancer import WindowBalancer
from evenstep.reorder_buffer.layout import BatchT
from evenstep.reorder_buffer.measuring import Measured, PhaseClock
from evenstep.reorder_buffer.residency import Residency
from evenstep.reorder_buffer.source import WindowSpan

__all__ = ["BalancedWindow", "PreparedWindow"]


class BalancedWindow(NamedTuple, Generic[BatchT]):
    """A window as it is served.

    Attributes:
        batches: The micro-batches of this rank.
        span: The part of this rank's data that was read for it.
        last: Whether no window follows, which all ranks know.
        measured: Its loads, bytes and times; None if nobody looks at them.
    """

    batches: list[BatchT]
    span: WindowSpan
    last: bool
    measured: Measured | None


class PreparedWindow(Generic[BatchT]):
    """A window that all ranks have committed to; made by `WindowPipeline.prepare`.

    Its samples must be launched whatever happens, because the peers wait for them.

    Args:
        balancer: Joins the micro-batches.
        transfer: Moves the samples.
        residency: Counts the window's bytes.
        parted: Called with this window once no peer needs it any more.
        num_slots: Number of micro-batches.
        read_bytes: Bytes of the samples that this rank has read.
        span: The part of this rank's data that they are.
        last: Whether no window follows.
        clock: Times its phases.
        measured: Its loads, bytes and times, if somebody looks at them.

    Attributes:
        is_finished: Whether its samples have arrived, and are joined.
    """

    def __init__(
        self,
        balancer: WindowBalancer[BatchT],
        transfer: Transfer,
        residency: Residency,
        parted: Callable[["PreparedWindow[BatchT]"], None],
        *,
        num_slots: int,
        read_bytes: int,
        span: WindowSpan,
        last: bool,
        clock: PhaseClock,
        measured: Measured | None,
    ) -> None:
        self._balancer, self._transfer = balancer, transfer
        self._residency, self._parted = residency, parted
        self._num_slots = num_slots
        self._span, self._last, self._clock, self._measured = span, last, clock, measured
        self.is_finished = False
        self._launches = threading.Lock()  # taken by the one launch that there is
        moves = transfer.moves
        sent, received = sum(moves.send_splits), sum(moves.recv_splits)
        # What peers of this node hand over is in their memory, unless this rank must keep it.
        own = received if balancer.keeps_views else sum(moves.over_network(moves.recv_splits))
        self._nbytes = read_bytes + transfer.packed_nbytes + own
        self._joined_nbytes = read_bytes - sent + received
        residency.add(self._nbytes)

    def launch(self) -> None:
        """Start moving the samples, once; every rank's launches follow the same order."""
        if self._launches.acquire(blocking=False):
            with self._clock.phase("transfer"):
                self._transfer.launch()

    def release(self) -> None:
        """Let go of the peers' samples: this window will not be finished."""
        self._transfer.release()

    def settle(self, *, grace_s: float) -> None:
        """Wait until the samples have moved, without a look at them, and forget the window."""
        self._transfer.settle(grace_s=grace_s)
        self._forget()

    def finish(self, *, part: bool = False) -> BalancedWindow[BatchT]:
        """Wait for the samples and join them; return the window's micro-batches of this rank.

        Args:
            part: Whether to `part` too, as the last thing that is done with this window.
        """
        with ExitStack() as moving:
            with self._clock.phase("transfer"):
                borrowed = self._transfer.borrowed(borrow=not self._balancer.keeps_views, part=part)
                arrivals = moving.enter_context(borrowed)
            self._residency.join(self._joined_nbytes)
            with self._clock.phase("merge"):
                batches = self._balancer.merge(
                    arrivals, self._num_slots, fetched=self._transfer.give_back
                )
        self.is_finished = True
        if part or not self._transfer.lends:
            self.part()
        return BalancedWindow(batches, self._span, self._last, self._measured)

    def part(self) -> None:
        """Wait until the peers are done with this rank's samples, and forget the window."""
        self._transfer.part()
        self._forget()

    def _forget(self) -> None:
        self._parted(self)
        self._residency.add(-self._nbytes)
