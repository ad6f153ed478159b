"""Where a window's work is done: in the calling thread, in a worker, or in both."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from evenstep.reorder_buffer.device import record_stream_for_batch
from evenstep.reorder_buffer.layout import BatchT
from evenstep.reorder_buffer.overlap import OverlapWorker, StopRequest
from evenstep.reorder_buffer.prepared_window import BalancedWindow, PreparedWindow
from evenstep.reorder_buffer.settings import check_overlap
from evenstep.reorder_buffer.source import WindowSource
from evenstep.reorder_buffer.window import WindowPipeline

__all__ = ["Launch", "Windows", "WindowsMaker", "windows_maker"]

T = TypeVar("T")

Launch: TypeAlias = Literal["auto", "caller", "worker"]
"""Which thread launches the samples' collective under overlap."""


class Windows(Protocol[BatchT]):
    """Yields balanced windows, one call each."""

    def next(self) -> BalancedWindow[BatchT] | None:
        """Return the next window; None at the end, on every rank."""
        ...

    def close(self) -> None:
        """Tell the peers, if they do not know yet, and end all threads, in bounded time."""
        ...


WindowsMaker: TypeAlias = Callable[
    [WindowPipeline[BatchT], WindowSource[BatchT], StopRequest], Windows[BatchT]
]


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
    """A joined window, and what the consumer's stream must wait for."""

    window: BalancedWindow[BatchT]
    event: torch.cuda.Event | None

    def take(self) -> BalancedWindow[BatchT]:
        if self.event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self.event)
            record_stream_for_batch(self.window.batches, current)
        return self.window


class WorkerDoesAll(Generic[BatchT]):
    """All work in a worker thread; `next` only takes what is ready.

    On CUDA the worker uses the exchange's stream, and the calling thread's stream waits for it.
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
        return ready.take()

    def close(self) -> None:
        """Tell the peers and end the worker (see `Windows`)."""
        _close(self._pipeline, self._worker, self._stop)

    def _produce(self) -> _Ready[BatchT] | None:
        window = self._inline.next()
        return None if window is None else _ready(self._pipeline, window)


class _Step(NamedTuple, Generic[BatchT]):
    """What the worker has made of two windows that follow each other."""

    ready: _Ready[BatchT] | None
    prepared: PreparedWindow[BatchT] | None


class CallerLaunches(Generic[BatchT]):
    """A worker does all work but one thing: the calling thread launches the collectives.

    That happens at one fixed point of `next`, where every rank's program order is the same: NCCL
    does not allow several threads to launch on one device, each in an order of its own. While a
    window moves, the worker prepares the one behind it, and then joins what has arrived.
    """

    def __init__(
        self, pipeline: WindowPipeline[BatchT], source: WindowSource[BatchT], stop: StopRequest
    ) -> None:
        self._pipeline, self._source, self._stop = pipeline, source, stop
        self._worker: OverlapWorker[_Step[BatchT]] | None = None
        self._moving: PreparedWindow[BatchT] | None = None  # the worker's, as the next one is
        self._failure: BaseException | None = None

    def next(self) -> BalancedWindow[BatchT] | None:
        """Return the next window (see `Windows`)."""
        if self._worker is None:
            # One window is served, one is moving or ready; one may wait to be launched.
            self._worker = _worker(self._pipeline, self._produce, self._stop, ahead=1)
            self._advance(self._worker)
        ready = self._advance(self._worker)
        return None if ready is None else ready.take()

    def close(self) -> None:
        """Tell the peers and end the worker (see `Windows`)."""
        _close(self._pipeline, self._worker, self._stop)

    def _advance(self, worker: OverlapWorker[_Step[BatchT]]) -> _Ready[BatchT] | None:
        """Launch the window that the worker has prepared, and return the one that is ready."""
        step = worker.get()
        if step is None:
            worker.raise_failure()
            return None
        if step.prepared is not None:
            step.prepared.launch()
        worker.done()  # only now, so that launches keep their order even if this rank leaves
        return step.ready

    def _produce(self) -> _Step[BatchT] | None:
        if self._failure is not None:
            raise self._failure
        moving, self._moving = self._moving, None
        try:
            self._moving = self._pipeline.prepare(self._source)
        except BaseException as error:
            if moving is None:
                raise
            self._failure = error  # due only when the window before it was served
        ready = None if moving is None else _ready(self._pipeline, moving.finish())
        if ready is None and self._moving is None:
            return None
        return _Step(ready, self._moving)


def windows_maker(
    *,
    overlap: bool,
    launch: Launch,
    control: dist.ProcessGroup | None,
    payload: dist.ProcessGroup | None,
) -> WindowsMaker[BatchT]:
    """Return what divides the work between threads as the user chose.

    Args:
        overlap: Whether a worker stays ahead.
        launch: The thread that launches the samples' collective then.
        control: The group for the metadata.
        payload: The group for the samples.

    Raises:
        ValueError: If the choice is none, or could not work.
    """
    if launch not in {"auto", "caller", "worker"}:
        raise ValueError(f"launch is {launch!r}; it must be 'auto', 'caller' or 'worker'")
    if not overlap:
        return Inline
    if launch == "auto":
        on_gpu = payload is not None and dist.get_backend(payload) == "nccl"
        launch = "caller" if on_gpu else "worker"
    check_overlap(control, payload, one_thread=launch == "worker")
    return CallerLaunches if launch == "caller" else WorkerDoesAll


def _ready(pipeline: WindowPipeline[BatchT], window: BalancedWindow[BatchT]) -> _Ready[BatchT]:
    stream = pipeline.exchange.payload.stream
    return _Ready(window, None if stream is None else stream.record_event())


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
