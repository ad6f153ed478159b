"""What the command reports in one line, without a traceback."""


class InputError(Exception):
    """The input cannot be used; the command says why and exits with 1."""


class UsageError(Exception):
    """The command was called wrongly; it says why and exits with 2."""
