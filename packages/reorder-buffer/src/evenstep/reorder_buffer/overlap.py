"""A worker thread that stays ahead, and ends in bounded time whatever happens."""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

from evenstep.exchange import ExchangeStoppedError

__all__ = ["OverlapWorker", "StopRequest"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.2  # how often a blocked thread looks whether the other one still lives
_GRACE_S = 5.0  # how long a rank that leaves waits for its peers to hear it
_JOIN_S = _GRACE_S + 10 * _POLL_S


class StopRequest:
    """The wish to stop, with a time of grace in which peers can be told."""

    def __init__(self) -> None:
        self._deadline = float("inf")
        self._reason = ""

    def make(self, cause: BaseException | None = None) -> None:
        """Ask to stop; the first call counts. It takes no lock: a finalizer may call it anywhere.

        Args:
            cause: What went wrong here; None if this rank was shut down.
        """
        if not self.made:
            what = "was shut down" if cause is None else f"failed: {type(cause).__name__}: {cause}"
            self._reason = f"the reorder buffer of this rank {what}"
            self._deadline = time.monotonic() + _GRACE_S

    @property
    def made(self) -> bool:
        """Whether someone asked to stop."""
        return self._deadline < float("inf")

    def overdue(self) -> bool:
        """Whether the time of grace is over too."""
        return time.monotonic() > self._deadline

    def error(self) -> ExchangeStoppedError:
        """Return what this rank tells its peers."""
        return ExchangeStoppedError(self._reason)


class OverlapWorker(Generic[T]):
    """Calls `produce` in a thread, again and again until it returns None or raises.

    Args:
        produce: Makes one result; None at the end.
        at_end: Called in the thread after that, with what was raised, if anything.
        stop: The wish to stop; `produce` is not called any more then.
        ahead: How many results there may be that are in the making or were not `done`.
        scope: What the thread does all of this in, for example a CUDA stream.
        name: Of the thread.
    """

    def __init__(
        self,
        produce: Callable[[], T | None],
        at_end: Callable[[BaseException | None], None],
        stop: StopRequest,
        *,
        ahead: int,
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
        name: str,
    ) -> None:
        # SimpleQueue is safe in a finalizer that interrupts one of its own methods.
        self._results: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(ahead):
            self._permits.put(None)
        self._failure: BaseException | None = None
        self._exhausted = False
        self._stop = stop
        # A daemon, so that the interpreter's exit does not wait for it before it asks it to stop.
        self._thread = threading.Thread(
            target=self._run, args=(scope, produce, at_end), name=name, daemon=True
        )
        self._thread.start()

    def get(self) -> T | None:
        """Return the next result; None after the last, for whatever reason there are no more."""
        while not self._exhausted:
            ended = not self._thread.is_alive()
            try:
                result = self._results.get(timeout=_POLL_S)
            except queue.Empty:
                result = None
                if not ended:
                    continue
            if result is not None:
                return result
            self._exhausted = True
        return None

    def done(self) -> None:
        """Note that the consumer is done with a result, so that another may be made."""
        self._permits.put(None)

    def raise_failure(self) -> None:
        """Raise what ended the thread, unless it came to the end."""
        if self._failure is not None:
            raise self._failure

    def join(self) -> bool:
        """Wait for the thread, which was asked to stop, in bounded time; whether it has ended."""
        if threading.current_thread() is self._thread:  # the garbage collector ran in it
            atexit.register(self._thread.join, _JOIN_S)
            return False
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.warning(
                "the reorder buffer's worker has not ended %.0f s after it was asked to: it waits "
                "for the data iterator or the cost function",
                _JOIN_S,
            )
        return not self._thread.is_alive()

    def _run(
        self,
        scope: Callable[[], AbstractContextManager[None]],
        produce: Callable[[], T | None],
        at_end: Callable[[BaseException | None], None],
    ) -> None:
        with scope():
            try:
                while (result := self._when_allowed(produce)) is not None:
                    self._results.put(result)
                    del result  # the consumer's alone, or it would stay for one window more
            except BaseException as error:  # noqa: BLE001 - the consumer raises it
                self._failure = error
            self._results.put(None)
            at_end(self._failure)

    def _when_allowed(self, produce: Callable[[], T | None]) -> T | None:
        while not self._stop.made:
            try:
                self._permits.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            return produce()
        raise self._stop.error()
