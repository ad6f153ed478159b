"""Whether samples of many ranks can be joined, told from their metadata before any bytes move."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
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


class _Owner(NamedTuple):
    """A sample, or all samples of one schema, as it is compared with others.

    Attributes:
        name: What to call it in an error.
        lacks: The same with its verb, for a field that is missing.
        fields: Its fields by key.
        show: Describes one of them, as far as it must agree.
    """

    name: str
    lacks: str
    fields: Mapping[str, _Field]
    show: Callable[[_Field], str]


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

    def owner(index: int) -> _Owner:
        name = f"sample {index}" if names is None else names[index]
        fields = _fields_of(layout, samples[index].schema)[0]
        return _Owner(name, f"{name} lacks", fields, partial(_shown, samples[index]))

    _compare([owner(index) for index in distinct.values()])


def check_schemas(layout: BatchLayout, schemas: Sequence[Sequence[SampleSchema]]) -> None:
    """Raise unless samples of all these schemas can be merged, as far as a schema tells.

    Args:
        layout: The form of the micro-batches.
        schemas: By rank, those of its samples. All ranks know them, so all raise the same, even
            where no sample moves and the difference would not show.

    Raises:
        ValueError: If a field's dtype, number of dims or presence differs, naming it and two ranks.
    """
    owners: dict[int, _Owner] = {}  # the first rank that has each schema, by the schema's object
    for rank, found in enumerate(schemas):
        for schema in found:
            if id(schema) not in owners:
                fields = _fields_of(layout, schema)[0]
                name = f"rank {rank}"
                owners[id(schema)] = _Owner(name, f"samples of {name} lack", fields, _kind)
    _compare(owners.values())


def _compare(owners: Collection[_Owner]) -> None:
    """Raise if a field looks different in two owners, or one lacks a field that it must have."""
    if len(owners) < 2:
        return
    firsts: dict[str, tuple[_Owner, _Field]] = {}
    for owner in owners:
        for key, field in owner.fields.items():
            first, expected = firsts.setdefault(key, (owner, field))
            found, wanted = owner.show(field), first.show(expected)
            if found != wanted:
                remedy = ""
                if field.may_pad and (field.dtype, field.ndim) == (expected.dtype, expected.ndim):
                    remedy = (
                        " If the loader pads each micro-batch to its longest sample, pass "
                        "layout=BatchLayout(fields=padded_text(pad_token_id=...))."
                    )
                raise ValueError(
                    f"field {key!r}: {owner.name} has {found}, {first.name} {wanted}.{remedy}"
                )
    for key, (first, field) in firsts.items():
        for owner in owners:
            if not field.may_lack and key not in owner.fields:
                raise ValueError(
                    f"field {key!r}: {owner.lacks} it, and {first.name} has it; only ragged fields "
                    "may be missing, where a sample has no rows."
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
