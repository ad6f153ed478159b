"""Bins filled in arrival order, to compare with: how Megatron-Core's `dp_balanced` fills them.

As publicly described: a bin is closed by the first sequence that it has no room for; while the
number of bins is not a multiple of the ranks (and of what the pipeline demands), the last bin of
several sequences gives its last one to a new bin; consecutive bins make a micro-batch. The load
is never looked at.
"""

from evenstep.balance.packing_fill import Sequences
from evenstep.balance.packing_problem import PackingProblem


def arrival_bins(problem: PackingProblem) -> list[Sequences]:
    """Fill one bin after the other in arrival order."""
    bins: list[Sequences] = []
    room = 0
    for index, length in enumerate(problem.lengths):
        if not bins or length > room or len(bins[-1]) == problem.max_sequences:
            bins.append([])
            room = problem.capacity
        bins[-1].append(index)
        room -= length
    return bins


def arrival_microbatches(problem: PackingProblem) -> list[list[Sequences]]:
    """Return `[micro-batch][rank]`, the bins in arrival order.

    Raises:
        ValueError: If the sequences do not suffice for the number of bins that they need.
    """
    bins = arrival_bins(problem)
    count = problem.allowed_bins(len(bins))
    last = len(bins) - 1
    while len(bins) < count:
        if len(bins[last]) > 1:
            bins.append([bins[last].pop()])
        else:
            last -= 1
    return [bins[at : at + problem.num_ranks] for at in range(0, count, problem.num_ranks)]
