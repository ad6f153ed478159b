"""The samples of a micro-batch in host memory, cut by arithmetic: no tensor for each field."""

from collections.abc import Iterator, KeysView, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TypeAlias

import torch

from evenstep.serialize import FEW_ROWS, LaidOutSample, Part, SampleLayout, sample_layout

__all__ = ["CutField", "CutSample", "cut_field", "cut_samples", "uncut"]

Form: TypeAlias = tuple[torch.dtype, *tuple[int, ...]]

_FORMS, _MAX_KNOWN = 16, 512  # layouts of one form; a layout takes a few KB


class CutField:
    """One tensor of a micro-batch and where each sample's part of it lies.

    Args:
        tensor: The tensor, detached and contiguous.
        dim: The dim that has the rows; None if the whole tensor is every sample's.
        rows: Rows of each sample.

    Attributes:
        starts: The first row of each sample.
        row_nbytes: Bytes from one row to the next.
        step: Bytes from one row of a part to the next; 0 if parts are contiguous.
    """

    __slots__ = ("_dim", "row_nbytes", "rows", "starts", "step", "tensor")

    def __init__(self, tensor: torch.Tensor, dim: int | None, rows: Sequence[int]) -> None:
        self.tensor, self._dim, self.rows = tensor, dim, rows
        self.starts = [*accumulate(rows, initial=0)]
        self.row_nbytes = 0 if dim is None else tensor.stride(dim) * tensor.itemsize
        self.step = 0  # where there is one row of them, it is contiguous
        if dim == 1 and tensor.shape[0] > 1 and tensor.numel():
            self.step = tensor.stride(0) * tensor.itemsize

    @property
    def form(self) -> Form:
        """All that the layouts of samples depend on, besides their rows."""
        shape = [*self.tensor.shape]
        if self._dim is not None:
            shape[self._dim] = -1
        return self.tensor.dtype, *shape

    @property
    def is_shared(self) -> bool:
        """Whether all of it is in every sample, and maybe in those of other micro-batches."""
        return self._dim is None

    def view(self, index: int) -> torch.Tensor:
        """Return the part of one sample."""
        if self._dim is None:
            return self.tensor
        return self.tensor.narrow(self._dim, self.starts[index], self.rows[index])


def cut_field(tensor: torch.Tensor, dim: int | None, rows: Sequence[int]) -> CutField | None:
    """Cut a tensor, or return None if its parts are not a few contiguous rows of host memory.

    Args:
        tensor: The tensor, whose rows the caller has checked against ``rows``.
        dim: The dim that has the rows, >= 0; None if the whole tensor is every sample's.
        rows: Rows of each sample.
    """
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.is_nested:
        return None
    if tensor.is_neg() or tensor.is_conj() or not tensor.is_contiguous():
        return None
    if tensor.numel() and not tensor.data_ptr():  # zeros that autograd made up
        return None
    if dim is not None and (dim > 1 or (dim == 1 and tensor.shape[0] > FEW_ROWS)):
        return None
    return CutField(tensor.detach(), dim, rows)  # of its own: the caller's may be changed in place


@lru_cache(_FORMS)
def _known_layouts(
    form: tuple[tuple[str, Form | None], ...],  # noqa: ARG001 # the key of the cache
) -> dict[tuple[int, ...], SampleLayout]:
    """Return where to keep the layouts of samples that differ in their rows alone."""
    return {}


