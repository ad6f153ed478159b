"""An offer's bytes in a control message: at most some 40 of them per sample.

All integers are little-endian::

    head     exhausted u8, costs per sample u8, 0 u16, slots u32, samples u32, new schemas u32,
             schemas announced before u32, bytes of the note u32
    note     the caller's
    slots    samples per slot u32 each
    costs    float64 each, sample by sample
    sizes    serialized bytes of each sample, int64
    schema   number of each sample's schema in this rank's table, u16
    lengths  bytes of each sample's shapes, u16
    schemas  of each new schema: its length u32, its bytes
    shapes   of each sample: all sizes as varints

A rank announces a schema once; peers keep a table for each rank. Shapes are decoded only for the
samples that a rank receives.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from evenstep.exchange.errors import ProtocolError
from evenstep.exchange.offer import Offer, RankReport
from evenstep.exchange.schemas import KnownSchema, known_schema
from evenstep.serialize import DecodeError, SampleLayout, SampleSchema

Values = TypeVar("Values", "array[int]", "array[float]")

_HEAD = struct.Struct("<BBHIIIII")
_LENGTH = struct.Struct("<I")
_MAX_SCHEMAS = 1 << 16


class SchemaAnnouncer:
    """This rank's table of schemas, and how many of them its peers know already."""

    def __init__(self) -> None:
        self._numbers: dict[SampleSchema, int] = {}
        self._announced = 0

    def encode(self, offer: Offer, layouts: Sequence[SampleLayout]) -> bytes:
        """Return the offer's bytes, new schemas included.

        Raises:
            ValueError: If a cost is invalid, or there are more than 65,536 schemas.
        """
        num_costs, costs = offer.cost_columns()
        schemas = self._number_schemas(layouts)
        new = [schema.encode() for schema in [*self._numbers][self._announced :]]
        distinct = {id(layout): layout for layout in layouts}  # `sample_layout` repeats objects
        encoded = {key: layout.encode_dims() for key, layout in distinct.items()}
        shapes = [encoded[id(layout)] for layout in layouts]
        head = _HEAD.pack(
            offer.exhausted,
            num_costs,
            0,
            len(offer.slot_counts),
            len(layouts),
            len(new),
            self._announced,
            len(offer.note),
        )
        return b"".join(
            [
                head,
                offer.note,
                _little(array("I", offer.slot_counts)),
                _little(costs),
                _little(array("q", [layout.nbytes for layout in layouts])),
                _little(schemas),
                _little(_lengths(shapes)),
                *(_LENGTH.pack(len(schema)) + schema for schema in new),
                *shapes,
            ]
        )

    def mark_announced(self) -> None:
        """Note that the peers have heard of every schema so far."""
        self._announced = len(self._numbers)

    def _number_schemas(self, layouts: Sequence[SampleLayout]) -> "array[int]":
        # Hashing a schema takes a while, and most layouts share theirs.
        schemas = {id(layout.schema): layout.schema for layout in layouts}
        numbers = {key: self._number(schema) for key, schema in schemas.items()}
        return array("H", [numbers[id(layout.schema)] for layout in layouts])

    def _number(self, schema: SampleSchema) -> int:
        number = self._numbers.setdefault(schema, len(self._numbers))
        if number == _MAX_SCHEMAS:
            del self._numbers[schema]
            raise ValueError(
                f"samples have more than {_MAX_SCHEMAS} different sets of keys and types; use the "
                "same keys in every sample"
            )
        return number


