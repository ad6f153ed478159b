"""Whether the samples of all ranks fit together, and which field it is if they do not."""

from collections.abc import Collection, Sequence

from evenstep.exchange.errors import MismatchError
from evenstep.serialize import VALUES_KEY, SampleSchema


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
    for rank, found in enumerate(schemas):
        for kinds in sorted(_kinds(schema) for schema in {*found}):
            if first is None:
                first, first_rank = dict(kinds), rank
            elif dict(kinds) != first:
                raise MismatchError(_difference(first, first_rank, dict(kinds), rank))


def _kinds(schema: SampleSchema) -> list[tuple[str, str]]:
    kinds = {spec.key: f"{spec.ndim}-dim {spec.dtype}" for spec in schema.fields}
    kinds |= dict.fromkeys(schema.none_keys, "None")
    kinds.pop(VALUES_KEY, None)
    return sorted(kinds.items())


def _difference(first: dict[str, str], first_rank: int, other: dict[str, str], rank: int) -> str:
    key = min(key for key in {*first, *other} if first.get(key) != other.get(key))
    return (
        f"samples must have the same fields, but field {key!r} is {first.get(key, 'missing')} on "
        f"rank {first_rank} and {other.get(key, 'missing')} on rank {rank}; give every sample the "
        "field, empty where it has nothing"
    )
