"""The layout of a given sample, compiled once per schema and set of sizes."""

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from evenstep.serialize.dtypes import DTYPE_CODES, REFUSED_DTYPES, supported_names
from evenstep.serialize.laid_out import is_laid_out
from evenstep.serialize.limits import MAX_NDIM, ndim_refusal
from evenstep.serialize.schema import (
    FieldSpec,
    SampleLayout,
    SampleSchema,
    interned,
    sorted_keys,
)

TensorSample: TypeAlias = dict[str, Tensor | None]
"""A flat sample of tensors and ``None`` only."""

_Entry: TypeAlias = tuple[str, torch.dtype | None, tuple[int, ...]]
"""Key, dtype (``None`` for a ``None`` value) and shape."""

# A data set has few schemas, but a layout per set of sizes; a layout takes a few KB.
_CACHED_SCHEMAS = 256
_CACHED_LAYOUTS = 4096


def sample_layout(flat: Mapping[str, Tensor | None]) -> SampleLayout:
    """Return the layout of a flat sample of tensors and ``None``.

    The layouts seen last are kept, so a schema that repeats costs a look-up.

    Args:
        flat: Flat key -> tensor of any device, also "meta", or ``None``. Plain values must be
            folded first (:func:`fold_values`).

    Raises:
        ValueError: If a value is anything else, a tensor of an unsupported kind or dtype, or if a
            key cannot be encoded; the message names the key.
    """
    if is_laid_out(flat):
        return flat.layout
    strided = torch.strided
    entries: list[_Entry] = []
    for key, value in flat.items():
        if value is None:
            entries.append((key, None, ()))
        # is_plain(value), without the cost of a call for each field
        elif type(value) is not Tensor or value.layout is not strided:
            raise ValueError(refusal(key, value))
        else:
            try:
                entries.append((key, value.dtype, value.shape))
            except RuntimeError:  # a nested tensor has no shape
                raise ValueError(refusal(key, value)) from None
    return _layout_of(tuple(entries))


@lru_cache(_CACHED_LAYOUTS)
def _layout_of(entries: tuple[_Entry, ...]) -> SampleLayout:
    found = {entry[0]: entry for entry in entries}
    by_key = [found[key] for key in sorted_keys(tuple(found))]
    schema = _schema_of(tuple([(key, dtype, len(shape)) for key, dtype, shape in by_key]))
    return SampleLayout.of(schema, tuple(chain.from_iterable([shape for _, _, shape in by_key])))


@lru_cache(_CACHED_SCHEMAS)
def _schema_of(entries: tuple[tuple[str, torch.dtype | None, int], ...]) -> SampleSchema:
    for key, dtype, _ in entries:
        if dtype is not None and dtype not in DTYPE_CODES:
            raise ValueError(dtype_refusal(key, dtype))
    fields = [FieldSpec(key, dtype, ndim) for key, dtype, ndim in entries if dtype is not None]
    none_keys = tuple([key for key, dtype, _ in entries if dtype is None])
    return interned(SampleSchema(tuple(fields), none_keys))


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Tell whether ``value`` is exactly a dense tensor: no subclass, not sparse, not nested."""
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested


def is_supported(value: object) -> TypeGuard[Tensor]:
    """Tell whether ``value`` can be the tensor of a field; :func:`refusal` says why not."""
    return is_plain(value) and value.dtype in DTYPE_CODES and value.ndim <= MAX_NDIM


def refusal(key: str, value: object) -> str:
    """Return why ``value`` cannot be the tensor of a field, naming the key and a remedy."""
    if not isinstance(value, Tensor):
        return (
            f"field {key!r} is a {type(value).__name__}, not a tensor or None; "
            "put plain values into one field with fold_values(flat)"
        )
    if type(value) is not Tensor:
        return (
            f"field {key!r} is a {type(value).__name__}, which would come back as a plain tensor; "
            "convert it with .detach() or .as_subclass(torch.Tensor)"
        )
    if value.is_nested:
        return f"field {key!r} is a nested tensor; send its values and offsets as two fields"
    if value.layout is not torch.strided:
        return (
            f"field {key!r} is a sparse tensor of layout {value.layout}; send its indices and "
            "values as fields, or tensor.to_dense()"
        )
    if value.dtype in DTYPE_CODES:
        return ndim_refusal(key, value.dim())
    return dtype_refusal(key, value.dtype)


def meta_refusal(key: str) -> str:
    """Return why a tensor without data cannot be copied, naming the key and a remedy."""
    return (
        f"field {key!r} is on the meta device and has no data; it has a layout and metadata, but "
        "bytes only where it is materialized"
    )


def dtype_refusal(key: str, dtype: torch.dtype) -> str:
    """Return why a tensor of ``dtype`` cannot be a field, naming the key and a remedy."""
    remedy = REFUSED_DTYPES.get(dtype, f"supported are {supported_names()}")
    return f"field {key!r} has the unsupported dtype {dtype}; {remedy}"