class SchemaTable:
    """The schemas that one peer has announced."""

    def __init__(self) -> None:
        self._known: list[KnownSchema] = []

    def decode(self, message: memoryview, rank: int) -> RankReport:
        """Return the report in `rank`'s message.

        Raises:
            ProtocolError: If the message is damaged; every rank sees the same bytes.
        """
        reader = _Reader(message, rank)
        head = reader.unpack(_HEAD)
        exhausted, num_costs, _, num_slots, num_samples, num_new, known, note_nbytes = head
        note = bytes(reader.take(note_nbytes))
        slot_counts = reader.integers("I", num_slots)
        costs = reader.floats(num_samples * num_costs)
        nbytes = reader.integers("q", num_samples)
        numbers = reader.integers("H", num_samples)
        lengths = reader.integers("H", num_samples)
        if known != len(self._known) or sum(slot_counts) != num_samples:
            raise ProtocolError(
                f"rank {rank} counts {known} schemas and {sum(slot_counts)} samples where this "
                f"rank has {len(self._known)} and {num_samples}"
            )
        if num_costs == 0 or (nbytes and min(nbytes) < 0):
            raise ProtocolError(f"rank {rank} offers samples without a cost or of negative size")
        for _ in range(num_new):
            (length,) = reader.unpack(_LENGTH)
            self._known.append(_decoded(bytes(reader.take(length)), rank))
        used = {*numbers}
        if used and max(used) >= len(self._known):
            raise ProtocolError(f"rank {rank} uses a schema that it never announced")
        shapes = _Shapes(rank, self._known, nbytes, numbers, lengths, reader.rest())
        return RankReport(
            slot_counts=tuple(slot_counts),
            num_costs=num_costs,
            costs=costs,
            nbytes=nbytes,
            exhausted=bool(exhausted),
            note=note,
            schemas=tuple(self._known[number].schema for number in sorted(used)),
            layout=shapes.layout,
        )


class _Shapes:
    """The undecoded shapes of one rank's samples."""

    def __init__(
        self,
        rank: int,
        known: list[KnownSchema],
        nbytes: "array[int]",
        numbers: "array[int]",
        lengths: "array[int]",
        data: memoryview,
    ) -> None:
        self._rank, self._known = rank, known
        self._nbytes, self._numbers, self._data = nbytes, numbers, data
        self._lengths = lengths
        if sum(lengths) != len(data):
            raise ProtocolError(
                f"the shapes of rank {rank} take {len(data)} bytes, not {sum(lengths)}"
            )

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self._lengths)]

    def layout(self, local: int) -> SampleLayout:
        data = self._data[self._starts[local] : self._starts[local + 1]]
        try:
            layout = self._known[self._numbers[local]].layout(bytes(data))
        except DecodeError as error:
            raise ProtocolError(f"shapes of sample {local} of rank {self._rank}: {error}") from None
        if layout.nbytes != self._nbytes[local]:
            raise ProtocolError(
                f"sample {local} of rank {self._rank} takes {layout.nbytes} bytes by its shapes, "
                f"and {self._nbytes[local]} by its size"
            )
        return layout


class _Reader:
    """Takes sections from a message, none longer than what is left of it."""

    def __init__(self, data: memoryview, rank: int) -> None:
        self._data, self._rank = data, rank

    def take(self, nbytes: int) -> memoryview:
        if nbytes > len(self._data):
            raise ProtocolError(
                f"the offer of rank {self._rank} ends {nbytes - len(self._data)} bytes early"
            )
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        return taken

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))

    def integers(self, typecode: str, length: int) -> "array[int]":
        return self._fill(array(typecode), length)

    def floats(self, length: int) -> "array[float]":
        return self._fill(array("d"), length)

    def _fill(self, values: Values, length: int) -> Values:
        values.frombytes(self.take(length * values.itemsize))
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def rest(self) -> memoryview:
        return self._data


def _little(values: "array[int] | array[float]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _lengths(shapes: Sequence[bytes]) -> "array[int]":
    try:
        return array("H", map(len, shapes))
    except OverflowError:
        index = max(range(len(shapes)), key=lambda index: len(shapes[index]))
        raise ValueError(
            f"the shapes of sample {index} take {len(shapes[index])} bytes and at most 65535 fit; "
            "join tensors of the sample that belong together"
        ) from None


def _decoded(data: bytes, rank: int) -> KnownSchema:
    try:
        return known_schema(data)
    except DecodeError as error:
        raise ProtocolError(f"a schema of rank {rank} is damaged: {error}") from None
