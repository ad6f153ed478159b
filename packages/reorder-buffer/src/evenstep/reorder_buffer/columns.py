"""One field of a micro-batch as a column of per-sample values: cut into views, and joined again."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from evenstep.exchange import HOST_MEMORY
from evenstep.reorder_buffer.field_kinds import Batched, FieldKind, Global
from evenstep.serialize import Leaf, dumps

__all__ = ["Column", "is_indivisible", "join_column", "split_column"]

Column: TypeAlias = Sequence[Leaf]


def is_indivisible(value: Leaf) -> bool:
    """Say whether ``value`` has no rows to cut: it is no list, tuple or tensor with dims."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return not isinstance(value, list | tuple)


def split_column(
    value: torch.Tensor | list[Leaf] | tuple[Leaf, ...], rows: list[int], dim: int
) -> Column:
    """Cut a field into one part per sample; parts of a tensor are views.

    Args:
        value: The field, whose rows the caller has checked against ``rows``.
        rows: Rows of each sample.
        dim: The dim of a tensor that has the rows.

    Returns:
        ``len(rows)`` tensors, lists or tuples, like ``value``.
    """
    if isinstance(value, torch.Tensor):
        # A view that autograd knew would drag the user's graph to other ranks.
        return value.detach().split_with_sizes(rows, dim)
    cuts = pairwise(accumulate(rows, initial=0))
    return [value[start:end] for start, end in cuts]


def join_column(key: str, values: Column, kind: FieldKind, owners: Sequence[int]) -> Leaf:
    """Join the samples' values of one field, in order (inverse of :func:`split_column`).

    Args:
        key: The field's key, for error messages.
        values: The values, at least one.
        kind: The field's kind.
        owners: Index of the sample of each value, for error messages.

    Returns:
        One tensor of its own memory, one list or tuple, or the one value that all samples share.

    Raises:
        ValueError: If the values cannot belong to one field, naming it and the samples.
    """
    first = values[0]
    if isinstance(kind, Global) or is_indivisible(first):
        _check_same(key, values, owners)
        return first.clone() if isinstance(first, torch.Tensor) else first
    if isinstance(first, torch.Tensor):
        return _concatenate(key, values, kind, owners)
    rows: list[Leaf] = []
    for index, value in enumerate(values):
        if type(value) is not type(first):
            raise ValueError(_differs(key, values, owners, index))
        assert isinstance(value, list | tuple)
        rows += value
    return rows if isinstance(first, list) else tuple(rows)


def _concatenate(key: str, values: Column, kind: FieldKind, owners: Sequence[int]) -> torch.Tensor:
    """Concatenate tensors of one dtype, ndim and device, once, padding where the rule says so."""
    first = values[0]
    assert isinstance(first, torch.Tensor)
    dim = kind.dim % first.ndim if isinstance(kind, Batched) else 0
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    # torch.cat would promote dtypes, and skip an empty tensor of one dim.
    alike = len({(tensor.dtype, tensor.ndim) for tensor in tensors}) == 1
    if not alike or len(tensors) < len(values):
        mismatch = _mismatch(key, values, owners, dim)
        assert mismatch is not None
        raise mismatch
    if isinstance(kind, Batched) and kind.pad is not None and dim != first.ndim - 1:
        length = max(tensor.shape[-1] for tensor in tensors)
        if any(tensor.shape[-1] != length for tensor in tensors):
            return _concatenate_padded(tensors, dim, length, kind)
    try:
        return torch.cat(tensors, dim, out=_room_for(tensors, dim))
    except RuntimeError as error:
        mismatch = _mismatch(key, values, owners, dim)
        if mismatch is None:  # such as no memory left
            raise
        raise mismatch from error


def _room_for(tensors: list[torch.Tensor], dim: int) -> torch.Tensor | None:
    """Return where on the host to join tensors; None lets torch find room on a device."""
    first = tensors[0]
    if not first.is_cpu:
        return None
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return HOST_MEMORY.empty(shape, first.dtype)


def _concatenate_padded(
    tensors: list[torch.Tensor], dim: int, length: int, kind: Batched
) -> torch.Tensor:
    """Concatenate along ``dim`` after filling every tensor's last dim up to ``length``."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    shape[-1] = length
    assert kind.pad is not None
    joined = tensors[0].new_full(shape, kind.pad)
    slots = joined.split_with_sizes([tensor.shape[dim] for tensor in tensors], dim)
    for slot, tensor in zip(slots, tensors, strict=True):
        start = length - tensor.shape[-1] if kind.pad_side == "left" else 0
        slot.narrow(-1, start, tensor.shape[-1]).copy_(tensor)
    return joined


def _check_same(key: str, values: Column, owners: Sequence[int]) -> None:
    """Raise unless all values are equal to the last byte; the same object needs no look."""
    first = values[0]
    for index, value in enumerate(values):
        if value is first:
            continue
        if value is None or first is None or dumps({"": value}) != dumps({"": first}):
            raise ValueError(
                f"{_differs(key, values, owners, index)} What has no batch dim must be the same "
                "for all samples of a micro-batch; give each sample its own in a list or a tensor "
                "with a batch dim, or leave the field out."
            )


def _mismatch(key: str, values: Column, owners: Sequence[int], dim: int) -> ValueError | None:
    """Return the error that says which value cannot follow the first along ``dim``, if any."""

    def fixed(value: Leaf) -> object:
        if not isinstance(value, torch.Tensor):
            return None
        sizes = (*value.shape[:dim], *value.shape[dim + 1 :])
        return value.dtype, value.ndim, value.device, sizes

    for index, value in enumerate(values):
        if fixed(value) != fixed(values[0]):
            return ValueError(
                f"{_differs(key, values, owners, index)} Dtype, device and all sizes but that of "
                f"dim {dim} must agree."
            )
    return None


def _differs(key: str, values: Column, owners: Sequence[int], index: int) -> str:
    """Return how the value at ``index`` differs from the first."""
    return (
        f"field {key!r}: sample {owners[index]} has {_describe(values[index])}, and sample "
        f"{owners[0]} has {_describe(values[0])}."
    )


def _describe(value: Leaf) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor {list(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
