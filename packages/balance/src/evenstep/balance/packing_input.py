"""Checks of what users pass to the packing planners."""

import operator
from collections.abc import Sequence


def checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths as ints.

    Raises:
        ValueError: If there are none, or one is not an integer of at least 1.
    """
    if not len(lengths):
        raise ValueError("lengths is empty; packing needs at least one sequence")
    return tuple(positive_int(f"lengths[{i}]", length) for i, length in enumerate(lengths))


def positive_int(name: str, value: int) -> int:
    """Return `value` as an int (NumPy's integers become Python's).

    Raises:
        ValueError: If it is not an integer of at least 1.
    """
    try:
        exact = operator.index(value)
    except TypeError:
        exact = 0
    if exact < 1 or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    return exact
