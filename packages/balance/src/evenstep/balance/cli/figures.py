"""Summaries of what was measured over the drawn steps."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from evenstep.balance.synchronize import Synchronize

Loads: TypeAlias = Sequence[Sequence[float]]
"""`[micro-batch][rank]`: summed cost."""


class Spread(NamedTuple):
    """Mean, 95th percentile (nearest rank) and largest of some values."""

    mean: float
    p95: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        ascending = sorted(values)
        p95 = ascending[math.ceil(0.95 * len(ascending)) - 1]
        return cls(math.fsum(values) / len(values), p95, ascending[-1])


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, and 1 where both are 0: nothing to do is perfectly balanced."""
    return numerator / denominator if denominator else 1.0


def step_time(loads: Loads, synchronize: Synchronize) -> float:
    """Return what a step waits for, in units of cost."""
    if synchronize == "microbatch":
        return math.fsum(map(max, loads))
    return max(rank_totals(loads))


def rank_totals(loads: Loads) -> list[float]:
    """Return the load of every rank over all micro-batches."""
    return [math.fsum(rank) for rank in zip(*loads, strict=True)]
