"""Reading numbers: four formats, files and pipes, and bad lines reported with their number."""

import io
import json
import math
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance.cli.errors import InputError, MissingPackageError, UsageError
from evenstep.balance.cli.reading import COST, LENGTH, Numbers, Rule, packable, read_numbers
from evenstep.balance.cli.records import Record, csv_records, jsonl_records, line_records
from evenstep.balance.cli.source import Format, Source


def read(source: Source, rule: Rule = COST, *, skip_bad: bool = False) -> Numbers:
    with source.records(lambda _: None) as records:
        return read_numbers(records, rule, skip_bad=skip_bad)


def saved(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def records_of(text: str) -> Iterable[Record]:
    return line_records(io.StringIO(text))


def test_one_number_per_line(tmp_path: Path) -> None:
    path = saved(tmp_path, "costs.txt", "1\n 2.5 \n\n3e2\n")
    assert list(read(Source(path=path)).values) == [1.0, 2.5, 300.0]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_any_line_end_and_a_byte_order_mark(tmp_path: Path, newline: str) -> None:
    path = saved(tmp_path, "costs.txt", b"\xef\xbb\xbf" + newline.join(["1", "2", "x"]).encode())
    with pytest.raises(InputError, match=r"1 bad line of 3:\n  line 3: 'x' is not a number"):
        read(Source(path=path))


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = saved(tmp_path, "costs.txt", b"1\n\xff\xfe\n3\n")
    with pytest.raises(InputError, match=r"line 2: '\\ufffd\\ufffd' is not a number"):
        read(Source(path=path))


def test_all_bad_lines_are_counted_and_the_first_five_shown() -> None:
    text = "\n".join(["7", *"abcdefg", "8"])
    with pytest.raises(InputError) as caught:
        read_numbers(records_of(text), COST)
    assert str(caught.value).splitlines() == [
        "7 bad lines of 9:",
        *[f"  line {line}: '{letter}' is not a number" for line, letter in enumerate("abcde", 2)],
        "  ... and 2 more",
        "mend them, or leave them out with --skip-bad",
    ]


def test_bad_lines_can_be_left_out() -> None:
    numbers = read_numbers(records_of("1\nx\n3\n"), COST, skip_bad=True)
    assert list(numbers.values) == [1.0, 3.0]
    assert (numbers.num_bad, numbers.bad) == (1, ("line 2: 'x' is not a number",))


@pytest.mark.parametrize("text", ["", "\n\n", "x\n"])
def test_no_number_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="there is no number in it"):
        read_numbers(records_of(text), COST, skip_bad=True)


@pytest.mark.parametrize(
    ("rule", "text", "reason"),
    [
        (COST, "-1", "'-1' is not a finite number >= 0"),
        (COST, "nan", "'nan' is not a finite number >= 0"),
        (COST, "1e400", "'1e400' is not a finite number >= 0"),
        (LENGTH, "-1", "'-1' is not an integer >= 0"),
        (LENGTH, "1.5", "'1.5' is not an integer >= 0"),
        (LENGTH, "inf", "'inf' is not an integer >= 0"),
        (LENGTH, "1e17", "'1e17' is more than the most that can be told apart, of 9,007,199,254,"),
        (packable(4096), "0", "'0' is not an integer >= 1"),
        (packable(4096), "4097", "'4097' is more than the capacity of 4,096"),
        (packable(4096), "5000.5", "'5000.5' is more than the capacity of 4,096"),
        (COST, "9" * 60, None),
        (LENGTH, "0", None),
        (LENGTH, "1e3", None),
        (packable(4096), "4096", None),
    ],
)
def test_rules(rule: Rule, text: str, reason: str | None) -> None:
    found = rule.reason_against(text)
    assert found is None if reason is None else (found or "").startswith(reason)


def test_long_values_are_shortened() -> None:
    assert COST.reason_against("x" * 100) == f"'{'x' * 40}...' is not a number"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e300) | st.sampled_from([math.nan, -1.0, math.inf]), max_size=50))
