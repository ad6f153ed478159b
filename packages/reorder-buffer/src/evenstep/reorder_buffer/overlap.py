"""A worker thread that stays one window ahead, and ends in bounded time whatever happens."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["OverlapWorker", "StopRequest"]

T = TypeVar("T")

_POLL_S = 0.2  # how often a blocked thread looks whether the other one still lives
_SHUTDOWN_S = 5.0  # how long a rank that leaves waits for its peers to hear it


class StopRequest:
    """The wish to stop, with a time of grace in which peers can be told."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._deadline = float("inf")

    def make(self) -> None:
        """Ask to stop; the first call counts."""
        if not self._event.is_set():
            self._deadline = time.monotonic() + _SHUTDOWN_S
            self._event.set()

    @property
    def made(self) -> bool:
        """Whether someone asked to stop."""
        return self._event.is_set()

    def overdue(self) -> bool:
        """Whether the time of grace is over too."""
        return time.monotonic() > self._deadline


class OverlapWorker(Generic[T]):
    """Calls `produce` in a thread, again and again until it returns None or raises.

    One result waits in a queue while the next is made.

    Args:
        produce: Makes one result; None at the end. Called after `stop` was made, it must raise.
        stop: The wish to stop.
        name: Of the thread.
    """

    def __init__(self, produce: Callable[[], T | None], stop: StopRequest, *, name: str) -> None:
        self._results: queue.Queue[T | None] = queue.Queue(maxsize=1)
        self._failure: BaseException | None = None
        self._stop = stop
        # A daemon, so that the interpreter's exit does not wait for it before it asks it to stop.
        self._thread = threading.Thread(target=self._run, args=(produce,), name=name, daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether `produce` raised; `get` raises it after the results made before."""
        return self._failure is not None

    def get(self) -> T | None:
        """Return the next result, None at the end; raise what `produce` raised."""
        while True:
            ended = not self._thread.is_alive()
            try:
                result = self._results.get(timeout=_POLL_S)
            except queue.Empty:
                if not ended:
                    continue
                raise self._failure or RuntimeError("the worker was shut down") from None
            if result is None and self._failure is not None:
                raise self._failure
            return result

    def shutdown(self) -> bool:
        """Ask the thread to stop and wait for it, in bounded time; whether it has ended."""
        self._stop.make()
        self._thread.join(timeout=_SHUTDOWN_S + 10 * _POLL_S)
        return not self._thread.is_alive()

    def _run(self, produce: Callable[[], T | None]) -> None:
        try:
            while (result := produce()) is not None:
                self._put(result)
        except BaseException as error:  # noqa: BLE001 - `get` raises it in the consumer's thread
            self._failure = error
        self._put(None)

    def _put(self, result: T | None) -> None:
        """Put a result into the queue, or drop it once nobody wants it any more."""
        while not self._stop.made:
            try:
                self._results.put(result, timeout=_POLL_S)
            except queue.Full:
                continue
            return
