"""Whether samples of many ranks can be joined, told from their metadata before any bytes move."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from evenstep.reorder_buffer.field_kinds import Batched, Items, Ragged
from evenstep.reorder_buffer.layout import BatchLayout
from evenstep.serialize import VALUES_KEY, SampleLayout, SampleSchema

__all__ = ["check_agreement", "check_schemas"]


class _Field(NamedTuple):
    """What samples must agree about in one field, and where its fixed sizes stand in ``dims``."""

    key: str
    dtype: torch.dtype | None  # None of a field that is None
    ndim: int
    fixed: tuple[int, ...]
    may_lack: bool
    may_pad: bool  # its sizes might differ because the loader pads


_Sizes: TypeAlias = tuple[int, ...]


def check_agreement(
    layout: BatchLayout, samples: Sequence[SampleLayout], names: Sequence[str] | None = None
) -> None:
    """Raise unless all ``samples`` can be merged to one micro-batch, as far as metadata tells.

    All ranks that call it with the same samples decide alike. Plain values are not seen here: that
    those which samples share are equal is checked where they are merged.

    Args:
        layout: The form of the micro-batches.
        samples: Metadata of the samples after ``fold_values``.
        names: What to call each sample in an error, such as ``rank 3, sample 5``; by default its
            position.

    Raises:
        ValueError: If a field's dtype, number of dims, sizes other than of its batch or ragged
            dim, or presence differs between samples, naming the field and two samples.
    """
    # Few schemas and sizes repeat over many samples; only the first of each kind is compared.
    # A schema is told by its object, because hashing one takes a while.
    schemas = {id(sample.schema): sample.schema for sample in samples}
    fixed_of = {key: _fields_of(layout, schema)[1] for key, schema in schemas.items()}
    distinct: dict[tuple[int, _Sizes], int] = {}
    for index, sample in enumerate(samples):
        schema_id, dims = id(sample.schema), sample.dims
        distinct.setdefault((schema_id, tuple([dims[i] for i in fixed_of[schema_id]])), index)

    def name(index: int) -> str:
        return f"sample {index}" if names is None else names[index]

    firsts: dict[str, tuple[int, _Field]] = {}
    for index in distinct.values():
        for key, field in _fields_of(layout, samples[index].schema)[0].items():
            first, expected = firsts.setdefault(key, (index, field))
            found, wanted = _shown(samples[index], field), _shown(samples[first], expected)
            if found != wanted:
                remedy = ""
                if field.may_pad and (field.dtype, field.ndim) == (expected.dtype, expected.ndim):
                    remedy = (
                        " If the loader pads each micro-batch to its longest sample, pass "
                        "layout=BatchLayout(fields=padded_text(pad_token_id=...))."
                    )
                raise ValueError(
                    f"field {key!r}: {name(index)} has {found}, {name(first)} {wanted}.{remedy}"
                )
    for key, (first, field) in firsts.items():
        for index in distinct.values():
            if not field.may_lack and key not in _fields_of(layout, samples[index].schema)[0]:
                raise ValueError(
                    f"field {key!r}: {name(index)} lacks it, and {name(first)} has it; only ragged "
                    "fields may be missing, where a sample has no rows."
                )


def check_schemas(layout: BatchLayout, schemas: Sequence[Sequence[SampleSchema]]) -> None:
    """Raise unless samples of all these schemas can be merged, as far as a schema tells.

    Args:
        layout: The form of the micro-batches.
        schemas: By rank, those of its samples. All ranks know them, so all raise the same, even
            where no sample moves and the difference would not show.

    Raises:
        ValueError: If a field's dtype, number of dims or presence differs, naming it and two ranks.
    """
    ranks: dict[int, int] = {}  # the first that has each
    for rank, found in enumerate(schemas):
        for schema in found:
            ranks.setdefault(id(schema), rank)
    distinct = {id(schema): schema for found in schemas for schema in found}
    fields_of = {key: _fields_of(layout, schema)[0] for key, schema in distinct.items()}
    firsts: dict[str, tuple[int, _Field]] = {}
    for schema_id, fields in fields_of.items():
        for key, field in fields.items():
            first, expected = firsts.setdefault(key, (schema_id, field))
            if (field.dtype, field.ndim) != (expected.dtype, expected.ndim):
                raise ValueError(
                    f"field {key!r}: rank {ranks[schema_id]} has {_kind(field)}, rank "
                    f"{ranks[first]} {_kind(expected)}."
                )
    for key, (first, field) in firsts.items():
        for schema_id, fields in fields_of.items():
            if not field.may_lack and key not in fields:
                raise ValueError(
                    f"field {key!r}: samples of rank {ranks[schema_id]} lack it, and rank "
                    f"{ranks[first]} has it; only ragged fields may be missing, where a sample has "
                    "no rows."
                )


@lru_cache(256)
def _fields_of(layout: BatchLayout, schema: SampleSchema) -> tuple[dict[str, _Field], _Sizes]:
    """Return what must agree per field of a schema, and where ``dims`` holds all fixed sizes."""
    fields = {}
    for key in schema.none_keys:
        may_lack = isinstance(layout.kind_of_dims(key, None), Items | Ragged)
        fields[key] = _Field(key, None, 0, (), may_lack, may_pad=False)
    ends = accumulate([spec.ndim for spec in schema.fields], initial=0)
    for start, spec in zip(ends, schema.fields, strict=False):
        if spec.key == VALUES_KEY:
            continue  # plain values in one field, of any length
        kind = layout.kind_of_dims(spec.key, spec.ndim)
        free = set()
        if spec.ndim and isinstance(kind, Batched):
            free = {kind.dim % spec.ndim, *([spec.ndim - 1] if kind.pad is not None else [])}
        elif spec.ndim and isinstance(kind, Items | Ragged):
            free = {0}
        fields[spec.key] = _Field(
            spec.key,
            spec.dtype,
            spec.ndim,
            tuple([start + dim for dim in range(spec.ndim) if dim not in free]),
            may_lack=isinstance(kind, Items | Ragged),
            may_pad=isinstance(kind, Batched) and kind.pad is None and spec.ndim > 1,
        )
    return fields, tuple([place for field in fields.values() for place in field.fixed])


def _shown(sample: SampleLayout, field: _Field) -> str:
    if field.dtype is None:
        return _kind(field)
    sizes = [sample.dims[place] for place in field.fixed]
    return f"{_kind(field)} with sizes {sizes} besides its own rows"


def _kind(field: _Field) -> str:
    return "None" if field.dtype is None else f"a {field.dtype} tensor of {field.ndim} dims"
