"""Samples into one buffer with one copy, and views of the buffer without any."""

import contextlib
import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from evenstep.serialize.dtypes import ALIGNMENT, DTYPES, aligned
from evenstep.serialize.laid_out import (
    FEW_ROWS,
    Copies,
    LaidOutSample,
    copies_of_part,
    copy_all,
    is_laid_out,
    largest_memmove,
)
from evenstep.serialize.layout import is_supported, meta_refusal, refusal, sample_layout
from evenstep.serialize.limits import MAX_NBYTES, MAX_NDIM
from evenstep.serialize.placement import place_fields
from evenstep.serialize.schema import SampleLayout, SampleSchema, sorted_keys

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
    if layouts is not None and len(layouts) != len(flats):
        raise ValueError(f"{len(layouts)} layouts for {len(flats)} samples; give one for each")
    if out is not None:
        _check_kind(out)
    device = _device_of(flats) if out is None else out.device
    fields = _fields_on(device, out)
    # One after the other, so that a sample's tensors are read while they are in the cache.
    for index, flat in enumerate(flats):
        layout = None if layouts is None else layouts[index]
        if isinstance(fields, _FieldsOfHost) and is_laid_out(flat) and flat.is_cpu:
            if layout is not None:
                _check_layout(index, flat, layout)
            fields.add_parts(flat)
        else:
            # Not by its layout, which takes longer to look up.
            keys = sorted_keys(tuple(flat)) if layout is None else layout.schema.keys
            fields.add(keys, flat if type(flat) is dict else dict(flat), layout, index)
    if out is None:
        out = torch.empty(fields.nbytes, dtype=torch.uint8, device=device)
    elif out.numel() != fields.nbytes:
        raise ValueError(
            f"out has {out.numel()} bytes, the samples take {fields.nbytes}; give that slice"
        )
    fields.write(out)
    return out


def _device_of(flats: Iterable[Mapping[str, Tensor | None]]) -> torch.device:
    """Return the device of the first tensor."""
    for flat in flats:
        for value in flat.values():
            if isinstance(value, Tensor):  # anything else is refused with its key later
                return value.device
    return torch.device("cpu")


def _check_layout(index: int, flat: Mapping[str, Tensor | None], layout: SampleLayout) -> None:
    """Compare a layout with its sample: its places are about to be used."""
    with contextlib.suppress(ValueError):  # a sample without a layout: told below
        if sample_layout(flat) is layout:  # as a rule, since layouts are kept
            return
    for key, dtype, shape, *_ in layout.placed:
        tensor = flat.get(key)
        if type(tensor) is not Tensor or tensor.dtype is not dtype or tensor.shape != shape:
            raise ValueError(
                f"sample {index}, field {key!r} is {describe(tensor)}, its layout has a tensor "
                f"of {dtype} {list(shape)}; take the sample_layout of this very sample"
            )
    if not _has_keys(flat, layout.schema):
        raise ValueError(f"sample {index} has other keys than its layout: {list(flat)}")


def _has_keys(flat: Mapping[str, object], schema: SampleSchema) -> bool:
    """Tell whether a sample that has the tensors of a schema has its ``None`` and no more."""
    return len(flat) == len(schema.places) and all(
        flat.get(key, key) is None for key in schema.none_keys
    )


def _check_kind(out: Tensor) -> None:
    if out.dtype is not torch.uint8 or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out is {describe(out)}; it must be a contiguous 1-D uint8 tensor")
    if out.storage_offset() % ALIGNMENT or out.data_ptr() % ALIGNMENT:
        raise ValueError(f"out starts at address {out.data_ptr()}, not a multiple of {ALIGNMENT}")


def describe(value: object) -> str:
    """Return type, dtype and shape of ``value`` for a message."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a {type(value).__name__} of {value.dtype} {list(value.shape)}"


def write_fields(out: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors end to end, each to the next multiple of ``ALIGNMENT``, with zeros between.

    Args:
        out: 1-D ``uint8``, aligned, on the tensors' device, of exactly the bytes needed.
        tensors: As a sample's may be, in the order of their places.

    Raises:
        ValueError: If one may not, or lies on another device.
    """
    fields = _fields_on(out.device, out)
    fields.add([*tensors], tensors)
    fields.write(out)


def _fields_on(device: torch.device, out: Tensor | None) -> "_FieldsOfHost | _FieldsOfDevice":
    if device.type != "cpu":
        return _FieldsOfDevice(device)
    return _FieldsOfHost(0 if out is None else out.data_ptr())


class _FieldsOfHost:
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
                _check_layout(index, sample, layout)
                layout = None  # that is enough for all of the sample
            if tensor is not None:
                place += self._add_odd(key, place, tensor)
        if layout is not None and not _has_keys(sample, layout.schema):
            _check_layout(index, sample, layout)
        if place - first > MAX_NBYTES:
            sample_layout(sample)  # says at which field
        self.nbytes += place - first

    def _pad(self, place: int, nbytes: int) -> None:
        """Zero the last word of a field, which is then written over as far as the field goes."""
        self._copies.append((place + nbytes - nbytes % ALIGNMENT, _ZEROS_ADDRESS, ALIGNMENT))

    def _add_odd(self, key: str, place: int, value: object) -> int:
        """Add a tensor that one memmove does not copy, or not as fast, and return its bytes."""
        tensor = _checked_tensor(key, value)
        if not tensor.is_cpu:
            raise ValueError(_device_rule(key, tensor, "cpu"))
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


class _FieldsOfDevice:
    """The tensors of samples on an accelerator, joined with one ``torch.cat``: few launches."""

    __slots__ = ("_device", "_padding", "_pieces", "nbytes")

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device
        self._padding = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
        self._pieces: list[Tensor] = []

    def add(
        self,
        keys: Sequence[str],
        sample: Mapping[str, Tensor | None],
        layout: SampleLayout | None = None,
        index: int = 0,
    ) -> None:
        """Add the tensors of a sample, as :meth:`_FieldsOfHost.add` does."""
        if layout is not None:
            _check_layout(index, sample, layout)
        for key in keys:
            value = sample[key]
            if value is None:
                continue
            tensor = _checked_tensor(key, value)
            if tensor.is_meta or tensor.device != self._device:
                raise ValueError(_device_rule(key, tensor, str(self._device)))
            # Views cost no launch; only a tensor that is not contiguous is copied here.
            self._pieces.append(resolved(tensor).contiguous().view(-1).view(torch.uint8))
            self._pieces.append(self._padding[: -tensor.nbytes % ALIGNMENT])
            self.nbytes += aligned(tensor.nbytes)

    def write(self, out: Tensor) -> None:
        """Copy all fields, and zero the padding."""
        if self._pieces:
            torch.cat(self._pieces, out=out)


def _checked_tensor(key: str, value: object) -> Tensor:
    """Return a value that is a tensor as a layout may have it."""
    if not is_supported(value):
        raise ValueError(refusal(key, value))
    place_fields([(key, value.dtype, value.shape)])  # refuses sizes that are too large
    return value


def _is_lazy(tensor: Tensor) -> bool:
    """Tell whether a tensor is not what its memory says, or has none."""
    return tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()) or not tensor.data_ptr()


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
