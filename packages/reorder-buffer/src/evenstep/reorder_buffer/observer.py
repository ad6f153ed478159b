"""Who gets to see a window's statistics, and whether anyone looks at all."""

import logging
from collections.abc import Sequence
from dataclasses import asdict

from evenstep.reorder_buffer.stats import OnWindow, SlotLoads, WindowStats

__all__ = ["WindowObserver", "log_slots"]

logger = logging.getLogger(__name__)

_PROBED_FIRST = 3  # windows: enough to see that it works
_PROBED_EVERY = 50  # and then so rarely that nobody minds


class WindowObserver:
    """Hands statistics to a callback, and on rank 0 now and then to the log.

    The log gets the first three windows and every fiftieth at level INFO, as the reference's
    probe does. Windows that nobody looks at cost no statistics.

    Args:
        dp_rank: This rank.
        on_window: The user's callback; None if there is none.
        log: Whether rank 0 logs every window (True) or none (False); None is as described.
    """

    def __init__(
        self, dp_rank: int, on_window: OnWindow | None = None, *, log: bool | None = None
    ) -> None:
        self._dp_rank = dp_rank
        self._on_window = on_window
        self._log = log

    def wants(self, window: int) -> bool:
        """Whether anyone looks at the window of this number."""
        return self._on_window is not None or self._logs(window)

    def notify(self, stats: WindowStats) -> None:
        """Hand the statistics on; what the callback raises passes through."""
        if self._logs(stats.window):
            logger.info("%s", stats)
            log_slots(stats.slots)
        if self._on_window is not None:
            self._on_window(stats)

    def _logs(self, window: int) -> bool:
        due = self._log
        if due is None:
            due = window < _PROBED_FIRST or window % _PROBED_EVERY == 0
        return due and self._dp_rank == 0 and logger.isEnabledFor(logging.INFO)


def log_slots(slots: Sequence[SlotLoads]) -> None:
    """Log what balancing does to the loads of each micro-batch, the spec's probe."""
    for number, slot in enumerate(slots):
        logger.info("slot %d: %s", number, asdict(slot))
