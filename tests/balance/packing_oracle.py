"""Exact answers to small packing problems, by looking at every partition."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations

from evenstep.balance import SequenceLoad

Partition = list[list[int]]


def partitions(items: Sequence[int]) -> Iterator[Partition]:
    """Yield every way to split items into non-empty parts."""
    if not items:
        yield []
        return
    for partition in partitions(items[1:]):
        yield [[items[0]], *partition]
        for at in range(len(partition)):
            yield [*partition[:at], [items[0], *partition[at]], *partition[at + 1 :]]


def exact_load(load: SequenceLoad, length: int) -> Fraction:
    """Return the load of one sequence, exact."""
    return (Fraction(load.linear) + Fraction(load.quadratic) * length) * length


def packings(
    lengths: Sequence[int],
    *,
    capacity: int,
    num_ranks: int,
    multiple: int = 1,
    max_sequences: int | None = None,
) -> Iterator[Partition]:
    """Yield every set of bins that keeps the rules."""
    for bins in partitions(range(len(lengths))):
        if len(bins) % (num_ranks * multiple):
            continue
        if all(
            sum(lengths[i] for i in b) <= capacity and len(b) <= (max_sequences or len(lengths))
            for b in bins
        ):
            yield bins


def best_step(loads: Sequence[Fraction], num_ranks: int, synchronize: str) -> Fraction:
    """Return the shortest step of bins of these loads."""
    if synchronize == "microbatch":
        return sum(sorted(loads, reverse=True)[::num_ranks], Fraction(0))
    return _best_largest_total(tuple(loads), num_ranks)


def _best_largest_total(loads: tuple[Fraction, ...], num_ranks: int) -> Fraction:
    if num_ranks == 1:
        return sum(loads, Fraction(0))
    per_rank = len(loads) // num_ranks
    best: Fraction | None = None
    for others in combinations(range(1, len(loads)), per_rank - 1):
        mine = {0, *others}
        rest = tuple(load for at, load in enumerate(loads) if at not in mine)
        total = sum((loads[at] for at in mine), Fraction(0))
        step = max(total, _best_largest_total(rest, num_ranks - 1))
        best = step if best is None else min(best, step)
    assert best is not None
    return best
