"""What the terminal shows: progress on standard error, tables on standard output."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

T = TypeVar("T")

_REPORT_BYTES = 1 << 20


@contextmanager
def reading_progress(name: str, size_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show how much of a source has been read; give the function to call with bytes."""
    with _progress(DownloadColumn()) as progress:
        task = progress.add_task(f"reading {name}", total=size_bytes)
        yield lambda count: progress.advance(task, count)


def step_progress(steps: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Give the steps, and show how many are done."""
    with _progress(MofNCompleteColumn()) as progress:
        yield from progress.track(steps, total=total, description=what)


def print_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str]
) -> None:
    """Print a table whose first column is text and whose other columns are figures."""
    console = Console()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", vertical="bottom")
    for row in rows:
        table.add_row(*row)
    console.print(title, "", sep="\n", highlight=False, markup=False)
    console.print(table)
    for note in notes:
        console.print("", note, sep="\n", highlight=False, markup=False)


def print_plot(path: Path | None) -> None:
    """Say where the picture is, if there is one."""
    if path is not None:
        typer.echo(f"\nLoad of every rank, before and after: {path}")


def percent(share: float, digits: int = 1) -> str:
    """Return a share as per cent."""
    return f"{100 * share:.{digits}f}%"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with two digits that mean something."""
    value = 1000 * seconds
    return f"{value:.{2 if value < 1 else 1 if value < 10 else 0}f} ms"


def _progress(count: DownloadColumn | MofNCompleteColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        count,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
