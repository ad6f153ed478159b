"""Samples that know where their tensors lie, so that bytes are copied without a tensor for each."""

import ctypes
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, starmap
from operator import itemgetter
from typing import TypeAlias, TypeGuard, cast

import torch
from torch import Tensor

from evenstep.serialize.placement import PlacedField
from evenstep.serialize.schema import SampleLayout

Part: TypeAlias = tuple[int, int]
"""The address of a tensor in host memory, and the bytes from one row to the next: 0 if contiguous.

A tensor of rows has few of them, ``FEW_ROWS`` at most, and each is contiguous.
"""

Copy: TypeAlias = tuple[int, int, int]
"""To which address, from which, and how many bytes."""

Copier: TypeAlias = Callable[[Sequence[Copy], int], None]
"""Makes copies; the addresses to copy to are counted from its second argument."""

FEW_ROWS = 16
"""Up to so many rows of a tensor are copied with a memmove each, rather than with one copy_."""

# Above this size copies of torch with several threads beat memmove, which has one, but starts
# within 0.5 us where a view and a copy_ take 5 us.
_LARGE_NBYTES = 1 << 20

# ctypes.memmove lets other threads run. For a small copy that costs more than the copy, and if
# another thread does run Python, it costs a switch interval, 5 ms, to get the interpreter back.
_HELD_NBYTES = 1 << 16
_HELD_COPIES = 64
_memmove_held = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class LaidOutSample(Mapping[str, Tensor | None], ABC):
    """A flat sample whose layout is known and whose tensors are made when they are asked for."""

    __slots__ = ()

    def __contains__(self, key: object) -> bool:
        return key in self.layout.schema.places  # without making a view

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.schema.places)

    def __len__(self) -> int:
        return len(self.layout.schema.places)

    def keys(self) -> KeysView[str]:
        """Return the keys, here sorted: those of tensors, then those of ``None``."""
        return self.layout.schema.places.keys()

    @property
    @abstractmethod
    def layout(self) -> SampleLayout:
        """The layout that the sample has, or would have once packed."""

    @property
    @abstractmethod
    def is_cpu(self) -> bool:
        """Whether all tensors lie in host memory, so that :meth:`parts` tells where."""

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return where the tensor of each of ``layout.placed`` lies now."""

    @property
    def is_pageable(self) -> bool:
        """Whether that is known to be ordinary memory, which other processes may read too.

        Page-locked memory of an accelerator, for one, may not be.
        """
        return False

    @property
    def copier(self) -> Copier:
        """What copies from there; another one than memmove if it is not this process's memory."""
        return copy_all


def is_laid_out(flat: Mapping[str, object]) -> TypeGuard[LaidOutSample]:
    """Tell whether a sample is one, in less time than an abstract class takes."""
    return _is_laid_out(type(flat))


@lru_cache(64)
def _is_laid_out(kind: type) -> bool:
    return issubclass(kind, LaidOutSample)


def largest_memmove() -> int:
    """Return up to how many bytes a memmove is the fastest copy."""
    return _LARGE_NBYTES if torch.get_num_threads() > 1 else sys.maxsize


def copies_of_part(to: int, part: Part, field: PlacedField) -> list[Copy]:
    """Return the copies that bring a tensor, contiguous, to an address."""
    source, step = part
    if not step:
        return [(to, source, field.nbytes)]
    num_rows = field.shape[0]
    size = field.nbytes // num_rows
    return [(to + row * size, source + row * step, size) for row in range(num_rows)]


def copy_all(copies: Sequence[Copy], base: int = 0) -> None:
    """Copy bytes between addresses; those to copy to are counted from ``base``."""
    # Addresses are counted, and small copies made at C speed, some at a time, so that the numbers
    # are in the cache; in between, other threads may run.
    for start in range(0, len(copies), _HELD_COPIES):
        some = copies[start : start + _HELD_COPIES]
        small = [(base + to, source, n) for to, source, n in some if n <= _HELD_NBYTES]
        deque(starmap(_memmove_held, small), 0)
        if len(small) < len(some):
            large = [(base + to, source, n) for to, source, n in some if n > _HELD_NBYTES]
            deque(starmap(ctypes.memmove, large), 0)


class Copies:
    """Copies to make at the end, because code that runs between two copies runs without cache."""

    __slots__ = ("_by_copier",)

    def __init__(self) -> None:
        self._by_copier: dict[Copier, list[Copy]] = {}

    def by(self, copier: Copier) -> list[Copy]:
        """Return the list that takes the copies for one copier to make."""
        return self._by_copier.setdefault(copier, [])

    def make(self, base: int = 0) -> None:
        """Make all copies; the addresses to copy to are counted from ``base``."""
        for copier, copies in self._by_copier.items():
            copier(copies, base)


