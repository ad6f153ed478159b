"""One call for a plain DDP or FSDP loop: a loader in, a balanced loader out."""

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, Self, runtime_checkable

import torch
import torch.distributed as dist

from evenstep.balance import Strategy
from evenstep.exchange import ModuleGroups, Patience
from evenstep.reorder_buffer.buffer import ReorderingBuffer
from evenstep.reorder_buffer.cost import CostFunction
from evenstep.reorder_buffer.layout import BatchT, Layout
from evenstep.reorder_buffer.local_reorder import ImageCountFunction
from evenstep.reorder_buffer.presets import MIMO_LAYOUT
from evenstep.reorder_buffer.state import StateDict, begin_next_pass
from evenstep.reorder_buffer.stats import OnWindow
from evenstep.reorder_buffer.window import OnUnevenEnd
from evenstep.reorder_buffer.windows import Launch

__all__ = ["BalancedLoader", "balance_loader"]

logger = logging.getLogger(__name__)


def balance_loader(
    loader: Iterable[BatchT],
    cost: CostFunction,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout[BatchT] = MIMO_LAYOUT,  # type: ignore[assignment]  # then BatchT is a dict
    window_size: int = 1,
    strategy: str | Strategy = "least_move",
    overlap: bool = True,
    image_count_of: ImageCountFunction[BatchT] | None = None,
    on_uneven_end: OnUnevenEnd = "stop",
    timeout_s: float = 600.0,
    launch: Launch = "auto",
    donate: bool = False,
    on_window: OnWindow | None = None,
) -> "BalancedLoader[BatchT]":
    """Put load balancing between a loader and a training loop.

    Every rank of the world must call this, and iterate the result in step. It makes process groups
    of its own; without torch.distributed, or alone in its group, a rank keeps its samples.

        batches = balance_loader(loader, TextCost())
        for epoch in range(epochs):
            batches.set_epoch(epoch)
            for batch in batches: ...

    Samples change their rank, so a loss that is a mean over the rank's own samples or tokens must
    become one over the global batch; see `docs/README.md`, "What stays the same".

    Args:
        loader: Yields this rank's micro-batches, a new pass with each `iter()`: a `DataLoader` with
            a `DistributedSampler` and `drop_last=True`, for example.
        cost: `callable(flat) -> float` per-sample cost: `TextCost()`, `ImageCost()`,
            `TextAndImageCost(...)`, `SampleCost(...)` or a function of yours.
        group: The data-parallel ranks; None for all ranks.
        layout: The form of the micro-batches.
        window_size: Micro-batches that are balanced in one exchange, for example those of one
            optimizer step.
        strategy: Name or object of the balancing strategy.
        overlap: Exchange the next window on a background thread.
        image_count_of: Optional `callable(batch) -> LongTensor` of per-sample image counts.
        on_uneven_end: What happens when a rank's data ends before that of the others.
        timeout_s: How long to wait for a peer, in seconds.
        launch: See `ReorderingBuffer`.
        donate: See `ReorderingBuffer`.
        on_window: Gets the statistics of each window; see `docs/observability.md`.

    Raises:
        ValueError: If an argument is bad.
        evenstep.exchange.MismatchError: If the ranks' settings differ.
    """
    groups = _groups(group, overlap=overlap)
    make_buffer = partial(
        ReorderingBuffer[BatchT],
        loader,
        dp_rank=0 if groups is None else groups.rank,
        dp_size=1 if groups is None else groups.world_size,
        n_groups=1 if groups is None else groups.world_size,
        cost_of=cost,
        dp_group_gloo=None if groups is None else groups.control,
        dp_group_nccl=None if groups is None else groups.payload,
        overlap=overlap,
        image_count_of=image_count_of,
        window_size=window_size,
        layout=layout,
        strategy=strategy,
        on_uneven_end=on_uneven_end,
        timeout_s=timeout_s,
        launch=launch,
        donate=donate,
        on_window=on_window,
    )
    return BalancedLoader(loader, make_buffer, groups, Patience(timeout_s=timeout_s))


