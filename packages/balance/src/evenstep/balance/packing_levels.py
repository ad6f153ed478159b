"""Micro-batches that end together: bins filled to a level of load, and the search for the level."""

from collections.abc import Iterator, Sequence

from evenstep.balance.packing_fill import Sequences, fill_bins, split_costliest
from evenstep.balance.packing_problem import PackingProblem

PRECISION = 1000
"""The level is searched until it is known to one part in this many."""


def levelled_microbatches(
    problem: PackingProblem, counts: Sequence[int]
) -> Iterator[list[list[Sequences]]]:
    """Yield, for each number of micro-batches, those filled to the lowest level that suffices.

    A long sequence costs more than a bin of short ones of as many tokens can, so bins cannot all
    be alike. `fill_bins` meets this longest first: the longest sequences share the first
    micro-batches, whose level they set, filled up with the longest that fit; what is left is
    filled to a common level. The lowest such level for which the bins suffice is found by
    bisection; a level that suffices for fewer micro-batches suffices for more.

    Args:
        problem: What is asked.
        counts: Numbers of micro-batches to try, ascending; the first is enough for best-fit
            decreasing.
    """
    level = max(problem.loads) * len(problem.loads)
    for count in counts:
        level, bins = _lowest_level(problem, count * problem.num_ranks, level)
        yield by_falling_load(problem, split_costliest(problem, bins, count * problem.num_ranks))


def by_falling_load(problem: PackingProblem, bins: Sequence[Sequences]) -> list[list[Sequences]]:
    """Group bins of similar load into micro-batches: no grouping has a smaller sum of maxima."""
    order = sorted(range(len(bins)), key=lambda b: (-problem.load_of(bins[b]), b))
    ranks = problem.num_ranks
    return [[bins[b] for b in order[at : at + ranks]] for at in range(0, len(order), ranks)]


def _lowest_level(problem: PackingProblem, count: int, enough: int) -> tuple[int, list[Sequences]]:
    """Return the lowest level, and its bins, for which at most `count` bins hold everything.

    Looks around the mean load first, in steps that double, then halves what is left.
    """
    best = fill_bins(problem, enough)
    assert len(best) <= count
    too_low = -1  # no bin has a load below 0
    level = problem.load_of(range(len(problem.loads))) // count
    step = level // 16
    while enough - too_low > max(1, enough // PRECISION):
        if not too_low < level < enough:
            level = (enough + too_low) // 2
        bins = fill_bins(problem, level, max_bins=count)
        if len(bins) <= count:
            enough, best = level, bins
            level -= step
        else:
            too_low = level
            level += step
        step *= 2
    return enough, best
