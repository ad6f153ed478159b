"""The balanced packing: how many micro-batches, from which filling, evened out."""

import math
from collections.abc import Iterator, Sequence

from evenstep.balance.packing_arrival import arrival_bins, arrival_microbatches
from evenstep.balance.packing_bounds import fewest_bins, fewest_microbatches
from evenstep.balance.packing_exact import search_bins
from evenstep.balance.packing_fill import Sequences, fill_bins, split_costliest
from evenstep.balance.packing_levels import by_falling_load, levelled_microbatches
from evenstep.balance.packing_plan import step_of
from evenstep.balance.packing_problem import PackingProblem
from evenstep.balance.packing_ranks import microbatches_of, rank_bins, spread_over_ranks
from evenstep.balance.packing_refine import even_out

Microbatches = list[list[Sequences]]
"""`[micro-batch][rank]`."""

WORTHWHILE = 1000
"""More micro-batches must shorten the step by one part in this many, or the search is over; so it
is when the step is as close to the lower bound."""


def balanced_microbatches(problem: PackingProblem, *, extra: float, bound: int) -> Microbatches:
    """Return the micro-batches of the shortest step found.

    Tries the fewest micro-batches that best-fit decreasing needs and then more of them, up to
    `extra`. Never worse than filling in arrival order, where that needs no more micro-batches.

    Args:
        problem: What is asked.
        extra: How many more micro-batches than the fewest possible, as a share of those.
        bound: Lower bound of the step.

    Raises:
        ValueError: If the sequences do not suffice for the number of bins that they need.
    """
    bins = fill_bins(problem)
    count = problem.rounded_up(len(bins))
    if count > len(problem.lengths):
        return _evened(problem, by_falling_load(problem, fewest_allowed_bins(problem)))
    first = count // problem.num_ranks
    wanted = math.floor(fewest_microbatches(problem) * (1 + extra))
    most = max(first, min(wanted, len(problem.lengths) // problem.num_ranks))
    best: Microbatches = []
    best_step = 0
    for found in _candidates(problem, range(first, most + 1, problem.multiple)):
        step = step_of(problem, found)
        if best and (best_step - step) * WORTHWHILE < best_step:
            break
        best, best_step = found, step
        if (best_step - bound) * WORTHWHILE <= bound:
            break
    if problem.rounded_up(len(arrival_bins(problem))) <= most * problem.num_ranks:
        naive = arrival_microbatches(problem)
        if step_of(problem, naive) < best_step:
            return naive
    return best


def fewest_allowed_bins(problem: PackingProblem) -> list[Sequences]:
    """Return as few bins as best-fit decreasing finds, split up to the next allowed number.

    Where that is more than there are sequences, fewer bins are searched for.

    Raises:
        ValueError: If none are found.
    """
    bins = fill_bins(problem)
    most = len(problem.lengths) // problem.bins_per_step * problem.bins_per_step
    if len(bins) > most >= fewest_bins(problem):
        bins = search_bins(problem, most) or bins
    return split_costliest(problem, bins, problem.allowed_bins(len(bins)))


def _candidates(problem: PackingProblem, counts: Sequence[int]) -> Iterator[Microbatches]:
    """Yield one packing for each number of micro-batches."""
    if problem.synchronize == "microbatch":
        for microbatches in levelled_microbatches(problem, counts):
            yield _evened(problem, microbatches)
        return
    too_tight = True  # to choose ranks by load alone
    for count in counts:
        ranks = rank_bins(problem, count)
        if ranks is not None:
            too_tight = False
            yield microbatches_of(problem, even_out(problem, ranks))
    if too_tight:
        yield _evened(problem, next(levelled_microbatches(problem, counts)))


def _evened(problem: PackingProblem, microbatches: Microbatches) -> Microbatches:
    """Even out what waits for each other: the bins of each micro-batch, or the ranks."""
    if problem.synchronize == "step":
        ranks = even_out(problem, spread_over_ranks(problem, microbatches))
        return microbatches_of(problem, ranks)
    return [[lane[0] for lane in even_out(problem, [[b] for b in bins])] for bins in microbatches]
