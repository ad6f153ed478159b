"""Samples into one buffer with one copy, and views of the buffer without any."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from evenstep.serialize.dtypes import ALIGNMENT, DTYPES
from evenstep.serialize.layout import meta_refusal, sample_layout
from evenstep.serialize.placement import PlacedField
from evenstep.serialize.schema import SampleLayout

# Above this size Tensor.copy_ with several threads beats memmove, which has one, but starts within
# 0.5 us where a view and a copy_ take 5 us.
_LARGE_NBYTES = 1 << 20

# The dtypes that can have conjugate or negative views, which are not what their memory says.
_MAYBE_LAZY = frozenset(
    [dtype for dtype in DTYPES.values() if dtype.is_complex]
    + [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)

# An integer type of each element size, to move elements as they are: no conversion, and the same
# operator for the dtypes for which torch has no other.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Run: TypeAlias = tuple[Sequence[Tensor], Sequence[PlacedField], int]
"""Tensors, the place of each, and where the run starts in the buffer, in bytes."""


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
    if layouts is None:
        layouts = [sample_layout(flat) for flat in flats]
        runs = _runs(flats, layouts)
    elif len(layouts) == len(flats):
        runs = _checked_runs(flats, layouts)
    else:
        raise ValueError(f"{len(layouts)} layouts for {len(flats)} samples; give one for each")
    nbytes = sum([layout.nbytes for layout in layouts])
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8, device=_device_of(flats))
    else:
        _check_out(out, nbytes)
    write_fields(out, runs)
    return out


def _device_of(flats: Iterable[Mapping[str, Tensor | None]]) -> torch.device:
    """Return the device of the first tensor."""
    for flat in flats:
        for value in flat.values():
            if value is not None:
                return value.device
    return torch.device("cpu")


def _checked_runs(
    flats: Sequence[Mapping[str, Tensor | None]], layouts: Sequence[SampleLayout]
) -> Iterator[Run]:
    """Yield the run of each sample, compared with the layout that came with it."""
    runs = zip(flats, layouts, _runs(flats, layouts), strict=True)
    for index, (flat, layout, run) in enumerate(runs):
        tensors, placed, _ = run
        for tensor, (key, dtype, shape, *_) in zip(tensors, placed, strict=True):
            # Addresses are about to be used: nothing may differ from what the layout says.
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
        yield run


def _runs(
    flats: Sequence[Mapping[str, Tensor | None]], layouts: Sequence[SampleLayout]
) -> Iterator[Run]:
    """Yield the run of each sample."""
    start = 0
    for flat, layout in zip(flats, layouts, strict=True):
        tensors = [flat.get(field.key) for field in layout.placed]
        yield cast("list[Tensor]", tensors), layout.placed, start
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


def write_fields(out: Tensor, runs: Iterable[Run]) -> None:
    """Copy fields to their places in ``out``, and zero the padding after each.

    Args:
        out: 1-D ``uint8``, aligned, on the tensors' device.
        runs: The fields, which together fill ``out`` from its start; each tensor has the dtype
            and the shape that its place is for.

    Raises:
        ValueError: If a tensor lies on another device.
    """
    with torch.no_grad():
        if out.is_cpu:
            for run in runs:
                _copy_by_address(out, *run)
        else:
            _copy_by_cat(out, runs)


def _copy_by_address(
    out: Tensor, tensors: Sequence[Tensor], placed: Sequence[PlacedField], start: int
) -> None:
    base = out.data_ptr() + start
    memmove_limit = _LARGE_NBYTES if torch.get_num_threads() > 1 else out.numel()
    for tensor, field in zip(tensors, placed, strict=True):
        _, dtype, _, _, _, offset, nbytes = field
        if not tensor.is_cpu:
            raise ValueError(_device_rule(field.key, tensor, out))
        if (
            nbytes <= memmove_limit
            and tensor.is_contiguous()
            and (dtype not in _MAYBE_LAZY or not (tensor.is_conj() or tensor.is_neg()))
        ):
            ctypes.memmove(base + offset, tensor.data_ptr(), nbytes)
        else:
            bits = resolved(tensor).view(_BITS[dtype.itemsize])
            place = out[start + offset : start + offset + nbytes].view(bits.dtype)
            place.view(bits.shape).copy_(bits)
        if nbytes % ALIGNMENT:
            ctypes.memset(base + offset + nbytes, 0, -nbytes % ALIGNMENT)


def _copy_by_cat(out: Tensor, runs: Iterable[Run]) -> None:
    """Join the bytes of all fields, and the padding, with one ``torch.cat``: few launches."""
    padding = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=out.device)
    pieces = []
    for tensors, placed, _ in runs:
        for tensor, field in zip(tensors, placed, strict=True):
            if tensor.is_meta:
                raise ValueError(meta_refusal(field.key))
            if tensor.device != out.device:
                raise ValueError(_device_rule(field.key, tensor, out))
            # Views cost no launch; only a tensor that is not contiguous is copied here.
            pieces.append(resolved(tensor).contiguous().view(-1).view(torch.uint8))
            pieces.append(padding[: -field.nbytes % ALIGNMENT])
    if pieces:
        torch.cat(pieces, out=out)


def resolved(tensor: Tensor) -> Tensor:
    """Return ``tensor``, materialized where it is a lazy conjugate or negative."""
    return tensor.detach().resolve_conj().resolve_neg()


def _device_rule(key: str, tensor: Tensor, out: Tensor) -> str:
    if tensor.is_meta:
        return meta_refusal(key)
    return (
        f"field {key!r} is on {tensor.device}, the buffer is on {out.device}; "
        "move the whole batch to one device first"
    )
