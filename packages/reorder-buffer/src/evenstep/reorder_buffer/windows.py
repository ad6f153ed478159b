"""Where a window's work is done: in the calling thread, in a worker, or in both."""

import contextlib
from typing import Generic, NamedTuple, Protocol

import torch

from evenstep.reorder_buffer.device import record_stream_for_batch
from evenstep.reorder_buffer.layout import BatchT
from evenstep.reorder_buffer.overlap import OverlapWorker, StopRequest
from evenstep.reorder_buffer.source import WindowSource
from evenstep.reorder_buffer.window import PreparedWindow, WindowPipeline

__all__ = ["CallerLaunches", "Inline", "Windows", "WorkerDoesAll"]

_THREAD_NAME = "evenstep-reorder-buffer"


class Windows(Protocol[BatchT]):
    """Yields balanced windows, one call each."""

    def next(self) -> list[BatchT] | None:
        """Return the next window's micro-batches; None at the end, on every rank."""
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

    def next(self) -> list[BatchT] | None:
        """Return the next window (see `Windows`)."""
        prepared = self._pipeline.prepare(self._source)
        if prepared is None:
            return None
        prepared.launch()
        return prepared.finish()

    def close(self) -> None:
        """Tell the peers (see `Windows`)."""
        self._stop.make()
        self._pipeline.leave()


class _Ready(NamedTuple, Generic[BatchT]):
    batches: list[BatchT]
    event: torch.cuda.Event | None


class WorkerDoesAll(Generic[BatchT]):
    """All work in a worker thread, one window ahead; `next` only takes what is ready.

    On Gloo this is best: payload moves in Gloo's threads, and joining samples is CPU work. On CUDA
    the worker uses the exchange's stream, and the calling thread's stream waits for it.
    """

    def __init__(
        self, pipeline: WindowPipeline[BatchT], source: WindowSource[BatchT], stop: StopRequest
    ) -> None:
        self._pipeline, self._stop = pipeline, stop
        self._inline = Inline(pipeline, source, stop)
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._worker: OverlapWorker[_Ready[BatchT]] | None = None

    def next(self) -> list[BatchT] | None:
        """Return the next window (see `Windows`)."""
        if self._worker is None:
            self._worker = OverlapWorker(self._produce, self._stop, name=_THREAD_NAME)
        ready = self._worker.get()
        if ready is None:
            return None
        if ready.event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(ready.event)
            record_stream_for_batch(ready.batches, current)
        return ready.batches

    def close(self) -> None:
        """Tell the peers and end the worker (see `Windows`)."""
        if self._worker is None:
            self._inline.close()
        else:
            self._worker.shutdown()

    def _produce(self) -> _Ready[BatchT] | None:
        stream = self._pipeline.exchange.payload.stream
        with contextlib.ExitStack() as scope:
            if self._device is not None:
                scope.enter_context(torch.cuda.device(self._device))
            if stream is not None:
                scope.enter_context(torch.cuda.stream(stream))
            batches = self._inline.next()
            event = None if stream is None else stream.record_event()
        return None if batches is None else _Ready(batches, event)


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
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._worker: OverlapWorker[PreparedWindow[BatchT]] | None = None
        self._moving: PreparedWindow[BatchT] | None = None

    def next(self) -> list[BatchT] | None:
        """Return the next window (see `Windows`)."""
        if self._worker is None:
            self._worker = OverlapWorker(self._produce, self._stop, name=_THREAD_NAME)
            self._launch_next(self._worker)
        if self._moving is None:
            return None
        batches = self._moving.finish()
        self._launch_next(self._worker)
        return batches

    def close(self) -> None:
        """Tell the peers and end the worker (see `Windows`)."""
        self._stop.make()
        if self._worker is None:
            self._pipeline.leave()
        else:
            self._worker.shutdown()

    def _launch_next(self, worker: OverlapWorker[PreparedWindow[BatchT]]) -> None:
        self._moving = worker.get()
        if self._moving is not None:
            self._moving.launch()

    def _produce(self) -> PreparedWindow[BatchT] | None:
        device = (
            contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device)
        )
        with device:
            return self._pipeline.prepare(self._source)
