"""The command line: `evenstep-balance simulate` and `evenstep-balance pack`."""

from collections.abc import Callable

import typer

from evenstep.balance.cli.pack import pack
from evenstep.balance.cli.simulate import simulate

app = typer.Typer(
    name="evenstep-balance",
    help="Would balancing, or packing, help me? Answers from the lengths or costs of your samples.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _help_of(command: Callable[..., None]) -> str:
    """Return the docstring with one line per paragraph, for the help to wrap as it sees fit."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


app.command(help=_help_of(simulate))(simulate)
app.command(help=_help_of(pack))(pack)


@app.callback()
def _commands() -> None:
    """Would balancing, or packing, help me? Answers from the lengths or costs of your samples."""
