"""Tensors of samples in host memory, packed with one memmove each."""

import ctypes
from collections.abc import Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from evenstep.serialize.copies import Copies, copy_all, largest_memmove
from evenstep.serialize.dtypes import ALIGNMENT, DTYPES, aligned
from evenstep.serialize.laid_out import FEW_ROWS, LaidOutSample, copies_of_part
from evenstep.serialize.layout import sample_layout
from evenstep.serialize.limits import MAX_NBYTES, MAX_NDIM
from evenstep.serialize.packing_checks import (
    check_layout,
    checked_tensor,
    device_rule,
    has_keys,
    resolved,
)
from evenstep.serialize.schema import SampleLayout

# Complex tensors may be conjugate views, and floating-point ones views of the imaginary part of
# these, negated: then they are not what their memory says.
_MAYBE_NEGATIVE = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
_NEVER_LAZY = (
    frozenset([dtype for dtype in DTYPES.values() if not dtype.is_complex]) - _MAYBE_NEGATIVE
)

# An integer type of each element size, to move elements as they are: no conversion, and the same
# operator for the dtypes for which torch has no other.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_ZEROS = ctypes.create_string_buffer(ALIGNMENT)  # what padding is copied from
_ZEROS_ADDRESS = ctypes.addressof(_ZEROS)


class FieldsOfHost:
    """The tensors of samples in host memory: looked up in one pass, and copied in another.

    The tensors must stay as they are in between.

    Args:
        start: The address of what will be written to, or 0 if it is not known yet.
    """

    __slots__ = ("_all_copies", "_copies", "_held", "_limit", "_others", "_start", "nbytes")

    def __init__(self, start: int) -> None:
        self.nbytes = 0
        self._start = start
        self._all_copies = Copies()
        self._copies = self._all_copies.by(copy_all)  # the first that are made
        self._others: list[tuple[int, int, Tensor]] = []  # what memmove cannot copy, or not as fast
        self._held: list[object] = []  # what was added: it may have been made when asked for
        self._limit = largest_memmove()

    def add(
        self,
        keys: Sequence[str],
        sample: Mapping[str, Tensor | None],
        layout: SampleLayout | None = None,
        index: int = 0,
    ) -> None:
        """Add the tensors of a sample, in the order of ``keys``.

        Args:
            keys: Those of ``layout``, if one is given.
            sample: The sample; a ``dict`` is looked up in fastest.
            layout: What it must be like.
            index: Its number, for the message if it is not.
        """
        first = place = self._start + self.nbytes
        limit, copies = self._limit, self._copies
        self._held.append(sample)
        expected = repeat(None) if layout is None else layout.placed
        for key, field in zip(keys, expected, strict=False):
            try:
                tensor = sample[key]
                if (
                    type(tensor) is Tensor
                    and not tensor.is_nested
                    and (source := tensor.data_ptr())  # 0 if it is empty, or zeros of autograd
                    and (nbytes := tensor.nbytes) <= limit
                    and tensor.ndim <= MAX_NDIM
                    and tensor.is_cpu
                    and tensor.is_contiguous()
                    and (
                        (dtype := tensor.dtype) in _NEVER_LAZY
                        or (dtype in _MAYBE_NEGATIVE and not tensor.is_neg())
                    )
                    and (field is None or (dtype is field.dtype and tensor.shape == field.shape))
                ):
                    if nbytes % ALIGNMENT:
                        self._pad(place, nbytes)
                    copies.append((place, source, nbytes))
                    place += nbytes + -nbytes % ALIGNMENT
                    continue
            except (KeyError, RuntimeError):  # no such field, or no address: both refused below
                tensor = sample[key] if layout is None else sample.get(key)
            if layout is not None:
                check_layout(index, sample, layout)
                layout = None  # that is enough for all of the sample
            if tensor is not None:
                place += self._add_odd(key, place, tensor)
        if layout is not None and not has_keys(sample, layout.schema):
            check_layout(index, sample, layout)
        if place - first > MAX_NBYTES:
            sample_layout(sample)  # says at which field
        self.nbytes += place - first

    def _pad(self, place: int, nbytes: int) -> None:
        """Zero the last word of a field, which is then written over as far as the field goes."""
        self._copies.append((place + nbytes - nbytes % ALIGNMENT, _ZEROS_ADDRESS, ALIGNMENT))

    def _add_odd(self, key: str, place: int, value: object) -> int:
        """Add a tensor that one memmove does not copy, or not as fast, and return its bytes."""
        tensor = checked_tensor(key, value)
        if not tensor.is_cpu:
            raise ValueError(device_rule(key, tensor, "cpu"))
        nbytes = tensor.nbytes
        if not nbytes:
            return 0
        if nbytes % ALIGNMENT:
            self._pad(place, nbytes)
        at_once = nbytes > self._limit or _is_lazy(tensor)
        if not at_once and tensor.is_contiguous():  # a complex one
            self._copies.append((place, tensor.data_ptr(), nbytes))
        elif at_once or not self._add_rows(place, tensor):
            self._others.append((place - self._start, nbytes, tensor))
        return aligned(nbytes)

    def add_parts(self, sample: LaidOutSample) -> None:
        """Add the tensors of a sample by their addresses."""
        layout, start, limit = sample.layout, self._start + self.nbytes, self._limit
        copies = self._all_copies.by(sample.copier)
        self._held.append(sample)
        for field, part in zip(layout.placed, sample.parts(), strict=True):
            place, nbytes = start + field.offset, field.nbytes
            if nbytes % ALIGNMENT:
                self._pad(place, nbytes)
            if nbytes > limit:
                tensor = sample[field.key]
                assert tensor is not None
                self._others.append((place - self._start, nbytes, tensor))
            elif part[1]:
                copies += copies_of_part(place, part, field)
            else:
                copies.append((place, part[0], nbytes))
        self.nbytes += layout.nbytes

    def _add_rows(self, place: int, tensor: Tensor) -> bool:
        """Add the rows of a tensor if they are few and contiguous, as position ids [3, 1, n]."""
        num_rows, *sizes = tensor.shape
        step, *strides = tensor.stride()
        span = 1
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            if size != 1 and stride != span:
                return False
            span *= size
        if num_rows > FEW_ROWS:
            return False
        source, row_nbytes = tensor.data_ptr(), span * tensor.itemsize
        step_nbytes = step * tensor.itemsize
        self._copies += [
            (place + row * row_nbytes, source + row * step_nbytes, row_nbytes)
            for row in range(num_rows)
        ]
        return True

    def write(self, out: Tensor) -> None:
        """Copy all fields, and zero the padding."""
        self._all_copies.make(out.data_ptr() - self._start)
        with torch.no_grad():
            for place, nbytes, tensor in self._others:
                bits = resolved(tensor).view(_BITS[tensor.dtype.itemsize])
                room = out[place : place + nbytes].view(bits.dtype)
                room.view(bits.shape).copy_(bits)


def _is_lazy(tensor: Tensor) -> bool:
    """Tell whether a tensor is not what its memory says, or has none."""
    return tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()) or not tensor.data_ptr()
