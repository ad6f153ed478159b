"""Checks of what users pass to the packing planners."""

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Rational

from evenstep.balance.checks import check_ordered, checked_count


def checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths as ints.

    Raises:
        ValueError: If there are none, they have no order, or one is not an integer >= 1.
    """
    check_ordered(lengths, "lengths")
    if not len(lengths):
        raise ValueError("lengths is empty; packing needs at least one sequence")
    return tuple(checked_count(length, f"lengths[{i}]") for i, length in enumerate(lengths))


def check_share(name: str, value: float | Fraction) -> None:
    """Refuse what is no finite number >= 0.

    Raises:
        ValueError: If it is infinite, not a number, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, (float, Rational)):
        raise ValueError(f"{name} is {value!r}; it must be an int, a float or a Fraction")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be finite and not negative")
