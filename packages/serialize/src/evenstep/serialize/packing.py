"""Samples into one buffer with one copy, and views of the buffer without any."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from evenstep.serialize.dtypes import ALIGNMENT
from evenstep.serialize.laid_out import is_laid_out
from evenstep.serialize.packing_checks import check_layout, describe
from evenstep.serialize.packing_device import FieldsOfDevice
from evenstep.serialize.packing_host import FieldsOfHost
from evenstep.serialize.schema import SampleLayout, sorted_keys


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
        if isinstance(fields, FieldsOfHost) and is_laid_out(flat) and flat.is_cpu:
            if layout is not None:
                check_layout(index, flat, layout)
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


def _check_kind(out: Tensor) -> None:
    if out.dtype is not torch.uint8 or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out is {describe(out)}; it must be a contiguous 1-D uint8 tensor")
    if out.storage_offset() % ALIGNMENT or out.data_ptr() % ALIGNMENT:
        raise ValueError(f"out starts at address {out.data_ptr()}, not a multiple of {ALIGNMENT}")


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


def _fields_on(device: torch.device, out: Tensor | None) -> "FieldsOfHost | FieldsOfDevice":
    if device.type != "cpu":
        return FieldsOfDevice(device)
    return FieldsOfHost(0 if out is None else out.data_ptr())
