"""Where tensors lie when they are laid end to end."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch

from evenstep.serialize.dtypes import ALIGNMENT
from evenstep.serialize.limits import MAX_NBYTES, MAX_NDIM, ndim_refusal


class PlacedField(NamedTuple):
    """One tensor of a sample and its place in the sample's bytes.

    Attributes:
        key: The flat key.
        dtype: A supported dtype.
        shape: The sizes.
        strides: Those of a contiguous tensor of this shape, in elements.
        offset: The first byte, counted from the sample's start.
        nbytes: Bytes without padding.
        shift: By how many bits a count of bytes is shifted to count elements of ``dtype``.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    shift: int


def place_fields(
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
) -> tuple[tuple[PlacedField, ...], int]:
    """Lay fields end to end, each at the next multiple of ``ALIGNMENT``.

    Args:
        entries: Key, dtype and shape of each field, in order.

    Returns:
        The fields in the same order, and the bytes of all, padding included.

    Raises:
        ValueError: If a size is not an integer >= 0, a field has more than ``MAX_NDIM`` sizes, or
            a field or the whole is larger than ``MAX_NBYTES``.
    """
    placed = []
    end = 0
    for key, dtype, shape in entries:
        if len(shape) > MAX_NDIM:
            raise ValueError(ndim_refusal(key, len(shape)))
        for size in shape:
            if type(size) is not int or size < 0:
                raise ValueError(f"shape {tuple(shape)} has the size {size!r}; sizes are ints >= 0")
        shared, strides, span = _strides_and_span(shape)
        itemsize = dtype.itemsize
        if span * itemsize > MAX_NBYTES:
            raise ValueError(f"field {key!r} of shape {tuple(shape)} exceeds {MAX_NBYTES} bytes")
        nbytes = 0 if 0 in shape else span * itemsize
        shift = itemsize.bit_length() - 1
        placed.append(PlacedField(key, dtype, shared, strides, end, nbytes, shift))
        end += nbytes + -nbytes % ALIGNMENT
        if end > MAX_NBYTES:
            raise ValueError(f"sample exceeds {MAX_NBYTES} bytes at field {key!r}")
    return tuple(placed), end


@lru_cache(4096)
def _strides_and_span(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the shape, the strides of a contiguous tensor as torch computes them, and their span.

    The span is the product of the sizes. A size of 0 counts as 1 in it and in the strides, so that
    a bound on the span bounds the strides too. Fields of one shape share the tuples, which
    thousands of layouts would otherwise fetch from memory one by one.
    """
    strides = []
    span = 1
    for size in reversed(shape):
        strides.append(span)
        span *= size or 1
    strides.reverse()
    return shape, tuple(strides), span
