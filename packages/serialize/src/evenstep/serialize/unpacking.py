"""Views of a buffer as the tensors of samples, without a copy."""

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from evenstep.serialize.dtypes import ALIGNMENT
from evenstep.serialize.errors import DecodeError
from evenstep.serialize.layout import TensorSample
from evenstep.serialize.packing_checks import describe
from evenstep.serialize.placement import PlacedField
from evenstep.serialize.schema import SampleLayout


def unpack_sample(buffer: Tensor, layout: SampleLayout, offset: int = 0) -> TensorSample:
    """Return one sample of a buffer as views, without a copy.

    Args:
        buffer: Contiguous 1-D ``uint8``, on any device.
        layout: The sample's layout.
        offset: Where the sample starts in ``buffer``, in bytes. If its address is not a multiple
            of ``ALIGNMENT``, the views are of a copy of the sample.

    Returns:
        Key -> view of ``buffer``, then key -> ``None``; each sorted.

    Raises:
        DecodeError: If the buffer ends before the sample does.
        ValueError: If ``buffer`` is not of that kind, or ``offset`` is negative.
    """
    return _field_views(buffer, layout.nbytes, offset).sample(layout)


def unpack_samples(
    buffer: Tensor, layouts: Sequence[SampleLayout], offset: int = 0
) -> list[TensorSample]:
    """Return samples that lie end to end as views: :func:`unpack_sample` of each, and faster.

    Args:
        buffer: Contiguous 1-D ``uint8``, on any device.
        layouts: The layouts of the samples, in order.
        offset: Where the first sample starts in ``buffer``, in bytes.

    Raises:
        DecodeError: If the buffer ends before the samples do.
        ValueError: If ``buffer`` is not of that kind, or ``offset`` is negative.
    """
    nbytes = sum([layout.nbytes for layout in layouts])
    views = _field_views(buffer, nbytes, offset)
    samples = []
    start = 0
    for layout in layouts:
        samples.append(views.sample(layout, start))
        start += layout.nbytes
    return samples


def sample_region(buffer: Tensor, nbytes: int, offset: int) -> Tensor:
    """Return the bytes of samples, at an aligned place of their storage.

    Args:
        buffer: Contiguous 1-D ``uint8``.
        nbytes: Bytes of the samples, a multiple of ``ALIGNMENT``.
        offset: Where the first sample starts in ``buffer``.

    Raises:
        DecodeError: If the buffer ends before the samples do.
        ValueError: If ``buffer`` is not of that kind, or ``offset`` is negative.
    """
    _check_bounds(buffer, nbytes, offset)
    region = buffer[offset : offset + nbytes]
    if region.storage_offset() % ALIGNMENT or region.data_ptr() % ALIGNMENT:
        region = region.clone()
    return region


def _field_views(buffer: Tensor, nbytes: int, offset: int) -> "FieldViews":
    """Return what makes the views of :func:`sample_region`, of the whole buffer if it can."""
    _check_bounds(buffer, nbytes, offset)
    start = index(offset)
    if (buffer.numel() | buffer.storage_offset() | buffer.data_ptr() | start) % ALIGNMENT:
        return FieldViews(sample_region(buffer, nbytes, start))
    return FieldViews(buffer, start)


def _check_bounds(buffer: Tensor, nbytes: int, offset: int) -> None:
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"buffer is {describe(buffer)}; it must be a contiguous 1-D uint8 tensor")
    if offset < 0:
        raise ValueError(f"offset is {offset}; it must be >= 0")
    if offset + nbytes > buffer.numel():
        raise DecodeError(
            f"buffer of {buffer.numel()} bytes ends before the {nbytes} bytes at byte {offset} do"
        )


class FieldViews:
    """Makes views of one region; each dtype's view of the whole region is made once.

    Args:
        region: As from :func:`sample_region`: its address, place in its storage and size are
            multiples of ``ALIGNMENT``.
        start: Where the samples start in it, such a multiple too.
    """

    __slots__ = ("_origin", "_region", "_start", "_typed")

    def __init__(self, region: Tensor, start: int = 0) -> None:
        self._region = region
        self._start = start
        self._origin = region.storage_offset() + start  # which is where as_strided counts from
        self._typed: dict[torch.dtype, Tensor] = {}

    @property
    def is_cpu(self) -> bool:
        """Whether the region is in host memory."""
        return self._region.is_cpu

    @property
    def address(self) -> int:
        """Where the samples are now; the region's storage may move, as into shared memory."""
        return self._region.data_ptr() + self._start

    def sample(self, layout: SampleLayout, start: int = 0) -> TensorSample:
        """Return the tensors and ``None`` values of a sample ``start`` bytes from the first."""
        # As `tensor` does, without a call for each.
        flat: TensorSample = {}
        typed, origin = self._typed, self._origin + start
        for key, dtype, shape, strides, offset, _, shift in layout.placed:
            base = typed[dtype] if dtype in typed else self._view(dtype)
            flat[key] = base.as_strided(shape, strides, (origin + offset) >> shift)
        for key in layout.schema.none_keys:
            flat[key] = None
        return flat

    def tensor(self, field: PlacedField, start: int = 0) -> Tensor:
        """Return one tensor of a sample ``start`` bytes from the first, a multiple of 8."""
        _, dtype, shape, strides, offset, _, shift = field
        base = self._typed[dtype] if dtype in self._typed else self._view(dtype)
        # One operator, where slicing and viewing are three.
        return base.as_strided(shape, strides, (self._origin + start + offset) >> shift)

    def _view(self, dtype: torch.dtype) -> Tensor:
        """Return the region as elements of a dtype that it has not been viewed as yet."""
        self._typed[dtype] = view = self._region.view(dtype)
        return view
