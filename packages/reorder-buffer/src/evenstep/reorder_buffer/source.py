"""The user's iterator, read window by window."""

from collections.abc import Sequence
from typing import Generic, NamedTuple

from evenstep.reorder_buffer.layout import BatchT
from evenstep.reorder_buffer.overlap import StopRequest
from evenstep.reorder_buffer.reader import LoaderReader, ReaderPlace

__all__ = ["Collected", "WindowSource", "WindowSpan"]


class WindowSpan(NamedTuple):
    """The part of this rank's data that a window was made from.

    Attributes:
        number: Number of the window, from 0.
        start: The place before its first micro-batch.
        end: The place behind its last.
    """

    number: int
    start: ReaderPlace
    end: ReaderPlace


class Collected(NamedTuple, Generic[BatchT]):
    """What was read for a window.

    Attributes:
        batches: This rank's micro-batches.
        exhausted: Whether its data ends with them.
        span: Where they come from.
    """

    batches: Sequence[BatchT]
    exhausted: bool
    span: WindowSpan


class WindowSource(Generic[BatchT]):
    """Reads up to `window_size` micro-batches at a time.

    Args:
        reader: Yields this rank's micro-batches.
        window_size: Micro-batches per window.
        stop: Once made, reading raises instead.
    """

    def __init__(self, reader: LoaderReader[BatchT], window_size: int, stop: StopRequest) -> None:
        self._reader = reader
        self._window_size = window_size
        self._stop = stop
        self._place: ReaderPlace | None = None  # where the window before has ended

    def __call__(self) -> Collected[BatchT]:
        """Return the micro-batches of the next window, and whether the data ends with them.

        Raises:
            ExchangeStoppedError: After a request to stop; peers hear of it like of any error.
        """
        start = self._place or self._reader.place()
        batches, exhausted = self._read()
        self._place = self._reader.place()
        number = start.batches_read // self._window_size
        return Collected(batches, exhausted, WindowSpan(number, start, self._place))

    def _read(self) -> tuple[list[BatchT], bool]:
        batches: list[BatchT] = []
        while not self._stop.made:  # also made while the iterator kept this thread
            if len(batches) == self._window_size:
                return batches, False
            try:
                batches.append(next(self._reader))
            except StopIteration:
                return batches, True
        raise self._stop.error()
