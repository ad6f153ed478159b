"""The user's iterator, read window by window."""

from collections.abc import Iterator
from typing import Generic

from evenstep.exchange import ExchangeStoppedError
from evenstep.reorder_buffer.layout import BatchT
from evenstep.reorder_buffer.overlap import StopRequest

__all__ = ["WindowSource"]


class WindowSource(Generic[BatchT]):
    """Reads up to `window_size` micro-batches at a time.

    Args:
        iterator: Yields this rank's micro-batches.
        window_size: Micro-batches per window.
        stop: Once made, reading raises instead.
    """

    def __init__(self, iterator: Iterator[BatchT], window_size: int, stop: StopRequest) -> None:
        self._iterator = iterator
        self._window_size = window_size
        self._stop = stop

    def __call__(self) -> tuple[list[BatchT], bool]:
        """Return the micro-batches of the next window, and whether the data ends with them.

        Raises:
            ExchangeStoppedError: After a request to stop; peers hear of it like of any error.
        """
        if self._stop.made:
            raise ExchangeStoppedError("this rank has shut its reorder buffer down")
        batches: list[BatchT] = []
        for batch in self._iterator:
            batches.append(batch)
            if len(batches) == self._window_size:
                return batches, False
        return batches, True
