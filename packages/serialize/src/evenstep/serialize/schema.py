"""What samples have in common, the schema, and where a sample's bytes lie, the layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch

from evenstep.serialize.dtypes import DTYPE_CODES, DTYPES, supported_names
from evenstep.serialize.errors import DecodeError
from evenstep.serialize.limits import MAX_FIELDS, MAX_KEY_BYTES, MAX_NDIM, ndim_refusal
from evenstep.serialize.placement import PlacedField, place_fields
from evenstep.serialize.wire import Reader, write_text, write_varint

_TOO_MANY_KEYS = f"sample has more than {MAX_FIELDS} keys; nest values in one tensor"


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One tensor of a sample, without its sizes.

    Attributes:
        key: The flat key.
        dtype: A supported dtype.
        ndim: The number of dimensions.

    Raises:
        ValueError: If the key is not encodable, the dtype is not supported, or there are too many
            dimensions.
    """

    key: str
    dtype: torch.dtype
    ndim: int

    def __post_init__(self) -> None:
        check_key(self.key)
        if self.dtype not in DTYPE_CODES:
            raise ValueError(
                f"field {self.key!r} has dtype {self.dtype}; supported are {supported_names()}"
            )
        if not 0 <= self.ndim <= MAX_NDIM:
            raise ValueError(ndim_refusal(self.key, self.ndim))


@dataclass(frozen=True, slots=True)
class SampleSchema:
    """The keys of a sample, each with a tensor's type or ``None``.

    Attributes:
        fields: The tensors, sorted by key (by Unicode code point, as ``sorted`` does).
        none_keys: The keys whose value is ``None``, sorted.
        places: By key, the index in ``fields``, and ``None`` for each of ``none_keys``.
        keys: Those of the tensors, sorted.

    Raises:
        ValueError: If the keys are not sorted, one occurs twice, or there are more than
            ``MAX_FIELDS``.
    """

    fields: tuple[FieldSpec, ...]
    none_keys: tuple[str, ...] = ()
    places: Mapping[str, int | None] = field(init=False, compare=False, repr=False)
    keys: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        field_keys = tuple([spec.key for spec in self.fields])
        _check_increasing(field_keys)
        for key in self.none_keys:
            check_key(key)
        _check_increasing(self.none_keys)
        both = set(field_keys).intersection(self.none_keys)
        if both:
            raise ValueError(f"key {min(both)!r} is both a tensor and None")
        if len(field_keys) + len(self.none_keys) > MAX_FIELDS:
            raise ValueError(_TOO_MANY_KEYS)
        places: dict[str, int | None] = {key: i for i, key in enumerate(field_keys)}
        places.update(dict.fromkeys(self.none_keys))
        object.__setattr__(self, "keys", field_keys)
        object.__setattr__(self, "places", places)

    @property
    def num_dims(self) -> int:
        """How many sizes a sample of this schema has, over all fields."""
        return sum([spec.ndim for spec in self.fields])

    def layout(self, dims: Sequence[int]) -> "SampleLayout":
        """Return the layout of a sample whose shapes, end to end in field order, are ``dims``.

        Raises:
            ValueError: If there are not ``num_dims`` sizes, one is negative, or the sample would
                be larger than ``MAX_NBYTES``.
        """
        return SampleLayout.of(self, tuple(dims))

    def decode_dims(self, data: bytes) -> "SampleLayout":
        """Return the layout whose :meth:`SampleLayout.encode_dims` is ``data``.

        Raises:
            DecodeError: If ``data`` is not exactly ``num_dims`` varints, or the sizes are not
                those of a sample (see :meth:`layout`).
        """
        reader = Reader(data, "dims")
        dims = self.read_dims(reader)
        reader.finish()
        return self.layout_of_input(dims)

    def read_dims(self, reader: Reader) -> tuple[int, ...]:
        """Read ``num_dims`` varints; a few bytes cannot ask for many."""
        return tuple([reader.varint() for _ in range(self.num_dims)])

    def layout_of_input(self, dims: tuple[int, ...]) -> "SampleLayout":
        """Return :meth:`layout` of sizes that came from outside.

        Raises:
            DecodeError: Where :meth:`layout` raises ``ValueError``.
        """
        try:
            return self.layout(dims)
        except ValueError as error:
            raise DecodeError(f"dims: {error}") from None

    def encode(self) -> bytes:
        """Return this schema as bytes, the same for equal schemas (``FORMAT.md``, "Schema")."""
        out = bytearray()
        write_varint(out, len(self.fields))
        for spec in self.fields:
            write_text(out, spec.key)
            out += bytes((DTYPE_CODES[spec.dtype], spec.ndim))
        write_varint(out, len(self.none_keys))
        for key in self.none_keys:
            write_text(out, key)
        return bytes(out)

    @classmethod
    def decode(cls, data: bytes) -> "SampleSchema":
        """Return the schema whose :meth:`encode` is ``data``.

        Raises:
            DecodeError: If there is none.
        """
        reader = Reader(data, "schema")
        num_fields = reader.count(3, MAX_FIELDS, "fields")
        fields = tuple([_read_field(reader) for _ in range(num_fields)])
        num_none = reader.count(1, MAX_FIELDS, "None keys")
        none_keys = tuple([reader.text(MAX_KEY_BYTES) for _ in range(num_none)])
        reader.finish()
        try:
            return interned(cls(fields, none_keys))
        except ValueError as error:
            raise DecodeError(f"schema: {error}") from None


