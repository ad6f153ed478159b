"""The groups of one micro-batch: the lowest level for its sequences, and no rank idle."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from evenstep.balance.dynamic_cp_fill import (
    OpenGroup,
    by_falling_load,
    fill_microbatches,
    group_of,
)
from evenstep.balance.dynamic_cp_problem import DynamicProblem
from evenstep.balance.packing_bisect import lowest_level

PRECISION = 500
"""The level of a micro-batch is searched until it is known to one part in this many."""


def arranged(problem: DynamicProblem, sequences: Sequence[int]) -> list[OpenGroup]:
    """Arrange sequences into the groups of one micro-batch, with a low largest load.

    They are moldable tasks with a memory limit: at a given level, each takes the smallest group
    that holds its tokens and keeps its load within the level (Turek, Wolf and Yu 1992,
    "Approximate algorithms for scheduling parallelizable tasks"). The lowest level at which the
    groups fit side by side is found by bisection. If none does, one group of all ranks holds them.

    Args:
        problem: What is asked.
        sequences: Not empty, of at most as many tokens as all ranks together hold.
    """

    def attempt(level: int) -> list[OpenGroup] | None:
        chosen = {index: _size_at_level(problem, index, level) for index in sequences}
        order = by_falling_load(problem, chosen)
        filled = fill_microbatches(problem, level, chosen, order, max_microbatches=1)
        return filled[0].groups if len(filled) == 1 else None

    whole = group_of(problem, problem.sizes[-1], sequences)
    found = lowest_level(attempt, guess=whole.load, enough=4 * whole.load, precision=PRECISION)
    return without_idle(problem, found[1]) if found else [whole]


def without_idle(problem: DynamicProblem, groups: Sequence[OpenGroup]) -> list[OpenGroup]:
    """Return groups that use every rank.

    The costliest group that can use idle ranks takes them, again and again: one of several
    sequences is split into two of its size, one of a single sequence grows to the next size.
    Where none can, one group of all ranks holds everything.
    """
    idle = problem.num_ranks - sum(group.size.size for group in groups)
    serial = count()  # ties go to the older group
    queue = [(-group.load, next(serial), group) for group in groups]
    heapify(queue)
    settled: list[OpenGroup] = []
    while idle and queue:
        group = heappop(queue)[2]
        wider = _with_more_ranks(problem, group)
        more = sum(w.size.size for w in wider) - group.size.size
        if 0 < more <= idle:
            idle -= more
            for w in wider:
                heappush(queue, (-w.load, next(serial), w))
        else:
            settled.append(group)  # fewer ranks will be idle, not more
    settled += [group for _, _, group in sorted(queue, key=lambda entry: entry[:2])]
    if idle:
        everything = sorted(index for group in settled for index in group.sequences)
        return [group_of(problem, problem.sizes[-1], everything)]
    return settled


def _size_at_level(problem: DynamicProblem, index: int, level: int) -> int:
    """Return the smallest size for the sequence's tokens and the level, or of the least load."""
    length = problem.lengths[index]
    sizes = range(problem.least[index], len(problem.sizes))
    for k in sizes:
        if problem.sizes[k].load(length) <= level:
            return k
    return min(sizes, key=lambda k: (problem.sizes[k].load(length), k))


def _with_more_ranks(problem: DynamicProblem, group: OpenGroup) -> list[OpenGroup]:
    """Return what could stand in for the group on more ranks; nothing if it has them all."""
    if len(group.sequences) > 1:
        halves = [OpenGroup(group.size), OpenGroup(group.size)]
        for index in sorted(group.sequences, key=lambda i: (-problem.lengths[i], i)):
            min(halves, key=lambda half: half.load).add(problem, index)
        return halves
    larger = [size for size in problem.sizes if size.size > group.size.size]
    return [group_of(problem, larger[0], group.sequences)] if larger else []
