"""The options that both commands share, and what is made of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from evenstep.balance.cli.errors import InputError, MissingPackageError, UsageError
from evenstep.balance.cli.reading import Numbers, Rule, read_numbers
from evenstep.balance.cli.source import Format, Source
from evenstep.balance.cli.terminal import reading_progress
from evenstep.balance.packing_load import SequenceLoad
from evenstep.balance.synchronize import Synchronize

_INPUT, _OUTPUT = "Input", "Output"

Input: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT",
        show_default=False,
        help="File with the numbers; the standard input without one, or with -.",
    ),
]
FormatOption: TypeAlias = Annotated[
    Format,
    typer.Option(
        "--format",
        help="lines: one number per line; csv: one --column (comma, semicolon, tab or bar); jsonl: "
        "one --key of each line's object; parquet: one --column. auto goes by the file's name, "
        "then by --key or --column. Empty lines are left out.",
        rich_help_panel=_INPUT,
    ),
]
Column: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Column of a CSV or Parquet file: its name, or its position from 1.",
        rich_help_panel=_INPUT,
    ),
]
Key: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Key of a JSON object; a.b is b inside a.", rich_help_panel=_INPUT),
]
SkipBad: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--skip-bad",
        help="Leave bad lines out, and say which; without it they are an error.",
        rich_help_panel=_INPUT,
    ),
]
HiddenSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Hidden size H of the transformer: L tokens then cost L + L*L / (12 H).",
        rich_help_panel="Cost",
    ),
]
Bidirectional: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--bidirectional",
        help="With --hidden-size: attention without a causal mask, as in a vision encoder, costs "
        "L + L*L / (6 H) for L patches.",
        rich_help_panel="Cost",
    ),
]
Synchronization: TypeAlias = Annotated[
    Synchronize,
    typer.Option(
        help="When ranks wait for each other: in every micro-batch, or only when the step ends."
    ),
]
Draws: TypeAlias = Annotated[
    int,
    typer.Option(
        min=0, help="Steps to simulate, evenly spaced over the input; 0 simulates all of them."
    ),
]
Seed: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Shuffle the input with this seed. Without it, samples are drawn in the order of the "
        "input.",
    ),
]
Plot: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        help="Draw the load of every rank before and after, to this file (png, svg or pdf).",
        rich_help_panel=_OUTPUT,
    ),
]
Json: TypeAlias = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object, not a table.", rich_help_panel=_OUTPUT),
]


def load_numbers(source: Source, rule: Rule, *, skip_bad: bool) -> Numbers:
    """Read the source with a progress bar; warn of the bad lines that were left out.

    Raises:
        InputError: A line is bad, or there is no number.
        UsageError: The source cannot be read, or the options do not fit it.
    """
    source.check()
    if source.key is not None and source.detected_format() is not Format.JSONL:
        raise UsageError(f"--key is for JSON lines, but the format is {source.detected_format()}")
    if source.column is not None and source.detected_format() in {Format.JSONL, Format.LINES}:
        raise UsageError(
            f"--column is for CSV and Parquet, but the format is {source.detected_format()}"
        )
    with (
        reading_progress(source.name, source.size_bytes()) as advance,
        source.records(advance) as records,
    ):
        numbers = read_numbers(records, rule, skip_bad=skip_bad)
    if numbers.num_bad:
        typer.echo(f"{source.name}: left out {numbers.describe_bad()}", err=True)
    return numbers


def about(
    source: Source, numbers: Numbers, *, hidden_size: int | None, plot: Path | None
) -> dict[str, object]:
    """Return what the JSON objects of both commands begin with."""
    return {
        "input": source.name,
        "bad_lines": numbers.num_bad,
        "hidden_size": hidden_size,
        "plot": None if plot is None else str(plot),
    }


def sequence_load(hidden_size: int | None, *, bidirectional: bool) -> SequenceLoad | None:
    """Return the load that the options describe, None without a hidden size.

    Raises:
        UsageError: `--bidirectional` has no hidden size to apply to.
    """
    if hidden_size is not None:
        return SequenceLoad.from_hidden_size(hidden_size, causal=not bidirectional)
    if bidirectional:
        raise UsageError("--bidirectional needs --hidden-size")
    return None


@contextmanager
def one_line_errors(source: Source) -> Iterator[None]:
    """Turn what is wrong with the input or the call into a message and an exit code.

    Bad input ends with 1, a bad call with 2, as everywhere in this command.
    """
    try:
        yield
    except InputError as error:
        typer.echo(f"{source.name}: {error}", err=True)
        raise typer.Exit(1) from error
    except MissingPackageError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from error
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
