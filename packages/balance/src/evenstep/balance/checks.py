"""What planners demand of costs and counts, and the errors when they do not get it.

Costs become float64 here, once, because that is how they travel between ranks: every module plans
from the very same numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from operator import index
from typing import cast

EXACT_INT_LIMIT = 2**53
"""Largest integer up to which float64 holds every integer exactly."""


def checked_costs(costs: Iterable[float], name: str = "costs") -> list[float]:
    """Return `costs` as a list of float64, each finite and not negative.

    Integers up to 2**53 are exact in float64 and accepted; larger ones are refused, because two
    ranks that round them differently would plan differently. Any number with `__float__` (a NumPy
    scalar, a tensor of one element) is taken at its float64 value.

    Args:
        costs: One number per sample, in the samples' order.
        name: The parameter's name, for the message.

    Raises:
        ValueError: `costs` is a set, a mapping or nothing to iterate over; a cost is no number,
            NaN, infinite, negative or an integer beyond 2**53; or the costs add up beyond float64.
    """
    check_ordered(costs, name)
    given = list(costs)
    kinds = set(map(type, given))
    if not kinds <= {float, int}:
        given = [_real(cost, f"{name}[{i}]") for i, cost in enumerate(given)]
    try:
        values = given if kinds <= {float} else [float(cost) for cost in given]
        total = math.fsum(values)  # NaN or infinite as soon as one cost is
        sound = total < math.inf and min(values, default=0.0) >= 0.0
    except (OverflowError, ValueError):  # an integer beyond float64; or fsum's own complaint
        sound = False
    if not sound or max(values, default=0.0) >= EXACT_INT_LIMIT:
        for i, cost in enumerate(given):
            _check_cost(cost, f"{name}[{i}]")
        if not sound:
            raise ValueError(
                f"{name} add up to more than float64 can hold (1.8e308); scale them down"
            )
    return values


def check_ordered(values: object, name: str) -> None:
    """Refuse what has no order of its own: a plan must not depend on hashing.

    Raises:
        ValueError: `values` is a set, a mapping or nothing to iterate over.
    """
    if isinstance(values, (AbstractSet, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(
            f"{name} is a {type(values).__name__}; it must hold one entry per sample in the "
            "samples' order, pass a list"
        )


def checked_count(value: int, name: str, minimum: int = 1) -> int:
    """Return `value` as an int of at least `minimum`.

    Raises:
        ValueError: `value` is no integer (or a bool), or below `minimum`.
    """
    try:
        count = index(value)  # NumPy's integers become Python's
    except TypeError:
        count = minimum - 1
    if count < minimum or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be an integer >= {minimum}")
    return count


def checked_groups(n_samples: int, n_groups: int) -> int:
    """Return the samples per group of an even division.

    Raises:
        ValueError: `n_groups` is no positive integer, or does not divide `n_samples`.
    """
    groups = checked_count(n_groups, "n_groups")
    if n_samples % groups:
        raise ValueError(
            f"n_groups is {groups}, but must divide the number of samples, {n_samples} "
            f"({n_samples % groups} would be left over); change the micro-batch size, or plan "
            "groups of unequal counts with plan_groups(..., sizes='within_one')"
        )
    return n_samples // groups


def checked_dp_size(n_groups: int, dp_size: int) -> int:
    """Return the canonical groups that each of `dp_size` ranks owns.

    Raises:
        ValueError: `dp_size` is no positive integer, or does not divide `n_groups`.
    """
    size = checked_count(dp_size, "dp_size")
    if n_groups % size:
        raise ValueError(
            f"dp_size is {size}, but must divide n_groups, {n_groups}; n_groups is the least "
            "common multiple of the DP sizes of all paired modules"
        )
    return n_groups // size


def checked_window(costs_per_slot: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the checked costs of every slot; all slots hold equally many samples.

    Raises:
        ValueError: The slots have no order, a cost is bad (see `checked_costs`), or slots differ
            in their sample count.
    """
    check_ordered(costs_per_slot, "costs_per_slot")
    slots = [checked_costs(c, f"costs_per_slot[{s}]") for s, c in enumerate(costs_per_slot)]
    for s, costs in enumerate(slots):
        if len(costs) != len(slots[0]):
            raise ValueError(
                f"costs_per_slot[{s}] has {len(costs)} samples, but slot 0 has {len(slots[0])}; "
                "every micro-batch of a window has the same sample count"
            )
    return slots


def _real(cost: object, name: str) -> float | int:
    """Return `cost` as a float or int; strings, complex numbers and the like are refused."""
    if isinstance(cost, (int, float)):
        return cost
    if callable(detach := getattr(cost, "detach", None)):
        cost = detach()  # torch warns where a gradient would be lost
    for method in ("__index__", "__float__"):
        if hasattr(cost, method):
            # A tensor has both, and complains in its own ways when it is no integer or no scalar.
            # What is too large for a float overflows.
            with suppress(TypeError, ValueError, RuntimeError, OverflowError):
                return cast("float", getattr(cost, method)())
    raise ValueError(f"{name} is {cost!r}; a cost must be a finite real number >= 0")


def _check_cost(cost: float, name: str) -> None:
    if isinstance(cost, int) and cost > EXACT_INT_LIMIT:
        raise ValueError(
            f"{name} is the integer {cost}, beyond 2**53, which float64 cannot hold exactly; "
            "scale the costs down, or pass floats"
        )
    if not 0 <= cost < math.inf:
        raise ValueError(f"{name} is {cost!r}; a cost must be a finite real number >= 0")
