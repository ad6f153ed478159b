"""The schemas of all ranks' samples: decoded once, and compared where they must be the same."""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

from evenstep.exchange.errors import MismatchError
from evenstep.serialize import VALUES_KEY, SampleLayout, SampleSchema


class KnownSchema(NamedTuple):
    """A schema that arrived.

    Attributes:
        schema: The schema.
        layout: `schema.decode_dims`, with a memory: shapes repeat too.
    """

    schema: SampleSchema
    layout: Callable[[bytes], SampleLayout]


@lru_cache(1024)
def known_schema(data: bytes) -> KnownSchema:
    """Return one and the same object for the same encoded schema, whichever rank it is from.

    Raises:
        DecodeError: If the bytes are no schema.
    """
    schema = SampleSchema.decode(data)
    return KnownSchema(schema, lru_cache(1024)(schema.decode_dims))


def check_same_schema(schemas: Sequence[Collection[SampleSchema]]) -> None:
    """Check that all samples have the same keys, dtypes and numbers of dimensions.

    Args:
        schemas: For each rank, the schemas of its samples. The field for plain values is left
            out of the comparison.

    Raises:
        MismatchError: Naming the first field that differs, the ranks and both kinds.
    """
    first: dict[str, str] | None = None
    first_rank = 0
    seen: set[int] = set()  # objects: as a rule, all ranks' samples have one and the same schema
    for rank, found in enumerate(schemas):
        for schema in found:
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            kinds = _kinds(schema)
            if first is None:
                first, first_rank = kinds, rank
            elif kinds != first:
                raise MismatchError(_difference(first, first_rank, kinds, rank))


def _kinds(schema: SampleSchema) -> dict[str, str]:
    kinds = {spec.key: f"{spec.ndim}-dim {spec.dtype}" for spec in schema.fields}
    kinds |= dict.fromkeys(schema.none_keys, "None")
    kinds.pop(VALUES_KEY, None)
    return kinds


def _difference(first: dict[str, str], first_rank: int, other: dict[str, str], rank: int) -> str:
    key = min(key for key in {*first, *other} if first.get(key) != other.get(key))
    return (
        f"samples must have the same fields, but field {key!r} is {first.get(key, 'missing')} on "
        f"rank {first_rank} and {other.get(key, 'missing')} on rank {rank}; give every sample the "
        "field, empty where it has nothing"
    )
