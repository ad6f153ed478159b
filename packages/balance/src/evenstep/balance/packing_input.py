"""Checks of what users pass to the packing planners."""

import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from numbers import Rational


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


def check_share(name: str, value: float | Fraction) -> None:
    """Refuse what is no finite number >= 0.

    Raises:
        ValueError: If it is infinite, not a number, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, (float, Rational)):
        raise ValueError(f"{name} is {value!r}; it must be an int, a float or a Fraction")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be finite and not negative")