def test_the_fast_way_and_the_careful_way_agree(numbers: list[float]) -> None:
    good = [x for x in numbers if 0 <= x < math.inf]
    records: list[Record] = list(enumerate(numbers, start=1))
    if not good:
        return
    result = read_numbers(records, COST, skip_bad=True)
    assert list(result.values) == good
    assert result.num_bad == len(numbers) - len(good)


def test_bad_lines_are_found_beyond_the_first_chunk() -> None:
    records: list[Record] = [(line, "1") for line in range(1, 10_001)]
    records[9_000] = (9_001, "x")
    with pytest.raises(InputError, match=r"1 bad line of 10,000:\n  line 9001: 'x'"):
        read_numbers(records, COST)


CSV = "name,tokens\na,5\n\nb,7\n"


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        (CSV, "tokens", [(2, "5"), (4, "7")]),
        (CSV, "2", [(2, "5"), (4, "7")]),
        (CSV.replace(",", ";"), "tokens", [(2, "5"), (4, "7")]),
        (CSV.replace(",", "\t"), "tokens", [(2, "5"), (4, "7")]),
        ("463,1013\n439,1004\n", "1", [(1, "463"), (2, "439")]),
        ("463,1013\n439,1004\n", "2", [(1, "1013"), (2, "1004")]),
        ("tokens\n5\n", None, [(2, "5")]),
        ("5\n7\n", None, [(1, "5"), (2, "7")]),
        ('text,tokens\n"two\nlines, quoted",9\nc,8\n', "tokens", [(3, "9"), (4, "8")]),
        ("", None, []),
    ],
)
def test_csv_column(text: str, column: str | None, expected: list[tuple[int, str]]) -> None:
    assert list(csv_records(io.StringIO(text, newline=""), column)) == expected


def test_csv_short_row_is_a_bad_line() -> None:
    with pytest.raises(InputError, match="line 3: has 1 columns, needs 2"):
        read_numbers(csv_records(io.StringIO("a,b\n1,2\n3\n"), "b"), COST)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        (CSV, None, "choose one of 2 columns with --column: name, tokens"),
        (CSV, "length", "--column length must name one column or be a position from 1; none of "),
        (CSV, "0", "--column 0 must name one column"),
        (CSV, "3", "--column 3 must name one column"),
        ("a,a\n1,2\n", "a", "more than one of the 2 has that name"),
        (",".join("abcdefghijkl"), None, "columns with --column: a, b, c, d, e, f, g, h, i, j, "),
    ],
)
def test_csv_column_must_be_chosen(text: str, column: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(csv_records(io.StringIO(text), column))


def test_csv_that_cannot_be_parsed_names_the_line() -> None:
    huge = "a,b\n1,2\n" + "x" * 200_000 + ",3\n"
    with pytest.raises(InputError, match="line 3: field larger than field limit"):
        list(csv_records(io.StringIO(huge), "b"))


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ({"tokens": 5}, "tokens", 5),
        ({"meta": {"tokens": 5}}, "meta.tokens", 5),
        ({"meta.tokens": 5, "meta": {"tokens": 6}}, "meta.tokens", 5),
        (5, None, 5),
    ],
)
def test_jsonl_key(line: object, key: str | None, value: object) -> None:
    text = io.StringIO("\n" + json.dumps(line) + "\n")
    assert list(jsonl_records(text, key)) == [(2, value)]


@pytest.mark.parametrize(
    ("line", "key", "reason"),
    [
        ('{"a": 1, "c": 2}', "b", "has no key 'b': it has a, c"),
        ("{}", "b", "has no key 'b': it has no keys"),
        ('{"a": 1}', "a.b", "has no key 'a.b': 'a' is no object"),
        ('{"a": {"c": 1}}', "a.b", "has no key 'a.b': 'a' has c"),
        ("[1]", "a", "has no key 'a': it is no object"),
        ('{"a": true}', "a", "True is not a number"),
        ('{"a": null}', "a", "None is not a number"),
        ('{"a": "x"}', "a", "'x' is not a number"),
        ('{"a": [1]}', "a", r"\[1\] is not a number"),
        ('{"a": NaN}', "a", "nan is not a finite number >= 0"),
        ('{"a": ', "a", "is not JSON: Expecting value at column 7"),
        ("[" * 100_000, "a", "is not JSON that Python can hold"),
        ('{"a": 1' + "0" * 400 + "}", "a", "is not a number"),
    ],
)
def test_jsonl_bad_lines(line: str, key: str | None, reason: str) -> None:
    with pytest.raises(InputError, match=f"line 1: .*{reason}"):
        read_numbers(jsonl_records(io.StringIO(line), key), COST)


