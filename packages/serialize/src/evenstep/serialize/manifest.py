"""The manifest of many samples in one buffer: each schema once, then the sizes of each sample."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from evenstep.serialize.dtypes import ALIGNMENT
from evenstep.serialize.errors import DecodeError
from evenstep.serialize.limits import MAX_NBYTES
from evenstep.serialize.schema import SampleLayout, SampleSchema
from evenstep.serialize.wire import Reader, write_varint

MAX_SAMPLES = 2**24
"""Samples of one manifest."""

_VERSION = 1
_CRC_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Manifest:
    """Where the samples of a buffer lie: end to end, in order.

    Attributes:
        layouts: The layout of each sample.
        offsets: The first byte of each sample, then the bytes of all: ``len(layouts) + 1``.

    Raises:
        ValueError: If there are more than ``MAX_SAMPLES``, or the samples are larger than
            ``MAX_NBYTES`` together.
    """

    layouts: tuple[SampleLayout, ...]
    offsets: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.layouts) > MAX_SAMPLES:
            raise ValueError(f"{len(self.layouts)} samples, at most {MAX_SAMPLES} are supported")
        ends = accumulate([layout.nbytes for layout in self.layouts], initial=0)
        object.__setattr__(self, "offsets", tuple(ends))
        if self.nbytes > MAX_NBYTES:
            raise ValueError(f"samples of {self.nbytes} bytes exceed {MAX_NBYTES} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.offsets[-1]

    def encode(self) -> bytes:
        """Return the manifest as bytes (``FORMAT.md``, "Manifest"); equal ones give equal bytes."""
        schemas = {layout.schema: None for layout in self.layouts}
        numbers = {schema: number for number, schema in enumerate(schemas)}
        out = bytearray([_VERSION])
        write_varint(out, len(numbers))
        for schema in numbers:
            data = schema.encode()
            write_varint(out, len(data))
            out += data
        write_varint(out, len(self.layouts))
        for layout in self.layouts:
            write_varint(out, numbers[layout.schema])
            out += layout.encode_dims()
        return bytes(out + zlib.crc32(out).to_bytes(_CRC_NBYTES, "little"))

    @classmethod
    def decode(cls, data: bytes, *, max_nbytes: int) -> "Manifest":
        """Return the manifest whose :meth:`encode` is ``data``.

        Args:
            data: The bytes.
            max_nbytes: The bytes of the buffer that came with it, or the most to accept. A few
                bytes of manifest can declare many scalar fields, but each has bytes in the buffer.

        Raises:
            DecodeError: If there is none, or its samples take more than ``max_nbytes``.
        """
        content, checksum = data[:-_CRC_NBYTES], data[-_CRC_NBYTES:]
        if zlib.crc32(content).to_bytes(_CRC_NBYTES, "little") != checksum:
            raise DecodeError("manifest does not match its checksum; it is damaged or truncated")
        reader = Reader(content, "manifest")
        version = reader.byte()
        if version != _VERSION:
            raise reader.error(f"format version {version}; this package reads {_VERSION}")
        num_schemas = reader.count(3, MAX_SAMPLES, "schemas")
        schemas = [SampleSchema.decode(reader.take(reader.varint())) for _ in range(num_schemas)]
        if len(set(schemas)) != num_schemas:
            raise reader.error("a schema is there twice")
        layouts = _read_layouts(reader, schemas, max_nbytes)
        reader.finish()
        return cls(tuple(layouts))


def _read_layouts(
    reader: Reader, schemas: Sequence[SampleSchema], max_nbytes: int
) -> list[SampleLayout]:
    """Read the layout of each sample, never more than fit in ``max_nbytes``."""
    least_nbytes = [_least_nbytes(schema) for schema in schemas]
    layouts: list[SampleLayout] = []
    known: dict[tuple[int, tuple[int, ...]], SampleLayout] = {}
    unseen = 0
    nbytes = 0
    for _ in range(reader.count(1, MAX_SAMPLES, "samples")):
        number = reader.varint()
        # Schemas are numbered as they occur, so that equal manifests have equal bytes.
        if number > unseen or number >= len(schemas):
            raise reader.error(f"schema {number} of {len(schemas)} comes before {unseen}")
        unseen = max(unseen, number + 1)
        dims = schemas[number].read_dims(reader)
        if (layout := known.get((number, dims))) is None:
            if nbytes + least_nbytes[number] > max_nbytes:
                raise reader.error(f"sample {len(layouts)} exceeds the {max_nbytes} bytes allowed")
            layout = known[number, dims] = schemas[number].layout_of_input(dims)
        nbytes += layout.nbytes
        if nbytes > max_nbytes:
            raise reader.error(f"sample {len(layouts)} exceeds the {max_nbytes} bytes allowed")
        layouts.append(layout)
    if unseen != len(schemas):
        raise reader.error(f"schema {unseen} has no sample")
    return layouts


def _least_nbytes(schema: SampleSchema) -> int:
    """Return the bytes that every sample of the schema has: its scalars."""
    return ALIGNMENT * sum([spec.ndim == 0 for spec in schema.fields])
