"""Where ranks wait for each other: one word for every planner."""

from typing import Literal, TypeAlias, get_args

Synchronize: TypeAlias = Literal["microbatch", "step"]
"""When ranks wait for each other: after every micro-batch, or only at the end of the step."""


def check_synchronize(synchronize: Synchronize) -> None:
    """Raise ValueError if `synchronize` is none of its allowed values."""
    if synchronize not in get_args(Synchronize):
        raise ValueError(
            f"synchronize is {synchronize!r}; it must be one of {get_args(Synchronize)}"
        )
