"""Micro-batches that end together: bins filled to a level of load, and the search for the level."""

from collections.abc import Iterator, Sequence

from evenstep.balance.packing_bisect import lowest_level
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
    total = problem.load_of(range(len(problem.loads)))
    level, bins = total, fill_bins(problem, total)
    for count in counts:
        wanted = count * problem.num_ranks

        def attempt(level: int, wanted: int = wanted) -> list[Sequences] | None:
            filled = fill_bins(problem, level, max_bins=wanted)
            return filled if len(filled) <= wanted else None

        found = lowest_level(attempt, guess=total // wanted, enough=level, precision=PRECISION)
        level, bins = found or (level, bins)
        yield by_falling_load(problem, split_costliest(problem, bins, wanted))


def by_falling_load(problem: PackingProblem, bins: Sequence[Sequences]) -> list[list[Sequences]]:
    """Group bins of similar load into micro-batches: no grouping has a smaller sum of maxima."""
    order = sorted(range(len(bins)), key=lambda b: (-problem.load_of(bins[b]), b))
    ranks = problem.num_ranks
    return [[bins[b] for b in order[at : at + ranks]] for at in range(0, len(order), ranks)]