_Column: TypeAlias = tuple[Sequence[PlacedField], Sequence[Part], Sequence[list[Copy]]]
"""One field of several samples: how it is laid out, where it lies, and what takes its copies."""

_NO_COLUMN: _Column = ((), (), ())
_STEP = itemgetter(1)


class FieldJoiner:
    """Concatenates fields of many samples from where they lie, each byte copied once.

    Args:
        samples: One or more samples.
        empty: Returns contiguous host memory for a shape and dtype.
        copies: Takes the copies, which are still to be made; until then the samples must live.
    """

    __slots__ = ("_columns", "_copies", "_empty", "_is_cpu", "_layouts", "_parts")

    def __init__(
        self,
        samples: Sequence[LaidOutSample],
        empty: Callable[[Sequence[int], torch.dtype], Tensor],
        copies: Copies,
    ) -> None:
        self._empty = empty
        self._layouts = [sample.layout for sample in samples]
        self._is_cpu = all(sample.is_cpu for sample in samples)
        # For each sample, the list that takes its copies.
        self._copies = [copies.by(sample.copier) for sample in samples]
        self._parts = [sample.parts() for sample in samples] if self._is_cpu else []
        self._columns: list[_Column] = []  # where all samples are of one schema
        if self.is_uniform:
            placed = zip(*[layout.placed for layout in self._layouts], strict=True)
            parts = zip(*self._parts, strict=True)
            self._columns = [(*pair, self._copies) for pair in zip(placed, parts, strict=False)]

    @property
    def is_uniform(self) -> bool:
        """Whether all samples have the same fields, of the same dtypes and numbers of dims."""
        return len({id(layout.schema) for layout in self._layouts}) == 1

    def ndim(self, key: str) -> int | None:
        """Return the dims of the first tensor with this key; None if there is none."""
        for layout in self._layouts:
            place = layout.schema.places.get(key)
            if place is not None:
                return len(layout.placed[place].shape)
        return None

    def join(self, key: str, dim: int) -> Tensor | None:
        """Return the concatenation of one field, whose bytes are still to be copied.

        Args:
            key: The flat key. Samples without it are left out.
            dim: Along which dimension.

        Returns:
            The tensor; None if ``torch.cat`` must do it, or refuse to: a value is ``None``, on a
            device, large or unlike the others, there are many rows before ``dim``, or no such
            ``dim`` >= 0.
        """
        fields, parts, copies = self._column(key)
        if not _fit(fields, dim) or (dim != 1 and any(map(_STEP, parts))):
            return None
        shape = fields[0].shape
        length = sum([field.shape[dim] for field in fields])
        joined = self._empty((*shape[:dim], length, *shape[dim + 1 :]), fields[0].dtype)
        num_rows = math.prod(shape[:dim])
        sizes = [field.nbytes // num_rows for field in fields]
        places = [*accumulate(sizes, initial=joined.data_ptr())]
        row_nbytes = places.pop() - joined.data_ptr()
        for row in range(num_rows):
            below = row * row_nbytes
            for place, (source, step), size, taking in zip(
                places, parts, sizes, copies, strict=True
            ):
                taking.append((place + below, source + row * (step or size), size))
        return joined

    def _column(self, key: str) -> "_Column":
        """Return one field of the samples that have it; of none if it must not be joined here."""
        if self._columns:
            place = self._layouts[0].schema.places.get(key)
            return _NO_COLUMN if place is None else self._columns[place]
        places = [layout.schema.places.get(key, -1) for layout in self._layouts]
        if None in places or not self._is_cpu:
            return _NO_COLUMN
        found = [
            (layout.placed[place], parts[place], copies)
            for place, layout, parts, copies in zip(
                places, self._layouts, self._parts, self._copies, strict=True
            )
            if place is not None and place >= 0
        ]
        return cast("_Column", tuple(zip(*found, strict=True))) if found else _NO_COLUMN


def _fit(fields: Sequence[PlacedField], dim: int) -> bool:
    """Tell whether fields can be joined along ``dim`` with a few memmoves each."""
    if not fields:
        return False
    shape, dtype = fields[0].shape, fields[0].dtype
    limit = largest_memmove()
    return (
        0 <= dim < len(shape)
        and 0 < math.prod(shape[:dim]) <= FEW_ROWS
        and all(  # few layouts repeat over many samples
            field.dtype is dtype and field.nbytes <= limit and _are_alike(field.shape, shape, dim)
            for field in dict(zip(map(id, fields), fields, strict=True)).values()
        )
    )


def _are_alike(shape: Sequence[int], other: Sequence[int], dim: int) -> bool:
    """Tell whether shapes are the same but for the size of ``dim``."""
    behind = dim + 1
    return shape == other or (
        len(shape) == len(other) and shape[:dim] == other[:dim] and shape[behind:] == other[behind:]
    )
