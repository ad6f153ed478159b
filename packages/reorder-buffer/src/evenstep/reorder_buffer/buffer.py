"""The iterator that users put in front of their loader's."""

import os
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, Self

import torch
import torch.distributed as dist

from evenstep.balance import Strategy
from evenstep.exchange import MismatchError, Patience, ProtocolError, SampleExchange, Setting
from evenstep.reorder_buffer.balancer import WindowBalancer
from evenstep.reorder_buffer.cost import CostFunction
from evenstep.reorder_buffer.layout import BatchT, Layout
from evenstep.reorder_buffer.local_reorder import ImageCountFunction
from evenstep.reorder_buffer.measuring import PhaseClock
from evenstep.reorder_buffer.observer import WindowObserver
from evenstep.reorder_buffer.overlap import StopRequest
from evenstep.reorder_buffer.paired import PairedCheck, PairedModules
from evenstep.reorder_buffer.prepared_window import BalancedWindow
from evenstep.reorder_buffer.presets import MIMO_LAYOUT
from evenstep.reorder_buffer.reader import LoaderReader
from evenstep.reorder_buffer.settings import (
    check_rank,
    check_uneven_end,
    check_window_size,
    settings_of,
)
from evenstep.reorder_buffer.source import WindowSource
from evenstep.reorder_buffer.state import (
    Bookmark,
    Progress,
    StateDict,
    decode_state,
    encode_state,
)
from evenstep.reorder_buffer.stats import OnWindow
from evenstep.reorder_buffer.window import OnUnevenEnd, WindowPipeline
from evenstep.reorder_buffer.windows import Launch, Windows, WindowsMaker, windows_maker

__all__ = ["ReorderingBuffer"]


