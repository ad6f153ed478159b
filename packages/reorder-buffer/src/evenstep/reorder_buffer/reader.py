"""The user's loader, read one micro-batch at a time, and its place, to which a run can return."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, Self, runtime_checkable

import torch
from torch.utils.data import DataLoader, RandomSampler

from evenstep.reorder_buffer.layout import BatchT

__all__ = ["LoaderReader", "ReaderPlace", "Stateful"]


@runtime_checkable
class Stateful(Protocol):
    """What torchdata's `StatefulDataLoader` offers, and anything else that can resume itself."""

    def state_dict(self) -> dict[str, object]:
        """Return the place behind the last item that was yielded."""
        ...

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Make the next `iter()` go on at that place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderPlace:
    """A place between two micro-batches of one pass.

    Attributes:
        batches_read: Micro-batches before it.
        exhausted: Whether the loader has said that there are no more.
        loader: The loader's own state there; None if it has none.
        generator: State of the `torch.Generator` that shuffles, uint8, as it was before the pass
            (at the pass's end: behind it); None if the loader has none, or has a state of its own.
    """

    batches_read: int = 0
    exhausted: bool = False
    loader: object = None
    generator: torch.Tensor | None = None


class LoaderReader(Generic[BatchT]):
    """One pass over a loader.

    A loader that has `state_dict` and `load_state_dict` is resumed by them; another is read and
    its micro-batches dropped up to the place. `iter()` of the loader is called by `open`.

    Args:
        loader: Yields micro-batches; may be an iterator.

    Raises:
        ValueError: If it cannot be iterated.
    """

    def __init__(self, loader: Iterable[BatchT]) -> None:
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise ValueError(f"the data is a {type(loader).__name__}; it must be iterable")
        self._loader = loader
        self._stateful = loader if isinstance(loader, Stateful) else None
        self._iterator: Iterator[BatchT] | None = None
        self._failure: Exception | None = None
        self._resumed: ReaderPlace | None = None
        self._to_skip = 0
        self._batches_read = 0
        self._exhausted = False
        self._generator = self._generator_state()

    def resume(self, place: ReaderPlace, *, over: bool = False) -> None:
        """Go on at a place of an earlier run; call it before `open`.

        Args:
            place: Where the earlier run was.
            over: Whether nothing more is to be read there, whatever the loader has left.

        Raises:
            ValueError: If the loader cannot return there.
        """
        if place.loader is not None:
            if self._stateful is None:
                raise ValueError(
                    "the state holds one of the loader's own, but this loader "
                    f"({type(self._loader).__name__}) has no load_state_dict; resume with a "
                    "StatefulDataLoader, as when it was saved"
                )
            self._stateful.load_state_dict(copy.deepcopy(place.loader))  # type: ignore[arg-type]  # its own dict
        elif place.batches_read and not place.exhausted and _shuffles_anew(self._loader):
            raise ValueError(
                "the loader shuffles with the global random numbers, so the order of the saved run "
                "is lost; use torchdata's StatefulDataLoader, or give the DataLoader a generator "
                "(torch.Generator) or a sampler with a seed, such as DistributedSampler"
            )
        if place.generator is not None and (generator := _generator_of(self._loader)) is not None:
            generator.set_state(place.generator)
            self._generator = place.generator
        self._resumed = place
        self._iterator = self._failure = None
        self._batches_read, self._exhausted = place.batches_read, place.exhausted or over
        self._to_skip = place.batches_read if place.loader is None else 0

    def open(self) -> None:
        """Call `iter()` of the loader, in the caller's thread: it may fork or draw seeds.

        What that raises is raised by the first `next()`, so that peers can be told.
        """
        if self._iterator is not None or self._failure is not None or self._exhausted:
            return  # a loader that has ended would begin another pass
        self._generator = self._generator_state()
        try:
            self._iterator = iter(self._loader)
        except Exception as error:  # noqa: BLE001 - raised by the first `next()`
            self._failure = error

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> BatchT:
        """Return the next micro-batch.

        Raises:
            ValueError: If the loader ends before the place where it shall resume.
        """
        if self._failure is not None:
            raise self._failure
        if self._exhausted:
            raise StopIteration
        assert self._iterator is not None
        self._skip(self._iterator)
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._exhausted = True
            raise
        finally:
            self._resumed = None
        self._batches_read += 1
        return batch

    def place(self) -> ReaderPlace:
        """Return the place behind the last micro-batch that was read."""
        if self._resumed is not None:
            return self._resumed
        if self._stateful is not None:
            self.open()  # before, its state may be that of an earlier pass
        state = None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())
        return ReaderPlace(
            batches_read=self._batches_read,
            exhausted=self._exhausted,
            loader=state,
            generator=self._generator_state() if self._exhausted else self._generator,
        )

    def _skip(self, iterator: Iterator[BatchT]) -> None:
        total = self._to_skip
        for done in range(total):
            try:
                next(iterator)
            except StopIteration:
                raise ValueError(
                    f"the loader ended after {done} micro-batches, but the saved run had read "
                    f"{total}; it must yield the same as then"
                ) from None
            self._to_skip -= 1

    def _generator_state(self) -> torch.Tensor | None:
        if self._stateful is not None or (generator := _generator_of(self._loader)) is None:
            return None
        return generator.get_state()


def _generator_of(loader: object) -> torch.Generator | None:
    generator = getattr(loader, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _shuffles_anew(loader: object) -> bool:
    """Whether a loader's order comes from the global random numbers."""
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    return isinstance(sampler, RandomSampler) and sampler.generator is None
