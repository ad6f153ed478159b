"""Samples into one buffer with one copy, and views of the buffer without any."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from evenstep.serialize.dtypes import ALIGNMENT
from evenstep.serialize.layout import sample_layout
from evenstep.serialize.schema import SampleLayout

# From this size on, Tensor.copy_ (several threads) beats memmove (one thread, but 0.5 us against
# 5 us before the first byte moves).
_LARGE_NBYTES = 1 << 20

# An integer type of each element size, to move elements as they are: no conversion, and the same
# operator for the dtypes for which torch has no other.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_samples(
    flats: Sequence[Mapping[str, Tensor | None]],
    *,
    layouts: Sequence[SampleLayout] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Copy samples end to end into one buffer, each byte once.

    Fields lie as their layouts say, and the padding between them is zero, so equal samples give
    equal bytes. Contiguous or not, each tensor is copied straight into its place; conjugate and
    negative views are resolved first, and gradients are not recorded. Tensors on an accelerator
    are joined by one ``torch.cat``, hence by a few kernels for any number of fields.

    Args:
        flats: Flat samples of tensors, all on one device, and ``None``.
        layouts: ``sample_layout`` of each sample, where the caller has them already.
        out: A contiguous 1-D ``uint8`` tensor of exactly the bytes needed, on the tensors'
            device, to write to: pinned or shared memory, for example.

    Returns:
        ``out``, or a new 1-D ``uint8`` tensor ``[sum of layout.nbytes]``; on the CPU if the
        samples hold no tensor.

    Raises:
        ValueError: If a sample has no layout or not the one given, tensors lie on different
            devices, or ``out`` does not fit.
    """
    if layouts is None:
        layouts = [sample_layout(flat) for flat in flats]
    elif len(layouts) != len(flats):
        raise ValueError(f"{len(layouts)} layouts for {len(flats)} samples; give one for each")
    nbytes = sum([layout.nbytes for layout in layouts])
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8, device=_device_of(flats))
    else:
        _check_out(out, nbytes)
    write_tensors(out, _checked_tensors(flats, layouts))
    return out


def _device_of(flats: Iterable[Mapping[str, Tensor | None]]) -> torch.device:
    """Return the device of the first tensor."""
    for flat in flats:
        for value in flat.values():
            if value is not None:
                return value.device
    return torch.device("cpu")


def _checked_tensors(
    flats: Sequence[Mapping[str, Tensor | None]], layouts: Sequence[SampleLayout]
) -> Iterator[tuple[Tensor, int]]:
    """Yield each tensor with its place in the buffer, checked against the layout.

    The bytes are copied by address, so nothing may differ from what the layout says.
    """
    start = 0
    for index, (flat, layout) in enumerate(zip(flats, layouts, strict=True)):
        for key, dtype, shape, _, _, offset, _ in layout.placed:
            tensor = flat.get(key)
            if type(tensor) is not Tensor or tensor.dtype is not dtype or tensor.shape != shape:
                raise ValueError(
                    f"sample {index}, field {key!r}: {describe(tensor)} where the layout has a "
                    f"tensor of {dtype} {list(shape)}; compute the layout of this sample"
                )
            yield tensor, start + offset
        none_keys = layout.schema.none_keys
        if len(flat) != len(layout.placed) + len(none_keys) or any(
            flat.get(key) is not None for key in none_keys
        ):
            raise ValueError(f"sample {index} has other keys than its layout: {list(flat)}")
        start += layout.nbytes


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


def write_tensors(out: Tensor, fields: Iterable[tuple[Tensor, int]]) -> None:
    """Copy tensors to their places in ``out`` and zero the padding after each.

    Args:
        out: 1-D ``uint8``, aligned, on the tensors' device.
        fields: Tensor and byte offset, in order, each as close to the one before as the alignment
            allows, together filling ``out``.

    Raises:
        ValueError: If a tensor is on another device or has no data.
    """
    with torch.no_grad():
        if out.is_cpu:
            _write_by_address(out, fields)
        else:
            _write_by_cat(out, fields)


def _write_by_address(out: Tensor, fields: Iterable[tuple[Tensor, int]]) -> None:
    base = out.data_ptr()
    for tensor, start in fields:
        if not tensor.is_cpu:
            raise ValueError(_device_rule(tensor, out))
        nbytes = tensor.nbytes
        plain = not (tensor.is_neg() or tensor.is_conj())
        if nbytes < _LARGE_NBYTES and plain and tensor.is_contiguous():
            ctypes.memmove(base + start, tensor.data_ptr(), nbytes)
        else:
            bits = resolved(tensor).view(_BITS[tensor.itemsize])
            place = out[start : start + nbytes].view(bits.dtype)
            place.view(bits.shape).copy_(bits)
        if nbytes % ALIGNMENT:
            ctypes.memset(base + start + nbytes, 0, -nbytes % ALIGNMENT)


def _write_by_cat(out: Tensor, fields: Iterable[tuple[Tensor, int]]) -> None:
    """Join the tensors' bytes and the padding with one ``torch.cat``: few launches, no sync."""
    padding = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=out.device)
    pieces = []
    for tensor, _ in fields:
        if tensor.device != out.device:
            raise ValueError(_device_rule(tensor, out))
        # Only a tensor that is not contiguous is copied here; views of the others cost no launch.
        piece = resolved(tensor).contiguous().view(-1).view(torch.uint8)
        pieces.append(piece)
        if piece.numel() % ALIGNMENT:
            pieces.append(padding[: -piece.numel() % ALIGNMENT])
    if pieces:
        torch.cat(pieces, out=out)


def resolved(tensor: Tensor) -> Tensor:
    """Return ``tensor``, materialized where it is a lazy conjugate or negative."""
    return tensor.detach().resolve_conj().resolve_neg()


def _device_rule(tensor: Tensor, out: Tensor) -> str:
    return (
        f"a {describe(tensor)} is on {tensor.device}, the buffer on {out.device}; "
        "move the whole batch to one device first"
    )
