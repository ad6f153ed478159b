"""Many samples in one buffer, read lazily."""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from evenstep.serialize.copies import Copies
from evenstep.serialize.errors import DecodeError
from evenstep.serialize.fold import VALUES_KEY, fold_values, unfold_values
from evenstep.serialize.laid_out import FieldJoiner, LaidOutSample, Part
from evenstep.serialize.layout import sample_layout
from evenstep.serialize.manifest import Manifest
from evenstep.serialize.nested import NestedSample, flatten_nested, unflatten_nested
from evenstep.serialize.packing import pack_samples
from evenstep.serialize.schema import SampleLayout
from evenstep.serialize.unpacking import FieldViews, sample_region


class PackedSample(LaidOutSample):
    """One sample of a buffer: flat key -> view or ``None``, each view made when asked for.

    Plain values lie folded under ``VALUES_KEY``; :meth:`nested` puts them back.
    """

    __slots__ = ("_layout", "_start", "_views")

    def __init__(self, views: FieldViews, layout: SampleLayout, start: int) -> None:
        self._views = views
        self._layout = layout
        self._start = start

    def __getitem__(self, key: str) -> Tensor | None:
        index = self._layout.schema.places[key]
        if index is None:
            return None
        return self._views.tensor(self._layout.placed[index], self._start)

    @property
    def layout(self) -> SampleLayout:
        """Where each field lies in the sample."""
        return self._layout

    @property
    def is_cpu(self) -> bool:
        """Whether the buffer is in host memory."""
        return self._views.is_cpu

    def parts(self) -> list[Part]:
        """Return where the tensor of each of ``layout.placed`` lies now; all are contiguous."""
        start = self._views.address + self._start
        return [(start + field.offset, 0) for field in self._layout.placed]

    def nested(self) -> NestedSample:
        """Return the sample as it was packed; its tensors are views of the buffer.

        Keys are sorted, since that is how they lie.

        Raises:
            DecodeError: If the folded values or the keys are not those of a sample.
        """
        flat = unfold_values(self._views.sample(self._layout, self._start))
        try:
            return unflatten_nested(dict(sorted(flat.items())))
        except ValueError as error:
            raise DecodeError(str(error)) from None


class PackedSamples(Sequence[PackedSample]):
    """Samples that lie end to end in one buffer.

    Send ``manifest.encode()`` and ``buffer``; the receiver makes the same object of
    ``Manifest.decode(...)`` and the bytes it received.

    Args:
        manifest: Where the samples lie.
        buffer: Contiguous 1-D ``uint8``, on any device. At an address that is not a multiple of
            ``ALIGNMENT`` it is copied, once.

    Raises:
        DecodeError: If the buffer has not exactly the bytes of the manifest.
        ValueError: If ``buffer`` is not of that kind.
    """

    __slots__ = ("_views", "buffer", "manifest")

    def __init__(self, manifest: Manifest, buffer: Tensor) -> None:
        if buffer.numel() != manifest.nbytes:
            raise DecodeError(
                f"buffer has {buffer.numel()} bytes, its manifest {manifest.nbytes}; "
                "give exactly the slice that holds the samples"
            )
        self.manifest = manifest
        self.buffer = sample_region(buffer, manifest.nbytes, 0)
        self._views = FieldViews(self.buffer)

    def __len__(self) -> int:
        return len(self.manifest.layouts)

    @overload
    def __getitem__(self, index: int) -> PackedSample: ...
    @overload
    def __getitem__(self, index: slice) -> list[PackedSample]: ...
    def __getitem__(self, index: int | slice) -> PackedSample | list[PackedSample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        return PackedSample(self._views, self.manifest.layouts[index], self.manifest.offsets[index])

    def __iter__(self) -> Iterator[PackedSample]:
        for layout, start in zip(self.manifest.layouts, self.manifest.offsets, strict=False):
            yield PackedSample(self._views, layout, start)

    def merge(self, key: str, indices: Iterable[int] | None = None, *, dim: int = 0) -> Tensor:
        """Concatenate one field of many samples, each byte copied once, from the buffer.

        Args:
            key: The flat key of a field that all these samples have as a tensor.
            indices: Which samples, in which order; all by default.
            dim: Along which dimension.

        Returns:
            A new tensor on the buffer's device.

        Raises:
            ValueError: If no sample is named, one has no such tensor, or shapes or dtypes differ
                other than in the size of ``dim``.
        """
        chosen = list(range(len(self)) if indices is None else indices)
        if not chosen:
            raise ValueError(f"no samples to merge {key!r} of; name one or more")
        samples = [self[index] for index in chosen]
        if all(sample.layout.schema.places.get(key) is not None for sample in samples):
            copies = Copies()
            joined = FieldJoiner(samples, _empty, copies).join(key, dim)
            if joined is not None:
                copies.make()
                return joined
        tensors: list[Tensor] = []
        for index, sample in zip(chosen, samples, strict=True):
            tensor = sample.get(key)
            if tensor is None:
                keys = [name for name in sample if name != VALUES_KEY]
                raise ValueError(
                    f"sample {index} has no tensor {key!r}; it has {keys}, and plain values come "
                    "with nested()"
                )
            if tensors and tensor.dtype is not tensors[0].dtype:
                raise ValueError(
                    f"field {key!r} is {tensor.dtype} in sample {index}, {tensors[0].dtype} before"
                )
            tensors.append(tensor)
        try:
            return torch.cat(tensors, dim)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"field {key!r} does not merge along dimension {dim}: {error}"
            ) from None


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def pack(samples: Iterable[NestedSample], *, out: Tensor | None = None) -> PackedSamples:
    """Pack nested or flat samples into one buffer, each tensor byte copied once.

    Args:
        samples: Nested dicts of tensors and plain values, as for :func:`dumps`; the tensors all
            on one device.
        out: A contiguous 1-D ``uint8`` tensor to write to, on that device: pinned or shared
            memory, for example. The samples take its first bytes.

    Returns:
        The manifest with ``out`` (as far as it was used) or a new buffer.

    Raises:
        ValueError: If a sample holds what would not come back as it is, tensors lie on different
            devices, or ``out`` is too small or of another kind.
    """
    flats = [fold_values(flatten_nested(sample)) for sample in samples]
    manifest = Manifest(tuple([sample_layout(flat) for flat in flats]))
    if out is not None and out.dim() == 1:
        if out.numel() < manifest.nbytes:
            raise ValueError(f"out has {out.numel()} bytes, the samples take {manifest.nbytes}")
        out = out[: manifest.nbytes]
    return PackedSamples(manifest, pack_samples(flats, out=out))
