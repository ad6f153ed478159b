"""Samples into one buffer with one copy, and views of the buffer without any."""

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from evenstep.serialize.dtypes import ALIGNMENT, DTYPES
from evenstep.serialize.laid_out import (
    FEW_ROWS,
    Copies,
    LaidOutSample,
    copies_of_part,
    copy_all,
    is_laid_out,
    largest_memmove,
)
from evenstep.serialize.layout import meta_refusal, sample_layout
from evenstep.serialize.placement import PlacedField
from evenstep.serialize.schema import SampleLayout

# The dtypes that can have conjugate or negative views, which are not what their memory says.
_MAYBE_LAZY = frozenset(
    [dtype for dtype in DTYPES.values() if dtype.is_complex]
    + [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)

# An integer type of each element size, to move elements as they are: no conversion, and the same
# operator for the dtypes for which torch has no other.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Run: TypeAlias = tuple[Sequence[Tensor], Sequence[PlacedField], int]
"""Tensors, the place of each in the run, and the bytes of the run, padding included."""


def pack_samples(
    flats: Sequence[Mapping[str, Tensor | None]],
    *,
    layouts: Sequence[SampleLayout] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Copy samples end to end into one buffer, each byte once.

    Fields lie as their layouts say, and the padding between them is zero, so equal samples give
    equal bytes. On the CPU each tensor, contiguous or not, is copied straight into its place; on
    an accelerator all are joined by one ``torch.cat``, hence by a few kernels for any number of
    fields (one that is not contiguous costs a kernel more). Conjugate and negative views are
    resolved first. Gradients are not recorded.

    Args:
        flats: Flat samples of tensors, all on one device, and ``None``.
        layouts: ``sample_layout`` of each sample, where the caller has them already.
        out: A contiguous 1-D ``uint8`` tensor of exactly the bytes needed, on the tensors'
            device, to write to: pinned or shared memory, for example. No tensor may lie in it.

    Returns:
        ``out``, or a new 1-D ``uint8`` tensor ``[sum of layout.nbytes]``; on the CPU if the
        samples hold no tensor.

    Raises:
        ValueError: If a sample has no layout or not the one given, tensors lie on different
            devices or have no data (the meta device), or ``out`` does not fit.
    """
    device = _device_of(flats) if out is None else out.device
    if layouts is None:
        # One after the other, so that a sample's tensors are read while they are in the cache.
        found: Iterable[SampleLayout] = map(sample_layout, flats)
    elif len(layouts) == len(flats):
        found = _checked(flats, layouts)
    else:
        raise ValueError(f"{len(layouts)} layouts for {len(flats)} samples; give one for each")
    fields = _fields_on(device)
    for flat, layout in zip(flats, found, strict=True):
        if isinstance(fields, _FieldsOfHost) and is_laid_out(flat) and flat.is_cpu:
            fields.add_parts(flat)
        else:
            tensors = [flat.get(field.key) for field in layout.placed]
            fields.add(cast("list[Tensor]", tensors), layout.placed, layout.nbytes)
    if out is None:
        out = torch.empty(fields.nbytes, dtype=torch.uint8, device=device)
    else:
        _check_out(out, fields.nbytes)
    fields.write(out)
    return out


def _device_of(flats: Iterable[Mapping[str, Tensor | None]]) -> torch.device:
    """Return the device of the first tensor."""
    for flat in flats:
        for value in flat.values():
            if isinstance(value, Tensor):  # anything else is refused with its key later
                return value.device
    return torch.device("cpu")


def _checked(
    flats: Sequence[Mapping[str, Tensor | None]], layouts: Sequence[SampleLayout]
) -> Iterator[SampleLayout]:
    """Yield the layouts, each compared with its sample: addresses are about to be used."""
    for index, (flat, layout) in enumerate(zip(flats, layouts, strict=True)):
        with contextlib.suppress(ValueError):  # a sample without a layout: told below
            if sample_layout(flat) is layout:  # as a rule, since layouts are kept
                yield layout
                continue
        _check_layout(index, flat, layout)
        yield layout


def _check_layout(index: int, flat: Mapping[str, Tensor | None], layout: SampleLayout) -> None:
    for key, dtype, shape, *_ in layout.placed:
        tensor = flat.get(key)
        if type(tensor) is not Tensor or tensor.dtype is not dtype or tensor.shape != shape:
            raise ValueError(
                f"sample {index}, field {key!r} is {describe(tensor)}, its layout has a tensor "
                f"of {dtype} {list(shape)}; take the sample_layout of this very sample"
            )
    none_keys = layout.schema.none_keys
    if len(flat) != len(layout.placed) + len(none_keys) or any(
        flat.get(key) is not None for key in none_keys
    ):
        raise ValueError(f"sample {index} has other keys than its layout: {list(flat)}")


def _check_out(out: Tensor, nbytes: int) -> None:
    if out.dtype is not torch.uint8 or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out is {describe(out)}; it must be a contiguous 1-D uint8 tensor")
    if out.numel() != nbytes:
        raise ValueError(f"out has {out.numel()} bytes, the samples take {nbytes}; give that slice")
    if out.storage_offset() % ALIGNMENT or out.data_ptr() % ALIGNMENT:
        raise ValueError(f"out starts at address {out.data_ptr()}, not a multiple of {ALIGNMENT}")


def describe(value: object) -> str:
    """Return type, dtype and shape of ``value`` for a message."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a {type(value).__name__} of {value.dtype} {list(value.shape)}"


def write_fields(out: Tensor, run: Run) -> None:
    """Copy fields to their places in ``out``, and zero the padding after each.

    Args:
        out: 1-D ``uint8``, aligned, on the tensors' device.
        run: The fields, which fill ``out``; each tensor has the dtype and the shape that its place
            is for.

    Raises:
        ValueError: If a tensor lies on another device.
    """
    fields = _fields_on(out.device)
    fields.add(*run)
    fields.write(out)


def _fields_on(device: torch.device) -> "_FieldsOfHost | _FieldsOfDevice":
    return _FieldsOfHost() if device.type == "cpu" else _FieldsOfDevice(device)


class _FieldsOfHost:
    """The tensors of samples in host memory: looked up in one pass, and copied in another.

    The tensors must stay as they are in between.
    """

    __slots__ = ("_all_copies", "_copies", "_ends", "_held", "_limit", "_others", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._all_copies = Copies()  # to places counted from the start of the buffer
        self._copies = self._all_copies.by(copy_all)
        self._others: list[tuple[int, int, Tensor]] = []  # what memmove cannot copy, or not as fast
        self._ends: list[int] = []  # where padding begins
        self._held: list[object] = []  # what was added: it may have been made when asked for
        self._limit = largest_memmove()

    def add(
        self, tensors: Sequence[Tensor], placed: Sequence[PlacedField], run_nbytes: int
    ) -> None:
        """Add a run."""
        start, limit = self.nbytes, self._limit
        self._held.append(tensors)
        for tensor, (key, dtype, _, _, _, offset, nbytes) in zip(tensors, placed, strict=True):
            if not tensor.is_cpu:
                raise ValueError(_device_rule(key, tensor, "cpu"))
            place = start + offset
            source = tensor.data_ptr()  # none of zeros that autograd made up
            lazy = (nbytes > 0 and not source) or (
                dtype in _MAYBE_LAZY
                and (tensor.is_neg() or (dtype.is_complex and tensor.is_conj()))
            )
            if nbytes <= limit and not lazy and tensor.is_contiguous():
                self._copies.append((place, source, nbytes))
            elif nbytes > limit or lazy or not self._add_rows(place, source, tensor):
                self._others.append((place, nbytes, tensor))
            if nbytes % ALIGNMENT:
                self._ends.append(place + nbytes)
        self.nbytes += run_nbytes

    def add_parts(self, sample: LaidOutSample) -> None:
        """Add the tensors of a sample by their addresses."""
        layout, start, limit = sample.layout, self.nbytes, self._limit
        copies, ends = self._all_copies.by(sample.copier), self._ends
        self._held.append(sample)
        for field, part in zip(layout.placed, sample.parts(), strict=True):
            offset, nbytes = field.offset, field.nbytes
            if nbytes > limit:
                tensor = sample[field.key]
                assert tensor is not None
                self._others.append((start + offset, nbytes, tensor))
            elif part[1]:
                copies += copies_of_part(start + offset, part, field)
            else:
                copies.append((start + offset, part[0], nbytes))
            if nbytes % ALIGNMENT:
                ends.append(start + offset + nbytes)
        self.nbytes += layout.nbytes

    def _add_rows(self, place: int, source: int, tensor: Tensor) -> bool:
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
        row_nbytes, step_nbytes = span * tensor.itemsize, step * tensor.itemsize
        self._copies += [
            (place + row * row_nbytes, source + row * step_nbytes, row_nbytes)
            for row in range(num_rows)
        ]
        return True

    def write(self, out: Tensor) -> None:
        """Copy all fields, and zero the padding."""
        base = out.data_ptr()
        self._all_copies.make(base)
        with torch.no_grad():
            for place, nbytes, tensor in self._others:
                bits = resolved(tensor).view(_BITS[tensor.dtype.itemsize])
                room = out[place : place + nbytes].view(bits.dtype)
                room.view(bits.shape).copy_(bits)
        for end in self._ends:
            ctypes.memset(base + end, 0, -end % ALIGNMENT)


class _FieldsOfDevice:
    """The tensors of samples on an accelerator, joined with one ``torch.cat``: few launches."""

    __slots__ = ("_device", "_padding", "_pieces", "nbytes")

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device
        self._padding = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
        self._pieces: list[Tensor] = []

    def add(
        self, tensors: Sequence[Tensor], placed: Sequence[PlacedField], run_nbytes: int
    ) -> None:
        """Add a run."""
        for tensor, field in zip(tensors, placed, strict=True):
            if tensor.is_meta or tensor.device != self._device:
                raise ValueError(_device_rule(field.key, tensor, str(self._device)))
            # Views cost no launch; only a tensor that is not contiguous is copied here.
            self._pieces.append(resolved(tensor).contiguous().view(-1).view(torch.uint8))
            self._pieces.append(self._padding[: -field.nbytes % ALIGNMENT])
        self.nbytes += run_nbytes

    def write(self, out: Tensor) -> None:
        """Copy all fields, and zero the padding."""
        if self._pieces:
            torch.cat(self._pieces, out=out)


def resolved(tensor: Tensor) -> Tensor:
    """Return ``tensor``, materialized where it is a lazy conjugate, negative or zero."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    made_up = tensor.numel() > 0 and not tensor.data_ptr()  # zeros of autograd have no memory
    return tensor.clone() if made_up else tensor


def _device_rule(key: str, tensor: Tensor, device: str) -> str:
    if tensor.is_meta:
        return meta_refusal(key)
    return (
        f"field {key!r} is on {tensor.device}, the buffer is on {device}; move the whole batch to "
        "one device first"
    )
