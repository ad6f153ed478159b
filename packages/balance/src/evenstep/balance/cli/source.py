"""Where numbers come from: a file or a pipe, its format, and how much of it has been read."""

import io
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.balance.cli.errors import InputError, UsageError
from evenstep.balance.cli.records import (
    Record,
    csv_records,
    jsonl_records,
    line_records,
    parquet_records,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Advance = Callable[[int], None]
"""Called with the number of bytes that were just read."""

_STANDARD_INPUT = Path("-")
_CHUNK_BYTES = 1 << 20


class Format(StrEnum):
    """How the numbers are written."""

    AUTO = "auto"
    LINES = "lines"
    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"


_BY_SUFFIX = {
    ".csv": Format.CSV,
    ".tsv": Format.CSV,
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file or the standard input, and which of its numbers are meant.

    Attributes:
        path: The file; `-` is the standard input.
        format: How the numbers are written; AUTO goes by the file's name and the options.
        column: Column of a CSV or Parquet file: a name, or a position from 1.
        key: Key of a JSON object; dots lead into nested objects.
    """

    path: Path
    format: Format = Format.AUTO
    column: str | None = None
    key: str | None = None

    @property
    def name(self) -> str:
        """What to call the source in messages."""
        return "standard input" if self.path == _STANDARD_INPUT else str(self.path)

    def check(self) -> None:
        """Raise if there is nothing to read.

        Raises:
            UsageError: The file is missing or a directory, or the standard input is a terminal.
        """
        if self.path == _STANDARD_INPUT:
            if sys.stdin.isatty():
                raise UsageError("pipe numbers into the command, or name a file")
        elif not self.path.exists() or self.path.is_dir():
            raise UsageError(f"{self.path} is not a file")

    def detected_format(self) -> Format:
        """Return the format, decided by the option, the file's name, or the column or key."""
        if self.format is not Format.AUTO:
            return self.format
        if by_suffix := _BY_SUFFIX.get(self.path.suffix.lower()):
            return by_suffix
        if self.key is not None:
            return Format.JSONL
        return Format.LINES if self.column is None else Format.CSV

    def size_bytes(self) -> int | None:
        """Return the size of the file, None for a pipe."""
        if self.path == _STANDARD_INPUT:
            return None
        status = self.path.stat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    @contextmanager
    def records(self, advance: Advance) -> Iterator[Iterator[Record]]:
        """Open the source and give its records, line by line.

        Args:
            advance: Is told the bytes as they are read.
        """
        with self._open() as raw:
            counted = _Counted(raw, advance)
            yield self._parse(counted)

    def _open(self) -> io.FileIO:
        if self.path == _STANDARD_INPUT:
            return io.FileIO(sys.stdin.fileno(), closefd=False)
        try:
            return io.FileIO(self.path)
        except OSError as error:
            raise InputError(f"cannot be opened: {error.strerror}") from error

    def _parse(self, counted: "_Counted") -> Iterator[Record]:
        match self.detected_format():
            case Format.PARQUET:
                seekable = counted if self.size_bytes() is not None else counted.read_all()
                return parquet_records(seekable, self.column)
            case Format.CSV:
                return csv_records(_as_text(counted), self.column)
            case Format.JSONL:
                return jsonl_records(_as_text(counted), self.key)
            case _:
                return line_records(_as_text(counted))


class _Counted(io.RawIOBase):
    """A binary stream that reports how many bytes were read from it."""

    def __init__(self, raw: io.FileIO, advance: Advance) -> None:
        self._raw = raw
        self._advance = advance

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._raw.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        count = self._raw.readinto(buffer) or 0
        self._advance(count)
        return count

    def read_all(self) -> io.BytesIO:
        """Return the rest as a seekable stream."""
        return io.BytesIO(self.read())


def _as_text(counted: _Counted) -> io.TextIOWrapper:
    # Bytes that are no UTF-8 make a bad number, not a failure of the whole file; a byte-order mark
    # is dropped; csv needs the line ends as they are.
    buffered = io.BufferedReader(counted, _CHUNK_BYTES)
    return io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="replace", newline="")