class ReorderingBuffer(Generic[BatchT]):
    """Wrap a data iterator so that each yielded micro-batch is cost-balanced.

    `window_size` micro-batches are balanced in one exchange and served one at a time; at
    `dp_size == 1` they are permuted locally. Every rank of the group must construct it, with the
    same settings (they are compared), and iterate it. It is a context manager; without one, it
    closes itself when it is dropped, and when the interpreter exits.

    With `overlap=True` a worker thread stays ahead: one window is being served, one is moving or
    ready, one is in the making, so up to three are resident at once; see `peak_resident_bytes`.

    Args:
        data_iterator: Yields this rank's micro-batch shards: a loader, or its iterator. `iter()`
            of it is called by the first `next()`. What it has yielded must stay as it is until it
            is served.
        dp_rank: This rank's module-local DP rank.
        dp_size: This module's DP size.
        n_groups: Canonical group count (LCM of the module DP sizes).
        cost_of: `callable(flat) -> float` per-sample cost.
        dp_group_gloo: Gloo process group for the metadata, used by nobody else; None if
            `dp_size` is 1.
        dp_group_nccl: Process group for the samples, NCCL or Gloo, under overlap used by nobody
            else; None if `dp_size` is 1.
        overlap: Exchange the next window on a background thread.
        image_count_of: Optional `callable(batch) -> LongTensor` of per-sample image counts.
        window_size: Micro-batches balanced per exchange.
        layout: The form of the micro-batches.
        strategy: Name or object of the balancing strategy.
        on_uneven_end: What happens when a rank's data ends before that of the others.
        timeout_s: How long to wait for a peer, in seconds.
        launch: Under overlap, the thread that launches the samples' collective: the `"caller"` of
            `next()`, at one fixed point, which is what `"auto"` takes on NCCL, where collectives
            from several threads can deadlock; or the `"worker"`, which it takes on Gloo.
        on_window: Gets the statistics of each window, in the calling thread, as it is served.
        paired: A check that paired modules derive the same order; None for no check.
        donate: Whether the data iterator gives its micro-batches away: nothing else uses their
            memory, no cache, array or file, and no later micro-batch. Then one whose samples all
            stay on this rank is served where it lies, without a copy, if it is of tensors in host
            memory.

    Raises:
        ValueError: If `window_size < 1`, `overlap=True` under CUDA_DEVICE_MAX_CONNECTIONS=1, or
            another argument is bad; before any communication.
        evenstep.exchange.MismatchError: If the ranks' settings differ.
    """

    def __init__(
        self,
        data_iterator: Iterable[BatchT],
        *,
        dp_rank: int,
        dp_size: int,
        n_groups: int,
        cost_of: CostFunction,
        dp_group_gloo: dist.ProcessGroup | None,
        dp_group_nccl: dist.ProcessGroup | None,
        overlap: bool = True,
        image_count_of: ImageCountFunction[BatchT] | None = None,
        window_size: int = 1,
        layout: Layout[BatchT] = MIMO_LAYOUT,  # type: ignore[assignment]  # then BatchT is a dict
        strategy: str | Strategy = "lpt",
        on_uneven_end: OnUnevenEnd = "stop",
        timeout_s: float = 600.0,
        launch: Launch = "auto",
        on_window: OnWindow | None = None,
        paired: PairedCheck | None = None,
        donate: bool = False,
    ) -> None:
        balancer = WindowBalancer(
            dp_size=dp_size,
            n_groups=n_groups,
            cost_of=cost_of,
            image_count_of=image_count_of,
            layout=layout,
            strategy=strategy,
            donated=donate,
        )
        check_window_size(window_size)
        check_rank(dp_rank, dp_size)
        check_uneven_end(on_uneven_end)
        driver: WindowsMaker[BatchT] = windows_maker(
            overlap=overlap, launch=launch, control=dp_group_gloo, payload=dp_group_nccl
        )
        self._reader = LoaderReader(data_iterator)
        self._stop = stop = StopRequest()
        settings = settings_of(balancer, window_size=window_size, on_uneven_end=on_uneven_end)
        patience = Patience(timeout_s=timeout_s, should_stop=stop.overdue)
        stream = _side_stream() if overlap else None

        def make_exchange(**more: Setting) -> SampleExchange:
            return SampleExchange(
                rank=dp_rank,
                world_size=dp_size,
                control_group=dp_group_gloo,
                payload_group=dp_group_nccl,
                settings={**settings, **more},
                same_schema=False,  # the layout knows which fields a sample may lack
                patience=patience,
                stream=stream,
            )

        self._make_exchange = make_exchange
        self._settings, self._dp_rank = settings, dp_rank
        exchange = make_exchange()
        exchange.compare_settings()
        paired_modules = PairedModules(paired, patience)
        paired_modules.compare_settings(
            {name: value for name, value in settings.items() if name != "dp_size"}
        )
        self._observer = WindowObserver(dp_rank, on_window)
        self._pipeline = WindowPipeline(
            balancer,
            exchange,
            on_uneven_end=on_uneven_end,
            observer=self._observer,
            paired=paired_modules,
        )
        source = WindowSource(self._reader, window_size, stop)
        self._windows: Windows[BatchT] = driver(self._pipeline, source, stop)
        self._resumed: Progress | None = None
        self._bookmark = Bookmark()
        self._ready: deque[BatchT] = deque()
        self._end: BaseException | None = None
        self._trace: TracebackType | None = None
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._windows, self._pid)

    @property
    def left_over(self) -> tuple[int, ...]:
        """Micro-batches per rank that were read but not served, as another rank's data ended."""
        return self._pipeline.left_over

    @property
    def resident_bytes(self) -> int:
        """Bytes of the windows that this rank holds now: read, packed, received, and served."""
        return self._pipeline.residency.now

    @property
    def peak_resident_bytes(self) -> int:
        """The most bytes that this rank's windows took at any time."""
        return self._pipeline.residency.peak

    def __iter__(self) -> Self:
        """Return itself: there is one pass."""
        return self

    def __next__(self) -> BatchT:
        """Return the next balanced micro-batch.

        Raises:
            StopIteration: At the end of the data, on every rank after the same window, and from
                then on.
            BaseException: What went wrong on this rank; and from then on again.
            evenstep.exchange.ExchangeError: What went wrong on another rank, likewise.
            RuntimeError: After `shutdown`, or in a process that fork() made.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this ReorderingBuffer was copied into another process by fork(), and its worker "
                "and groups stayed behind; construct it in the process that iterates it"
            )
        if not self._ready:
            if self._end is not None:
                raise self._end.with_traceback(self._trace)
            self._ready.extend(self._next_window())
        self._bookmark.serve()
        return self._ready.popleft()

    def state_dict(self) -> StateDict:
        """Return what was served, for a checkpoint; micro-batches read ahead do not count.

        The state of the loader, if it has one (torchdata's `StatefulDataLoader` has), is that of
        the start of the current window; another loader is read again up to there. Every rank saves
        and loads its own.
        """
        if self._bookmark.begun:
            progress = self._bookmark.progress()
        else:
            progress = self._resumed or Progress(place=self._reader.place())
        return encode_state(progress, dp_rank=self._dp_rank, settings=self._settings)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on behind the last micro-batch that was served when the state was saved.

        Call it on every rank before the first `next()`, with states of the same step; that is
        compared. The data iterator must be a loader of the same data that has not begun.

        Raises:
            ValueError: If a setting has changed, naming it with both values; the state is none; or
                the loader cannot return there.
            RuntimeError: If iteration has begun.
        """
        if self._bookmark.begun:
            raise RuntimeError(
                "load_state_dict came after the first next(); load the state into a new buffer"
            )
        progress = decode_state(state_dict, dp_rank=self._dp_rank, settings=self._settings)
        self._reader.resume(progress.place, over=progress.last)
        self._resumed = progress
        self._pipeline.exchange = self._make_exchange(resumed_behind=progress.describe())

    def shutdown(self) -> None:
        """Stop the overlap worker, tell the peers, and wait for both in bounded time."""
        self._finish(RuntimeError("this ReorderingBuffer was shut down"))
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _next_window(self) -> Iterable[BatchT]:
        clock = PhaseClock()
        try:
            with clock.phase("wait"):
                window = self._take()
            if window is not None:
                skipped = self._bookmark.enter(window.span, len(window.batches), last=window.last)
                if window.measured is not None:
                    self._observer.notify(window.measured.stats(wait_s=clock.read().wait))
        except StopIteration as error:  # PEP 479, for what is no generator
            failure = RuntimeError(
                "cost_of, image_count_of, the layout, the strategy or on_window raised "
                "StopIteration, which would look like the end of the data"
            )
            self._fail(failure)
            raise failure from error
        except BaseException as error:
            self._fail(error)
            raise
        if window is None:
            self._bookmark.finish(self._reader.place())
            self._finish(StopIteration())
            raise StopIteration
        self._pipeline.residency.serve()
        return window.batches[skipped:]

    def _take(self) -> BalancedWindow[BatchT] | None:
        if not self._bookmark.begun:
            self._reader.open()
            self._bookmark.begin(self._resumed or Progress(place=self._reader.place()))
        try:
            return self._windows.next()
        except (MismatchError, ProtocolError) as error:
            if self._resumed is not None:
                error.add_note(
                    "this rank resumed a saved run; all ranks must, each from its state of one step"
                )
            raise

    def _fail(self, error: BaseException) -> None:
        """Note the error that ends the iteration, and tell the peers."""
        if self._end is None:  # else it was shut down meanwhile
            self._end, self._trace = error, error.__traceback__
        self._stop.make(error)
        if not isinstance(error, KeyboardInterrupt):  # that shall not wait for any peer
            self._finalizer()

    def _finish(self, end: BaseException) -> None:
        """Note how it ended, the first time, and close."""
        self._end = self._end or end
        self._finalizer()


def _side_stream() -> torch.cuda.Stream | None:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch


def _close(windows: Windows[BatchT], pid: int) -> None:
    if os.getpid() == pid:  # a forked copy has nothing to close
        windows.close()
