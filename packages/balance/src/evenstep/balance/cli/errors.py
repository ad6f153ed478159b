"""What the command reports in one line, without a traceback."""


class InputError(Exception):
    """The input cannot be used; the command says why and exits with 1."""


class UsageError(Exception):
    """The command was called wrongly; it says why and exits with 2."""


class MissingPackageError(Exception):
    """A package of an extra is not installed; the command says which and exits with 1.

    Args:
        package: What cannot be imported.
        extra: The extra that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"evenstep-balance needs the package {package} for this; "
            f"install it with: pip install 'evenstep-balance[{extra}]'"
        )