class _Batch:
    """What the samples of one micro-batch share."""

    def __init__(self, fields: Mapping[str, CutField | None]) -> None:
        self.fields = fields
        cut = {key: field for key, field in fields.items() if field is not None}
        self.by_place = [cut[key] for key in sorted(cut)]
        self.is_pageable = not any(field.tensor.is_pinned() for field in self.by_place)
        form = tuple([(key, field and field.form) for key, field in fields.items()])
        known = _known_layouts(form)
        self.layouts: list[SampleLayout] = []
        for index, rows in enumerate(zip(*[field.rows for field in self.by_place], strict=True)):
            if (layout := known.get(rows)) is None:
                if len(known) >= _MAX_KNOWN:
                    known.clear()
                layout = known[rows] = sample_layout(self.views(index))
            self.layouts.append(layout)

    @cached_property
    def parts(self) -> list[tuple[Part, ...]]:
        """By sample: where each tensor lies."""
        columns = []
        for field in self.by_place:
            address, step = field.tensor.data_ptr(), field.step
            columns.append([(address + start * field.row_nbytes, step) for start in field.starts])
        return [*zip(*columns, strict=True)]

    def views(self, index: int) -> dict[str, torch.Tensor | None]:
        return {
            key: None if field is None else field.view(index) for key, field in self.fields.items()
        }


class CutSample(LaidOutSample):
    """One sample of a micro-batch: flat key -> view or None, each view made when asked for."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: _Batch, index: int) -> None:
        self._batch, self._index = batch, index

    def __getitem__(self, key: str) -> torch.Tensor | None:
        field = self._batch.fields[key]
        return None if field is None else field.view(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.fields)

    def __len__(self) -> int:
        return len(self._batch.fields)

    def keys(self) -> KeysView[str]:
        """Return the keys in the order of the micro-batch."""
        return self._batch.fields.keys()

    @property
    def layout(self) -> SampleLayout:
        """The layout that the sample has once packed."""
        return self._batch.layouts[self._index]

    @property
    def is_cpu(self) -> bool:
        """True: what lies elsewhere is not cut in this way."""
        return True

    @property
    def is_pageable(self) -> bool:
        """Whether no tensor is page-locked."""
        return self._batch.is_pageable

    @property
    def place(self) -> tuple[_Batch, int]:
        """What it was cut from, and as which of the samples there."""
        return self._batch, self._index

    def parts(self) -> Sequence[Part]:
        """Return where the tensor of each of ``layout.placed`` lies now."""
        return self._batch.parts[self._index]


def cut_samples(fields: Mapping[str, CutField | None]) -> list[CutSample]:
    """Return the samples of a micro-batch in order.

    Args:
        fields: Its fields by flat key; None where the value is None. One at least is a tensor.

    Raises:
        ValueError: If a field has a dtype that cannot be sent, naming it.
    """
    batch = _Batch(fields)
    return [CutSample(batch, index) for index in range(len(batch.layouts))]


def uncut(samples: Sequence[object]) -> dict[str, torch.Tensor | None] | None:
    """Return the micro-batch that was cut into these samples, where it lies.

    Args:
        samples: Samples of any kind.

    Returns:
        Its fields by flat key, and a copy of each that all samples share. None unless the samples
        are all those of one micro-batch, in order, and it is seen that each field has memory of its
        own, and no inference tensor: those that are joined are none.
    """
    places = [sample.place if isinstance(sample, CutSample) else None for sample in samples]
    if not places or places[0] is None:
        return None
    batch, _ = places[0]
    if places != [(batch, index) for index in range(len(batch.layouts))]:
        return None
    if not _have_own_memory(batch.by_place):
        return None
    copies = {id(field): field.tensor.clone() for field in batch.by_place if field.is_shared}
    return {
        key: None if field is None else copies.get(id(field), field.tensor)
        for key, field in batch.fields.items()
    }


def _have_own_memory(fields: Sequence[CutField]) -> bool:
    """Tell whether the fields are alone in torch's memory, as far as torch knows."""
    addresses = set()
    for field in fields:
        storage = field.tensor.untyped_storage()
        is_whole = field.is_shared or storage.nbytes() == field.tensor.nbytes
        if not is_whole or field.tensor.is_inference() or storage.data_ptr() in addresses:
            return False
        if storage.nbytes():
            addresses.add(storage.data_ptr())
    return True
