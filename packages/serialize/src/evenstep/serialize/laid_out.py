"""Samples that know where their tensors lie, so that bytes are copied without a tensor for each."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from evenstep.serialize.copies import Copier, Copies, Copy, copy_all, largest_memmove
from evenstep.serialize.placement import PlacedField
from evenstep.serialize.schema import SampleLayout

Part: TypeAlias = tuple[int, int]
"""The address of a tensor in host memory, and the bytes from one row to the next: 0 if contiguous.

A tensor of rows has few of them, ``FEW_ROWS`` at most, and each is contiguous.
"""

FEW_ROWS = 16
"""Up to so many rows of a tensor are copied with a memmove each, rather than with one copy_."""


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


def copies_of_part(to: int, part: Part, field: PlacedField) -> list[Copy]:
    """Return the copies that bring a tensor, contiguous, to an address."""
    source, step = part
    if not step:
        return [(to, source, field.nbytes)]
    num_rows = field.shape[0]
    size = field.nbytes // num_rows
    return [(to + row * size, source + row * step, size) for row in range(num_rows)]


_Pick: TypeAlias = Callable[[Sequence[int]], Sequence[int]]


class _Column(NamedTuple):
    """One field of several samples.

    Attributes:
        dtype: The dtype of all.
        sizes: By dimension, then by sample.
        parts: Where each lies.
        takers: For each copier, the list that takes its copies, and what picks its samples.
    """

    dtype: torch.dtype
    sizes: Sequence[Sequence[int]]
    parts: Sequence[Part]
    takers: Sequence[tuple[list[Copy], _Pick]]


class FieldJoiner:
    """Concatenates fields of many samples from where they lie, each byte copied once.

    Works on columns, one number of every sample, so that little Python runs for each tensor.

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
        if self.is_uniform and self._is_cpu:
            takers = _takers(self._copies)
            sizes = [*zip(*[layout.dims for layout in self._layouts], strict=True)]
            end = 0
            fields = self._layouts[0].schema.fields
            for spec, parts in zip(fields, zip(*self._parts, strict=True), strict=True):
                start, end = end, end + spec.ndim
                self._columns.append(_Column(spec.dtype, sizes[start:end], parts, takers))

    @property
    def is_uniform(self) -> bool:
        """Whether all samples have the same fields, of the same dtypes and numbers of dims."""
        return len({id(layout.schema) for layout in self._layouts}) == 1

    def ndim(self, key: str) -> int | None:
        """Return the dims of the first tensor with this key; None if there is none."""
        for layout in self._layouts:
            place = layout.schema.places.get(key)
            if place is not None:
                return layout.schema.fields[place].ndim
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
        column = self._column(key)
        if column is None or not 0 <= dim < len(column.sizes):
            return None
        shape = [of_dim[0] for of_dim in column.sizes]
        lengths = column.sizes[dim]
        for of_dim in column.sizes:
            if of_dim is not lengths and of_dim.count(of_dim[0]) < len(of_dim):
                return None
        num_rows = math.prod(shape[:dim])
        unit = column.dtype.itemsize * math.prod(shape[dim + 1 :])
        nbytes = [length * unit for length in lengths]
        if not 0 < num_rows <= FEW_ROWS or max(nbytes) * num_rows > largest_memmove():
            return None
        sources, steps = zip(*column.parts, strict=True)
        if dim != 1 and any(steps):
            return None
        shape[dim] = sum(lengths)
        joined = self._empty(shape, column.dtype)
        places = [*accumulate(nbytes, initial=joined.data_ptr())]
        row_nbytes = places.pop() - joined.data_ptr()
        for row in range(num_rows):
            if row:
                places = [place + row_nbytes for place in places]
                sources = tuple(
                    [at + (step or n) for at, step, n in zip(sources, steps, nbytes, strict=True)]
                )
            for copies, pick in column.takers:
                copies.extend(zip(pick(places), pick(sources), pick(nbytes), strict=True))
        return joined

    def _column(self, key: str) -> _Column | None:
        """Return one field of the samples that have it; None if it must not be joined here."""
        if self._columns:
            place = self._layouts[0].schema.places.get(key)
            return None if place is None else self._columns[place]
        places = [layout.schema.places.get(key, -1) for layout in self._layouts]
        if None in places or not self._is_cpu:
            return None
        found = [
            (layout.placed[place], parts[place], copies)
            for place, layout, parts, copies in zip(
                places, self._layouts, self._parts, self._copies, strict=True
            )
            if place is not None and place >= 0
        ]
        if len({(field.dtype, len(field.shape)) for field, _, _ in found}) != 1:
            return None
        fields, parts, copies = zip(*found, strict=True)
        sizes = [*zip(*[field.shape for field in fields], strict=True)]
        return _Column(fields[0].dtype, sizes, parts, _takers(copies))


def _takers(lists: Sequence[list[Copy]]) -> list[tuple[list[Copy], _Pick]]:
    """Return each list once, with what picks the values of the samples whose list it is."""
    taking = {id(copies): copies for copies in lists}
    indices: dict[int, list[int]] = {known: [] for known in taking}
    for index, copies in enumerate(lists):
        indices[id(copies)].append(index)
    return [(copies, _pick(indices[known])) for known, copies in taking.items()]


def _pick(indices: Sequence[int]) -> _Pick:
    if len(indices) == 1:  # itemgetter would return the value itself
        return itemgetter(slice(indices[0], indices[0] + 1))
    return itemgetter(*indices)