@lru_cache(256)
def interned(schema: SampleSchema) -> SampleSchema:
    """Return one object for all equal schemas of late, so that they can be told by it."""
    return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLayout:
    """A schema with sizes: where each field of a sample lies.

    Fields lie in key order, each at a multiple of ``ALIGNMENT`` bytes, so schema and sizes
    determine all the rest. Made by :meth:`SampleSchema.layout` and :func:`sample_layout`.

    Attributes:
        schema: Keys and types.
        dims: All shapes end to end, in field order.
        placed: The fields with their places.
        nbytes: Bytes of the sample, padding included; a multiple of ``ALIGNMENT``.
    """

    schema: SampleSchema
    dims: tuple[int, ...]
    placed: tuple[PlacedField, ...] = field(compare=False, repr=False)
    nbytes: int = field(compare=False)

    @classmethod
    def of(cls, schema: SampleSchema, dims: tuple[int, ...]) -> "SampleLayout":
        """Return the layout of ``schema`` with ``dims`` (see :meth:`SampleSchema.layout`)."""
        if len(dims) != schema.num_dims:
            raise ValueError(f"{len(dims)} sizes given for a schema of {schema.num_dims}")
        entries = []
        end = 0
        for spec in schema.fields:
            start, end = end, end + spec.ndim
            entries.append((spec.key, spec.dtype, dims[start:end]))
        placed, nbytes = place_fields(entries)
        return cls(schema=schema, dims=dims, placed=placed, nbytes=nbytes)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """One shape per field."""
        return tuple([spec.shape for spec in self.placed])

    @property
    def offsets(self) -> tuple[int, ...]:
        """One byte offset per field, from the start of the sample."""
        return tuple([spec.offset for spec in self.placed])

    def encode_dims(self) -> bytes:
        """Return ``dims`` as varints, one after the other; ``schema.decode_dims`` reads them."""
        out = bytearray()
        for size in self.dims:
            write_varint(out, size)
        return bytes(out)


def _read_field(reader: Reader) -> FieldSpec:
    key = reader.text(MAX_KEY_BYTES)
    return FieldSpec(key, read_dtype(reader), read_ndim(reader))


def read_dtype(reader: Reader) -> torch.dtype:
    """Read the code of a dtype."""
    code = reader.byte()
    if code not in DTYPES:
        raise reader.error(f"dtype code {code} is unknown to torch {torch.__version__}")
    return DTYPES[code]


def read_ndim(reader: Reader) -> int:
    """Read a number of dimensions."""
    ndim = reader.byte()
    if ndim > MAX_NDIM:
        raise reader.error(f"{ndim} dimensions declared, at most {MAX_NDIM} are allowed")
    return ndim


def check_key(key: str, where: str = "") -> None:
    """Check that ``key`` can be encoded; ``where`` is the path of its dict, for the message.

    Raises:
        ValueError: If it is not a ``str``, has a lone surrogate or is too long.
    """
    at = f" of {where!r}" if where else ""
    if type(key) is not str:
        raise ValueError(f"key {key!r}{at} is of type {type(key).__name__}; keys must be str")
    try:
        nbytes = len(key.encode())
    except UnicodeEncodeError:
        raise ValueError(
            f"key {key!r}{at} has a lone surrogate, which UTF-8 cannot encode"
        ) from None
    if nbytes > MAX_KEY_BYTES:
        raise ValueError(f"key {key[:40]!r}...{at} has {nbytes} bytes, at most {MAX_KEY_BYTES} fit")


@lru_cache(256)
def sorted_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of a sample in the order in which its tensors lie.

    Raises:
        ValueError: If there are too many, or one cannot be encoded.
    """
    for key in keys:
        check_key(key)
    if len(keys) > MAX_FIELDS:
        raise ValueError(_TOO_MANY_KEYS)
    return tuple(sorted(keys))


def _check_increasing(keys: tuple[str, ...]) -> None:
    for before, after in pairwise(keys):
        if before >= after:
            raise ValueError(f"key {after!r} follows {before!r}; keys must be sorted and unique")
