"""Where the command starts: it must answer even if the packages that it needs are missing."""

import sys

from evenstep.balance.cli.errors import MissingPackageError

# What the extra `cli` declares, and what those import.
_FROM_THE_EXTRA = frozenset({"click", "rich", "typer"})


def main() -> None:
    """Run `evenstep-balance`; exit with 0 if it worked, 1 if the input is bad, 2 if the call is."""
    try:
        from evenstep.balance.cli.app import app  # noqa: PLC0415 (it imports what may be missing)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _FROM_THE_EXTRA:
            raise
        sys.exit(str(MissingPackageError(package, "cli")))
    app()
