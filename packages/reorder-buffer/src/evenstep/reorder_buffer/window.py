"""Windows of micro-batches across a module's DP group: agree, plan, pack, and what ends them."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, Literal, TypeAlias

from evenstep.balance import RouteColumns
from evenstep.exchange import (
    SETTLE_S,
    Agreement,
    ExchangeError,
    Offer,
    Patience,
    Placement,
    SampleExchange,
    Transfer,
)
from evenstep.reorder_buffer.balancer import WindowBalancer
from evenstep.reorder_buffer.layout import BatchT
from evenstep.reorder_buffer.measuring import Measured, PhaseClock
from evenstep.reorder_buffer.observer import WindowObserver
from evenstep.reorder_buffer.paired import PairedModules
from evenstep.reorder_buffer.prepared_window import PreparedWindow
from evenstep.reorder_buffer.residency import Residency
from evenstep.reorder_buffer.source import Collected, WindowSpan
from evenstep.reorder_buffer.stats import PlanStats, plan_stats
from evenstep.serialize import SampleLayout

__all__ = ["OnUnevenEnd", "UnevenEndError", "WindowPipeline"]

logger = logging.getLogger(__name__)

_LEAST_GRACE_S = 0.1

OnUnevenEnd: TypeAlias = Literal["stop", "raise"]
"""What happens when a rank's data ends before that of the others."""


class UnevenEndError(ExchangeError):
    """A rank's data ended before that of the others; raised on every rank if so chosen."""


