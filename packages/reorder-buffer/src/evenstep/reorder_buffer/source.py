"""The user's iterator, read window by window."""

from collections.abc import Iterator
from typing import Generic

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
        batches: list[BatchT] = []
        while not self._stop.made:  # also made while the iterator kept this thread
            if len(batches) == self._window_size:
                return batches, False
            try:
                batches.append(next(self._iterator))
            except StopIteration:
                return batches, True
        raise self._stop.error()