def test_jsonl_key_must_be_chosen() -> None:
    with pytest.raises(UsageError, match="choose one of 2 keys with --key: a, b"):
        list(jsonl_records(io.StringIO('{"a": 1, "b": 2}'), None))
    later = io.StringIO('5\n{"a": 1}\n')
    with pytest.raises(InputError, match="line 2: is an object; choose one of its keys with --key"):
        read_numbers(jsonl_records(later, None), COST)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('{"a": 1}', "looks like JSON; choose a key with --key"),
        ("name,tokens", "looks like CSV; choose a column with --column"),
        ("5\t7", "looks like CSV; choose a column with --column"),
    ],
)
def test_a_first_line_of_another_format_is_told(line: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"2 bad lines of 2:\n  line 1: {hint}"):
        read_numbers(records_of(f"{line}\n{line}\n"), COST)


@pytest.mark.parametrize(
    ("text", "rule", "remedy"),
    [
        ("x\n1\n", COST, "mend them, or leave them out with --skip-bad"),
        ("x\ny\n", COST, "every line is bad: check --format, --key or --column"),
        ("9\n1\n", packable(5), "mend them, leave them out with --skip-bad, or raise --capacity"),
        (
            "9\nx\n",
            packable(5),
            "every line is bad: check --format, --key or --column, or raise --capacity",
        ),
    ],
)
def test_remedies(text: str, rule: Rule, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        read_numbers(records_of(text), rule)
    assert str(caught.value).splitlines()[-1] == remedy


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("x.csv", {}, Format.CSV),
        ("x.TSV", {}, Format.CSV),
        ("x.jsonl", {}, Format.JSONL),
        ("x.ndjson", {}, Format.JSONL),
        ("x.parquet", {}, Format.PARQUET),
        ("x.txt", {}, Format.LINES),
        ("-", {}, Format.LINES),
        ("-", {"key": "a"}, Format.JSONL),
        ("-", {"column": "a"}, Format.CSV),
        ("x.csv", {"format": Format.LINES}, Format.LINES),
    ],
)
def test_detected_format(name: str, options: dict[str, str], expected: Format) -> None:
    source = Source(path=Path(name), **options)  # type: ignore[arg-type]  # of a mixed table
    assert source.detected_format() is expected


def test_progress_is_told_every_byte(tmp_path: Path) -> None:
    path = saved(tmp_path, "costs.txt", "12345\n" * 500_000)
    told: list[int] = []
    source = Source(path=path)
    with source.records(told.append) as records:
        assert len(read_numbers(records, COST).values) == 500_000
    assert sum(told) == source.size_bytes() == 3_000_000
    assert len(told) > 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("1\n2\n",))
    writer.start()
    source = Source(path=path)
    assert source.size_bytes() is None
    assert list(read(source).values) == [1.0, 2.0]
    writer.join()


def test_missing_files_and_directories_are_wrong_calls(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="is not a file"):
            Source(path=path).check()


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    table = arrow.table({"name": ["a", "b", "c"], "tokens": [5, None, 7]})
    parquet.write_table(table, path)
    numbers = read(Source(path=path, column="tokens"), LENGTH, skip_bad=True)
    assert list(numbers.values) == [5.0, 7.0]
    assert numbers.bad == ("line 2: is null",)
    with pytest.raises(UsageError, match="choose one of 2 columns with --column: name, tokens"):
        read(Source(path=path))


def test_damaged_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(InputError, match="not a Parquet file that pyarrow can read"):
        read(Source(path=saved(tmp_path, "x.parquet", "no")))


def test_parquet_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'evenstep-balance\[parquet\]'"):
        read(Source(path=saved(tmp_path, "x.parquet", "")))
