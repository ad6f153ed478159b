"""What the examples' command lines share: errors of one line, and checks."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class OptionError(ValueError):
    """An option that cannot work; the message is one line that says why and what would."""


class Parser(argparse.ArgumentParser):
    """Leaves errors to the caller, and lets only rank 0 answer `--help`."""

    def error(self, message: str) -> NoReturn:
        """Raise OptionError."""
        raise OptionError(f"{message} (see --help)")

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the help on rank 0 alone."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def require(holds: bool, message: str) -> None:
    """Raise OptionError unless the condition holds."""
    if not holds:
        raise OptionError(message)


def require_width(width: int, head: int) -> None:
    """Raise OptionError unless the width is one or more attention heads."""
    require(
        width >= head and width % head == 0,
        f"--width is {width}: a multiple of {head}, the size of an attention head",
    )


def require_learning_rate(rate: float) -> None:
    """Raise OptionError unless it is a learning rate."""
    require(0 < rate < 1, f"--learning-rate is {rate}: above 0 and below 1")


def writable_picture(picture: Path) -> Path:
    """Return the path of a PNG whose folder exists now.

    Raises:
        OptionError: If it is no PNG, or its folder cannot be made.
    """
    require(picture.suffix == ".png", f"--picture is {picture}: the name must end in .png")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--picture: cannot make {picture.parent}: {error.strerror}") from error
    return picture
