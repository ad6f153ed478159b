"""The four formats: each turns a stream into records, a line number and the value found there.

A value that is not there at all (a missing key, a short row) is given as a `Missing`, so that it is
reported with its line like any other bad value.
"""

import csv
import io
import json
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from typing import NamedTuple, TextIO, TypeAlias

from evenstep.balance.cli.errors import InputError, MissingPackageError, UsageError

_DELIMITERS = ",;\t|"
_LISTED = 10


class Missing(NamedTuple):
    """Why a line holds no value."""

    reason: str


Record: TypeAlias = tuple[int, object]
"""A line's number and the value found there; a bare tuple, because there may be millions."""


def line_records(text: TextIO) -> Iterator[Record]:
    """Give the text of each line; empty lines are left out.

    If the first line looks like another format, it is reported so.
    """
    lines = ((number, line) for number, line in enumerate(text, start=1) if not line.isspace())
    for number, line in lines:
        yield number, _other_format(line) or line
        break
    yield from lines


def csv_records(text: TextIO, column: str | None) -> Iterator[Record]:
    """Give the cells of one column; empty lines are left out.

    The delimiter is the one of `,;|` and tab that the first line has most of. The first row is a
    header if its cell in the chosen column is not a number.

    Raises:
        InputError: The rows cannot be told apart, as with an unclosed quote.
        UsageError: `column` does not choose one column.
    """
    first = text.readline()
    delimiter = max(_DELIMITERS, key=first.count)
    rows = csv.reader(chain([first], text), delimiter=delimiter)
    try:
        header = next(rows, [])
        at = _position(column, header)
        if not header or _is_number(header[at]):
            rows = csv.reader(chain([first], text), delimiter=delimiter)
        for row in rows:
            if at < len(row):
                yield rows.line_num, row[at]
            elif row:
                yield rows.line_num, Missing(f"has {len(row)} columns, needs {at + 1}")
    except csv.Error as error:
        raise InputError(f"line {rows.line_num}: {error}") from error


def jsonl_records(text: TextIO, key: str | None) -> Iterator[Record]:
    """Give the value at `key` of each line's object, or the line's value if there is no key.

    A key that the object lacks is tried as a path: `meta.tokens` is `tokens` inside `meta`.

    Raises:
        UsageError: The first value is an object, and there is no key.
    """
    is_first = True
    for number, line in enumerate(text, start=1):
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            yield number, Missing(f"is not JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError) as error:  # integers or nesting beyond Python's limits
            yield number, Missing(f"is not JSON that Python can hold: {error}")
        else:
            if is_first and key is None and isinstance(value, dict):
                raise UsageError(f"choose one of {len(value)} keys with --key: {_list(value)}")
            is_first = False
            yield number, _find(value, key)


def parquet_records(stream: io.IOBase, column: str | None) -> Iterator[Record]:
    """Give the values of one column; the line number is that of the row, from 1.

    Raises:
        InputError: The stream is not a Parquet file.
        MissingPackageError: pyarrow is not installed.
        UsageError: `column` does not choose one column.
    """
    try:
        # By name, because pyarrow ships no types, and the checker may run with or without it.
        arrow, parquet = map(import_module, ("pyarrow", "pyarrow.parquet"))
    except ModuleNotFoundError as error:
        raise MissingPackageError("pyarrow", "parquet") from error
    try:
        file = parquet.ParquetFile(stream)
        names = file.schema_arrow.names
        chosen = names[_position(column, names)]
        row = 0
        for batch in file.iter_batches(columns=[chosen]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield row, Missing("is null") if value is None else value
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"not a Parquet file that pyarrow can read: {error}") from error


def _position(column: str | None, names: list[str]) -> int:
    """Return the index of the chosen column: its name, or its position counted from 1."""
    if column is None:
        if len(names) > 1:
            raise UsageError(f"choose one of {len(names)} columns with --column: {_list(names)}")
        return 0
    if column.isdecimal() and 1 <= int(column) <= len(names):
        return int(column) - 1
    if names.count(column) != 1:
        found = "more than one" if column in names else "none"
        raise UsageError(
            f"--column {column} must name one column or be a position from 1; {found} of the "
            f"{len(names)} has that name: {_list(names)}"
        )
    return names.index(column)


def _find(value: object, key: str | None) -> object:
    if key is None:
        if isinstance(value, dict):
            return Missing(f"is an object; choose one of its keys with --key: {_list(value)}")
        return value
    if isinstance(value, dict) and key in value:
        return value[key]
    where = "it"
    for part in key.split("."):
        if not isinstance(value, dict):
            return Missing(f"has no key {key!r}: {where} is no object")
        if part not in value:
            return Missing(f"has no key {key!r}: {where} has {_list(value) or 'no keys'}")
        value = value[part]
        where = repr(part)
    return value


def _other_format(line: str) -> Missing | None:
    """Return why the line holds no number if it looks like JSON or CSV, else None."""
    if line.lstrip().startswith("{"):
        return Missing("looks like JSON; choose a key with --key, or say --format jsonl")
    if any(delimiter in line.strip() for delimiter in _DELIMITERS):
        return Missing("looks like CSV; choose a column with --column, or say --format csv")
    return None


def _list(names: "list[str] | dict[str, object]") -> str:
    shown = ", ".join(list(names)[:_LISTED])
    return f"{shown}, ..." if len(names) > _LISTED else shown


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