class BalancedLoader(Generic[BatchT]):
    """Yields balanced micro-batches, one pass with each `iter()`; made by `balance_loader`.

    It closes itself when it is dropped and when the interpreter exits; as a context manager, or by
    `close`, at a time of the user's choice. A new `iter()` ends the pass before, so leave a pass
    early on all ranks or on none.

    Args:
        loader: Yields this rank's micro-batches.
        make_buffer: Makes the buffer of one pass over it; every rank in step.
        groups: The groups that the buffers use, which this closes; None if there are none.
        patience: How long to wait for peers.
    """

    def __init__(
        self,
        loader: Iterable[BatchT],
        make_buffer: Callable[[], ReorderingBuffer[BatchT]],
        groups: ModuleGroups | None,
        patience: Patience,
    ) -> None:
        self._loader = loader
        self._patience = patience
        self._make_buffer = make_buffer
        self._groups = groups
        self._pass = _Pass[BatchT]()
        self._finalizer = weakref.finalize(self, _close, self._pass, groups, os.getpid())
        self._pass.buffer = make_buffer()  # finds bad arguments and settings that differ
        self._length = self._common_length()
        self._epoch: int | None = None

    def __iter__(self) -> ReorderingBuffer[BatchT]:
        """Begin a pass: over all the data, or from where a loaded state was; every rank in step."""
        if not self._finalizer.alive:
            raise RuntimeError("this balanced loader was closed; make a new one")
        if self._pass.begun:
            if isinstance(self._loader, Iterator):
                logger.warning(
                    "the data is a %s, an iterator, which gives one pass; pass balance_loader what "
                    "makes iterators, such as a DataLoader",
                    type(self._loader).__name__,
                )
            self._pass.renew(self._make_buffer)
            self._length = self._common_length()  # it may depend on the epoch
        self._pass.begun = True
        assert self._pass.buffer is not None
        return self._pass.buffer

    def __len__(self) -> int:
        """Return how many micro-batches a whole pass has: of the ranks' loaders, the fewest.

        Raises:
            TypeError: If a rank's loader has no length.
        """
        if self._length is None:
            raise TypeError(f"the {type(self._loader).__name__} of a rank has no len()")
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch to the loader, its samplers and its dataset, whichever take it."""
        self._epoch = epoch
        takers = _epoch_takers(self._loader)
        for taker in takers:
            taker.set_epoch(epoch)
        if not takers:
            logger.warning("no part of the %s takes an epoch", type(self._loader).__name__)

    def state_dict(self) -> StateDict:
        """Return what was served, for a checkpoint (see `ReorderingBuffer.state_dict`).

        As with torchdata's `StatefulDataLoader`, the state behind the end of a pass begins the
        next one. Every rank saves and loads its own.
        """
        assert self._pass.buffer is not None
        return {"epoch": self._epoch, "pass": self._pass.buffer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next `iter()` go on behind the last micro-batch that was served.

        It sets the epoch of then, too. Every rank must call it, with states of the same step.

        Raises:
            ValueError: If a setting has changed, naming it with both values; the state is none; or
                the loader cannot return there.
        """
        if "pass" not in state_dict:
            raise ValueError(
                f"the state has {[*state_dict]}, and no 'pass'; pass what state_dict() of a "
                "balanced loader returned"
            )
        if state_dict["epoch"] is not None:
            self.set_epoch(state_dict["epoch"])
        self._pass.renew(self._make_buffer)
        assert self._pass.buffer is not None
        self._pass.buffer.load_state_dict(begin_next_pass(state_dict["pass"]))

    def close(self) -> None:
        """End the pass and destroy the groups; every rank should, at about the same time."""
        self._finalizer()

    def _common_length(self) -> int | None:
        """Return the fewest micro-batches of a rank, None if one cannot tell; ranks in step."""
        try:
            length = len(self._loader) if isinstance(self._loader, Sized) else -1
        except TypeError:  # a DataLoader has __len__ even if its dataset has none
            length = -1
        lengths = torch.tensor([length])
        if self._groups is not None and self._groups.world_size > 1:
            control = self._groups.control
            work = dist.all_reduce(lengths, op=dist.ReduceOp.MIN, group=control, async_op=True)
            assert work is not None  # None is for ranks outside the group
            self._patience.wait(work, control, doing="comparing the loaders' lengths")
        shortest = int(lengths)
        return None if shortest < 0 else shortest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Pass(Generic[BatchT]):
    """The buffer of the present pass, apart from the loader so that its finalizer can hold it."""

    def __init__(self) -> None:
        self.buffer: ReorderingBuffer[BatchT] | None = None
        self.begun = False

    def renew(self, make: Callable[[], ReorderingBuffer[BatchT]]) -> None:
        if self.buffer is not None:
            self.buffer.shutdown()
        self.buffer = make()
        self.begun = False


def _close(running: _Pass[BatchT], groups: ModuleGroups | None, pid: int) -> None:
    if os.getpid() != pid:  # a forked copy has nothing to close
        return
    if running.buffer is not None:
        running.buffer.shutdown()
    if groups is not None:
        groups.close()


def _groups(group: dist.ProcessGroup | None, *, overlap: bool) -> ModuleGroups | None:
    if dist.is_available() and dist.is_initialized():
        main = dist.group.WORLD if group is None else group
        assert main is not None  # as it is initialized
        return ModuleGroups.create(main, overlap=overlap)
    if group is not None:
        raise ValueError(f"group is {group!r}, but torch.distributed is not initialized")
    return None


@runtime_checkable
class _TakesEpoch(Protocol):
    def set_epoch(self, epoch: int, /) -> object: ...


def _epoch_takers(loader: object) -> list[_TakesEpoch]:
    """Return what has a `set_epoch`: the loader itself, or else what it is made of."""
    if isinstance(loader, _TakesEpoch):
        return [loader]
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = {
        id(part): part
        for part in (
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "dataset", None),
        )
    }
    return [part for part in parts.values() if isinstance(part, _TakesEpoch)]
