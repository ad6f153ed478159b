"""Time by phase, and the same phases as ranges in a profiler's trace."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, TypeAlias

from torch.autograd import profiler

from evenstep.reorder_buffer.stats import PlanStats, WindowSeconds, WindowStats

__all__ = ["Measured", "Phase", "PhaseClock"]

Phase: TypeAlias = Literal["collect", "cost", "control", "pack", "transfer", "merge", "wait"]


class PhaseClock:
    """Adds up the seconds of each phase of one window; a phase inside another is not counted twice.

    While `torch.profiler` runs, each phase is a `record_function` range, `evenstep/<phase>`, in its
    trace; those of the worker thread too, if it was asked to profile all threads. Only one thread
    at a time may use a clock.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._nested_s = 0.0

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count the time of the block for `name`, but for phases within it."""
        outer_s, self._nested_s = self._nested_s, 0.0
        started = time.perf_counter()
        try:
            with _profiled(name):
                yield
        finally:
            elapsed_s = time.perf_counter() - started
            own_s = elapsed_s - self._nested_s
            self._seconds[name] = self._seconds.get(name, 0.0) + own_s
            self._nested_s = outer_s + elapsed_s

    def read(self) -> WindowSeconds:
        """Return the seconds so far."""
        return WindowSeconds(**self._seconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What becomes a window's statistics once it is served.

    Attributes:
        window: Number of the window.
        dp_rank: This rank.
        dp_size: Number of ranks.
        plan: What costs and plan tell.
        bytes_sent: Bytes to other ranks.
        bytes_received: Bytes from other ranks.
        clock: The window's times, but for `wait`.
    """

    window: int
    dp_rank: int
    dp_size: int
    plan: PlanStats
    bytes_sent: int
    bytes_received: int
    clock: PhaseClock

    def stats(self, *, wait_s: float) -> WindowStats:
        """Return the statistics of a window that `next()` has waited for."""
        return WindowStats(
            window=self.window,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            slots=self.plan.slots,
            samples=self.plan.samples,
            moved_cost_share=self.plan.moved_cost_share,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            seconds=dataclasses.replace(self.clock.read(), wait=wait_s),
        )


def _profiled(name: Phase) -> AbstractContextManager[object]:
    # A range takes tens of microseconds even when nobody records it.
    if profiler._is_profiler_enabled:  # noqa: SLF001 - what torch's optimizers ask, too
        return profiler.record_function(f"evenstep/{name}")
    return nullcontext()
