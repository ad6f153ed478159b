"""Samples that know where their tensors lie, so that bytes are copied without a tensor for each."""

import ctypes
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, starmap
from typing import TypeAlias, TypeGuard

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

FEW_ROWS = 16
"""Up to so many rows of a tensor are copied with a memmove each, rather than with one copy_."""

# Above this size copies of torch with several threads beat memmove, which has one, but starts
# within 0.5 us where a view and a copy_ take 5 us.
_LARGE_NBYTES = 1 << 20

# ctypes.memmove lets other threads run. For a small copy that costs more than the copy, and if
# another thread does run Python, it costs a switch interval, 5 ms, to get the interpreter back.
_HELD_NBYTES = 1 << 16
_HELD_COPIES = 64
_memmove_held = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


class LaidOutSample(Mapping[str, Tensor | None], ABC):
    """A flat sample whose layout is known and whose tensors are made when they are asked for."""

    __slots__ = ()

    def __contains__(self, key: object) -> bool:
        return key in self.keys()  # without making a view

    @property
    @abstractmethod
    def layout(self) -> SampleLayout:
        """The layout that the sample has, or would have once packed."""

    @property
    @abstractmethod
    def is_cpu(self) -> bool:
        """Whether all tensors lie in host memory, so that :meth:`parts` tells where."""

    @abstractmethod
    def parts(self) -> list[Part]:
        """Return where the tensor of each of ``layout.placed`` lies now."""


def is_laid_out(flat: Mapping[str, object]) -> TypeGuard[LaidOutSample]:
    """Tell whether a sample is one; most are dicts, which are told apart in no time."""
    return type(flat) is not dict and isinstance(flat, LaidOutSample)


def largest_memmove() -> int:
    """Return up to how many bytes a memmove is the fastest copy."""
    return _LARGE_NBYTES if torch.get_num_threads() > 1 else sys.maxsize


def copy_all(copies: Sequence[Copy], base: int = 0) -> None:
    """Copy bytes between addresses; those to copy to are counted from ``base``."""
    small = [(base + to, source, n) for to, source, n in copies if n <= _HELD_NBYTES]
    # Copied at C speed, which for small fields is most of the time; in between others may run.
    for start in range(0, len(small), _HELD_COPIES):
        deque(starmap(_memmove_held, small[start : start + _HELD_COPIES]), 0)
    if len(small) < len(copies):
        large = [(base + to, source, n) for to, source, n in copies if n > _HELD_NBYTES]
        deque(starmap(ctypes.memmove, large), 0)


class FieldJoiner:
    """Concatenates fields of many samples from where they lie, each byte copied once.

    All bytes are copied at the end, because code that runs between two copies runs without cache.

    Args:
        samples: One or more samples.
        empty: Returns contiguous host memory for a shape and dtype.
    """

    __slots__ = ("_copies", "_empty", "_is_cpu", "_layouts", "_parts", "_samples")

    def __init__(
        self,
        samples: Sequence[LaidOutSample],
        empty: Callable[[Sequence[int], torch.dtype], Tensor],
    ) -> None:
        self._samples, self._empty = samples, empty  # the samples hold what is yet to be copied
        self._layouts = [sample.layout for sample in samples]
        self._is_cpu = all(sample.is_cpu for sample in samples)
        self._parts = [sample.parts() for sample in samples] if self._is_cpu else []
        self._copies: list[Copy] = []

    def ndim(self, key: str) -> int | None:
        """Return the dims of the first tensor with this key; None if there is none."""
        for layout in self._layouts:
            place = layout.schema.places.get(key)
            if place is not None:
                return len(layout.placed[place].shape)
        return None

    def join(self, key: str, dim: int) -> Tensor | None:
        """Return the concatenation of one field, whose bytes come with :meth:`copy`.

        Args:
            key: The flat key. Samples without it are left out.
            dim: Along which dimension.

        Returns:
            The tensor; None if ``torch.cat`` must do it, or refuse to: a value is ``None``, on a
            device, large or unlike the others, there are many rows before ``dim``, or no such
            ``dim`` >= 0.
        """
        found = self._find(key)
        fields = [field for field, _ in found]
        if not (found and _fit(fields, dim)) or (dim != 1 and any(step for _, (_, step) in found)):
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
            self._copies += [
                (place + below, source + row * (step or size), size)
                for place, (_, (source, step)), size in zip(places, found, sizes, strict=True)
            ]
        return joined

    def copy(self) -> None:
        """Copy the bytes of all that was joined."""
        copy_all(self._copies)

    def _find(self, key: str) -> list[tuple[PlacedField, Part]]:
        """Return the field in each sample that has it; nothing if it must not be joined here."""
        places = [layout.schema.places.get(key, -1) for layout in self._layouts]
        if None in places or not self._is_cpu:
            return []
        return [
            (layout.placed[place], parts[place])
            for place, layout, parts in zip(places, self._layouts, self._parts, strict=True)
            if place is not None and place >= 0
        ]


def _fit(fields: Sequence[PlacedField], dim: int) -> bool:
    """Tell whether fields can be joined along ``dim`` with a few memmoves each."""
    shape, dtype = fields[0].shape, fields[0].dtype
    limit = largest_memmove()
    return (
        0 <= dim < len(shape)
        and 0 < math.prod(shape[:dim]) <= FEW_ROWS
        and all(  # few layouts repeat over many samples
            field.dtype is dtype and field.nbytes <= limit and _are_alike(field.shape, shape, dim)
            for field in {id(field): field for field in fields}.values()
        )
    )


def _are_alike(shape: Sequence[int], other: Sequence[int], dim: int) -> bool:
    """Tell whether shapes are the same but for the size of ``dim``."""
    behind = dim + 1
    return shape == other or (
        len(shape) == len(other) and shape[:dim] == other[:dim] and shape[behind:] == other[behind:]
    )