class WindowPipeline(Generic[BatchT]):
    """Takes windows through agreeing, planning and packing; all ranks make the same calls.

    Args:
        balancer: How micro-batches are cut, balanced and joined.
        exchange: Moves the samples.
        on_uneven_end: When one rank's data ends first, stop on all ranks behind the last
            micro-batch that all have, or raise on all.
        observer: Says which windows are measured; None for none.
        paired: Compares the order with that of paired modules; None if there are none.

    Attributes:
        left_over: How many micro-batches each rank had read and could not serve, because another
            rank's data had ended; empty unless that happened.
        residency: Counts the bytes of this rank's windows.
    """

    def __init__(
        self,
        balancer: WindowBalancer[BatchT],
        exchange: SampleExchange,
        *,
        on_uneven_end: OnUnevenEnd = "stop",
        observer: WindowObserver | None = None,
        paired: PairedModules | None = None,
    ) -> None:
        self.balancer = balancer
        self.exchange = exchange
        self.left_over: tuple[int, ...] = ()
        self.residency = Residency()
        self._on_uneven_end = on_uneven_end
        self._observer = observer or WindowObserver(exchange.rank, log=False)
        self._paired = paired or PairedModules(None, Patience())
        self._over = False
        self._unfinished: list[PreparedWindow[BatchT]] = []

    def prepare(self, collect: Callable[[], Collected[BatchT]]) -> PreparedWindow[BatchT] | None:
        """Collect a window and prepare its exchange; None at the end of the data, on every rank.

        Args:
            collect: Returns this rank's micro-batches, and whether its data ends with them.

        Raises:
            BaseException: What `collect`, or cutting and costing, raised here.
            evenstep.exchange.ExchangeError: If peers failed, disagree, or are lost.
        """
        # Here and no sooner: a peer joins a window after it has prepared the next.
        self.part()
        if self._over:
            return None
        try:
            return self._prepare(collect)
        except ExchangeError:  # which all ranks raise, or none can hear any more
            self._over = True
            raise

    def leave(self, cause: BaseException) -> None:
        """Take no further part: keep what was promised, and tell the peers, unless they know.

        Args:
            cause: What they are told.
        """
        for window in [*self._unfinished]:
            window.launch()
            window.release()
        if not self._over:
            self._over = True
            self.exchange.leave(cause)

    def settle(self) -> None:
        """Wait until the peers have all samples that this rank has launched, in bounded time."""
        deadline = time.monotonic() + SETTLE_S
        for window in [*self._unfinished]:
            window.settle(grace_s=max(_LEAST_GRACE_S, deadline - time.monotonic()))

    def part(self) -> None:
        """Wait until the peers are done with the windows that are finished here."""
        for window in [*self._unfinished]:
            if window.is_finished:
                window.part()

    def _prepare(self, collect: Callable[[], Collected[BatchT]]) -> PreparedWindow[BatchT] | None:
        clock = PhaseClock()
        with clock.phase("control"):
            agreed, span = self._agree(collect, clock)
        agreement = self._cut_to_common(agreed)
        if agreement.num_slots == 0:
            self._over = True
            self._paired.compare_end(span.number)
            return None
        with clock.phase("control"):
            transfer, measured = self._commit(
                agreement, clock, number=span.number, last=_is_last(agreed)
            )
        read_bytes = sum(layout.nbytes for layout in agreement.layouts)
        window = PreparedWindow(
            self.balancer,
            transfer,
            self.residency,
            self._unfinished.remove,
            num_slots=agreement.num_slots,
            read_bytes=read_bytes,
            span=span,
            last=_is_last(agreed),
            clock=clock,
            measured=measured,
        )
        self._unfinished.append(window)
        self._over = _is_last(agreed)
        return window

    def _agree(
        self, collect: Callable[[], Collected[BatchT]], clock: PhaseClock
    ) -> tuple[Agreement, WindowSpan]:
        span: WindowSpan | None = None

        def offer() -> Offer:
            nonlocal span
            with clock.phase("collect"):
                batches, exhausted, span = collect()
            with clock.phase("cost"):
                return self.balancer.offer(batches, exhausted=exhausted)

        agreement = self.exchange.agree(offer)
        assert span is not None  # `agree` has called `offer`
        return agreement, span

    def _commit(
        self, agreement: Agreement, clock: PhaseClock, *, number: int, last: bool
    ) -> tuple[Transfer, Measured | None]:
        stats: PlanStats | None = None
        packing = ExitStack()  # from the plan until what it brings is checked

        def plan(agreement: Agreement) -> RouteColumns:
            nonlocal stats
            columns = self.balancer.route(agreement)
            is_observed, is_compared = self._observer.wants(number), self._paired.is_due(number)
            if is_observed or is_compared:
                costs, route = self.balancer.costs(agreement), columns.routes()
                if is_observed:
                    stats = plan_stats(costs, route, self.balancer.dp_size)
                if is_compared:
                    self._paired.compare_window(number, costs, route)
            if last:
                self._paired.compare_end(number + 1)
            packing.enter_context(clock.phase("pack"))
            return columns

        def check(
            arriving: Sequence[tuple[int, Placement]], layouts: Sequence[SampleLayout]
        ) -> None:
            packing.close()
            self.balancer.check(arriving, layouts)

        with packing:
            transfer = self.exchange.prepare(agreement, plan, check=check)
        if stats is None:
            return transfer, None
        return transfer, Measured(
            window=number,
            dp_rank=self.exchange.rank,
            dp_size=self.balancer.dp_size,
            plan=stats,
            bytes_sent=sum(transfer.moves.send_splits),
            bytes_received=sum(transfer.moves.recv_splits),
            clock=clock,
        )

    def _cut_to_common(self, agreement: Agreement) -> Agreement:
        """Return the agreement without slots that a rank whose data has ended does not offer."""
        offered = [len(report.slot_counts) for report in agreement.reports]
        common = min(offered)
        if common == max(offered) or not _is_last(agreement):
            return agreement
        self.left_over = tuple(count - common for count in offered)
        first = offered.index(common)
        told = (
            f"the data of rank {first} ended first; micro-batches read but left over per rank: "
            f"{[*self.left_over]}"
        )
        if self._on_uneven_end == "raise":
            raise UnevenEndError(
                f"{told}. Give every rank equally many, for example with drop_last=True and a "
                "DistributedSampler, or choose on_uneven_end='stop'"
            )
        logger.warning("%s; all ranks stop here", told)
        return agreement.first_slots(common)


def _is_last(agreement: Agreement) -> bool:
    return any(report.exhausted for report in agreement.reports)
