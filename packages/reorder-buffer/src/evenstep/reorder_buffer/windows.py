"""Where a window's work is done: in the calling thread, in a worker, or in both."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from evenstep.reorder_buffer.device import record_stream_for_batch
from evenstep.reorder_buffer.layout import BatchT
from evenstep.reorder_buffer.overlap import OverlapWorker, StopRequest
from evenstep.reorder_buffer.source import WindowSource
from evenstep.reorder_buffer.window import BalancedWindow, PreparedWindow, WindowPipeline

__all__ = ["CallerLaunches", "Inline", "Windows", "WorkerDoesAll"]

T = TypeVar("T")


class Windows(Protocol[BatchT]):
    """Yields balanced windows, one call each."""

    def next(self) -> BalancedWindow[BatchT] | None:
        """Return the next window; None at the end, on every rank."""
        ...

    def close(self) -> None:
        """Tell the peers, if they do not know yet, and end all threads, in bounded time."""
        ...


class Inline(Generic[BatchT]):
    """All work in the calling thread, when a window is due."""

    def __init__(
        self, pipeline: WindowPipeline[BatchT], source: WindowSource[BatchT], stop: StopRequest
    ) -> None:
        self._pipeline, self._source, self._stop = pipeline, source, stop

    def next(self) -> BalancedWindow[BatchT] | None:
        """Return the next window (see `Windows`)."""
        prepared = self._pipeline.prepare(self._source)
        if prepared is None:
            return None
        prepared.launch()
        return prepared.finish()

    def close(self) -> None:
        """Tell the peers (see `Windows`)."""
        self._stop.make()
        self._pipeline.leave(self._stop.error())
        self._pipeline.settle()


class _Ready(NamedTuple, Generic[BatchT]):
    window: BalancedWindow[BatchT]
    event: torch.cuda.Event | None


class WorkerDoesAll(Generic[BatchT]):
    """All work in a worker thread; `next` only takes what is ready.

    On Gloo this is best: payload moves in Gloo's threads, and joining samples is CPU work. On CUDA
    the worker uses the exchange's stream, and the calling thread's stream waits for it.
    """

    def __init__(
        self, pipeline: WindowPipeline[BatchT], source: WindowSource[BatchT], stop: StopRequest
    ) -> None:
        self._pipeline, self._stop = pipeline, stop
        self._inline = Inline(pipeline, source, stop)
        self._worker: OverlapWorker[_Ready[BatchT]] | None = None

    def next(self) -> BalancedWindow[BatchT] | None:
        """Return the next window (see `Windows`)."""
        if self._worker is None:
            # One window is served; one may be ready, and one in the making.
            self._worker = _worker(self._pipeline, self._produce, self._stop, ahead=2)
        ready = self._worker.get()
        if ready is None:
            self._worker.raise_failure()
            return None
        self._worker.done()
        if ready.event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(ready.event)
            record_stream_for_batch(ready.window.batches, current)
        return ready.window

    def close(self) -> None:
        """Tell the peers and end the worker (see `Windows`)."""
        _close(self._pipeline, self._worker, self._stop)

    def _produce(self) -> _Ready[BatchT] | None:
        stream = self._pipeline.exchange.payload.stream
        window = self._inline.next()
        event = None if stream is None else stream.record_event()
        return None if window is None else _Ready(window, event)


class CallerLaunches(Generic[BatchT]):
    """A worker collects, agrees and packs; the calling thread launches, and joins what arrived.

    At one fixed point of `next`, where every rank's program order is the same, the calling thread
    completes one window and launches the next: NCCL does not allow several threads to launch on
    one device, each in an order of its own.
    """

    def __init__(
        self, pipeline: WindowPipeline[BatchT], source: WindowSource[BatchT], stop: StopRequest
    ) -> None:
        self._pipeline, self._source, self._stop = pipeline, source, stop
        self._worker: OverlapWorker[PreparedWindow[BatchT]] | None = None
        self._moving: PreparedWindow[BatchT] | None = None

    def next(self) -> BalancedWindow[BatchT] | None:
        """Return the next window (see `Windows`)."""
        if self._worker is None:
            # One window is served, one is moving; one may be ready to be launched.
            self._worker = _worker(self._pipeline, self._produce, self._stop, ahead=1)
            self._launch_next(self._worker)
        if self._moving is None:  # an error is due only now: what was made before it is served
            self._worker.raise_failure()
            return None
        window = self._moving.finish()
        self._launch_next(self._worker)
        return window

    def close(self) -> None:
        """Tell the peers and end the worker (see `Windows`)."""
        _close(self._pipeline, self._worker, self._stop)

    def _launch_next(self, worker: OverlapWorker[PreparedWindow[BatchT]]) -> None:
        self._moving = None  # so that nothing of it stays while this waits
        self._moving = worker.get()
        if self._moving is not None:
            self._moving.launch()
            worker.done()  # only now, so that launches keep their order even if this rank leaves

    def _produce(self) -> PreparedWindow[BatchT] | None:
        return self._pipeline.prepare(self._source)


def _worker(
    pipeline: WindowPipeline[BatchT],
    produce: Callable[[], T | None],
    stop: StopRequest,
    *,
    ahead: int,
) -> OverlapWorker[T]:
    """Start a worker that uses the exchange's stream, and at its end tells the peers."""
    stream = pipeline.exchange.payload.stream
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())  # it may still make what the data comes of

    @contextlib.contextmanager
    def scope() -> Iterator[None]:  # device and stream are a thread's own
        if stream is None:
            yield
        else:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                yield

    def leave(failure: BaseException | None) -> None:
        pipeline.leave(failure or stop.error())

    return OverlapWorker(
        produce, leave, stop, ahead=ahead, scope=scope, name="evenstep-reorder-buffer"
    )


def _close(
    pipeline: WindowPipeline[BatchT], worker: OverlapWorker[T] | None, stop: StopRequest
) -> None:
    stop.make()
    if worker is None:
        pipeline.leave(stop.error())
    elif not worker.join():
        return
    pipeline.settle()
