"""One sample's bytes and its metadata as a dict: the functions of the reorder buffer's contract."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypedDict, cast

import torch
from torch import Tensor

from evenstep.serialize.dtypes import dtype_of_name
from evenstep.serialize.layout import refusal, sample_layout
from evenstep.serialize.nested import FlatSample, Leaf
from evenstep.serialize.packing import write_fields
from evenstep.serialize.placement import PlacedField, place_fields
from evenstep.serialize.unpacking import FieldViews, sample_region


class TensorMeta(TypedDict):
    """What a receiver must know of a tensor: ``shape``, and ``dtype`` as in ``str(dtype)``."""

    shape: tuple[int, ...]
    dtype: str


class ValueMeta(TypedDict):
    """A value that is not a tensor travels in the metadata itself."""

    non_tensor: Leaf


SampleMeta: TypeAlias = dict[str, TensorMeta | ValueMeta | None]
"""Flat key -> what is needed to size and decode the field."""


def tensor_metadata(flat: Mapping[str, Leaf]) -> SampleMeta:
    """Return the metadata of one flat sample, sufficient to size and decode it.

    Args:
        flat: Flat key -> tensor, plain value or ``None``.

    Returns:
        In the order of ``flat``: ``{"shape": ..., "dtype": "torch.float32"}`` for a tensor,
        ``{"non_tensor": value}`` for a plain value, ``None`` for ``None``.

    Raises:
        ValueError: If a tensor is of a dtype or kind that is not supported.
    """
    sample_layout({key: value for key, value in flat.items() if isinstance(value, Tensor)})
    return {key: _entry(value) for key, value in flat.items()}


def _entry(value: Leaf) -> TensorMeta | ValueMeta | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return {"shape": tuple(value.shape), "dtype": str(value.dtype)}
    return {"non_tensor": value}


def sample_keys(meta: SampleMeta) -> list[str]:
    """Return the sorted keys of the tensors in a sample's metadata.

    Sender and receiver see the same metadata, so they derive the same order.

    Raises:
        ValueError: If the metadata is not a dict.
    """
    _check_meta(meta)
    return sorted(
        key for key, entry in meta.items() if isinstance(entry, Mapping) and "dtype" in entry
    )


def serialize_sample(flat: Mapping[str, Leaf], keys: Sequence[str]) -> Tensor:
    """Copy the tensors of one sample into a buffer, in the order of ``keys``.

    Args:
        flat: The flat sample; keys whose value is ``None`` are skipped.
        keys: Sorted tensor keys, from :func:`sample_keys`.

    Returns:
        1-D ``uint8`` on the tensors' device; each field padded with zeros to ``ALIGNMENT``.

    Raises:
        ValueError: If a key is missing, its value is not a supported tensor, or has no data.
    """
    missing = [key for key in keys if key not in flat]
    if missing:
        raise ValueError(f"keys {missing} are not in the sample, which has {list(flat)}")
    tensors: dict[str, Tensor] = {}
    for key in keys:
        value = flat[key]
        if isinstance(value, Tensor):
            tensors[key] = value
        elif value is not None:
            raise ValueError(refusal(key, value))
    _, nbytes = _place(tensor_metadata(tensors), list(tensors))
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    out = torch.empty(nbytes, dtype=torch.uint8, device=device)
    write_fields(out, tensors)
    return out


def sample_byte_size(meta: SampleMeta, keys: Sequence[str]) -> int:
    """Return the bytes that :func:`serialize_sample` makes of a sample with this metadata.

    Raises:
        ValueError: If the metadata is not that of a sample.
    """
    return _place(meta, keys)[1]


def deserialize_sample(
    buf: Tensor, offset: int, meta: SampleMeta, keys: Sequence[str]
) -> tuple[FlatSample, int]:
    """Rebuild one sample from a buffer, the inverse of :func:`serialize_sample`.

    Args:
        buf: Contiguous 1-D ``uint8`` with the sample's bytes at ``offset``.
        offset: In bytes. Where it is a multiple of ``ALIGNMENT`` the tensors are views of
            ``buf``, else of a copy of the sample.
        meta: The sample's metadata.
        keys: Sorted tensor keys, from :func:`sample_keys`.

    Returns:
        The flat sample, in the order of ``meta``, and the offset just past it.

    Raises:
        DecodeError: If ``buf`` ends before the sample does.
        ValueError: If the metadata is not that of a sample.
    """
    placed, nbytes = _place(meta, keys)
    views = FieldViews(sample_region(buf, nbytes, offset))
    tensors = {field.key: views.tensor(field) for field in placed}
    flat: FlatSample = {}
    for key, entry in meta.items():
        if entry is None:
            flat[key] = None
        elif not isinstance(entry, Mapping):
            raise ValueError(_entry_rule(key, entry))
        elif "non_tensor" in entry:
            flat[key] = cast("ValueMeta", entry)["non_tensor"]
        elif key in tensors:
            flat[key] = tensors[key]
    return flat, offset + nbytes


def _place(meta: SampleMeta, keys: Sequence[str]) -> tuple[tuple[PlacedField, ...], int]:
    """Lay the fields out in the order of ``keys``; keys whose entry is ``None`` have no bytes."""
    _check_meta(meta)
    entries = []
    for key in keys:
        if key not in meta:
            raise ValueError(
                f"key {key!r} is not in the metadata, which has {list(meta)}; take keys from "
                "sample_keys(meta)"
            )
        entry = meta[key]
        if entry is None:
            continue
        try:
            fields = cast("TensorMeta", entry)
            entries.append((key, dtype_of_name(fields["dtype"]), tuple(fields["shape"])))
        except (TypeError, KeyError):
            raise ValueError(_entry_rule(key, entry)) from None
    return place_fields(entries)


def _check_meta(meta: object) -> None:
    if not isinstance(meta, Mapping):
        raise ValueError(
            f"meta is a {type(meta).__name__}; it must be a dict of key and entry, from "
            "tensor_metadata(flat)"
        )


def _entry_rule(key: str, entry: object) -> str:
    return (
        f"metadata of key {key!r} is {entry!r}; it must be a dict of shape and dtype, from "
        "tensor_metadata(flat)"
    )
