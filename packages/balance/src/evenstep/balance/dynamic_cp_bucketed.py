"""Dynamic context parallelism as Megatron-Core's `default_dynamic_cp` does it, to compare with.

Our own reading of how it is publicly described, not a port, and simpler: sequences are bucketed by
the CP size that their tokens need; a micro-batch takes the longest that are left, each into a new
group while ranks are free, else into the group of its size with the least load; it is closed once
its ranks are even, or nothing fits; groups grow until no rank is idle.
"""

from collections.abc import Sequence

from evenstep.balance.dynamic_cp_fill import OpenGroup
from evenstep.balance.dynamic_cp_groups import without_idle
from evenstep.balance.dynamic_cp_problem import DynamicProblem

EVEN = 20
"""Ranks are even if their loads differ by at most one part in this many of the largest."""


def bucketed_microbatches(problem: DynamicProblem) -> list[list[OpenGroup]]:
    """Return the groups of each micro-batch; the load counts communication only if priced."""
    waiting = sorted(range(len(problem.lengths)), key=lambda i: (-problem.lengths[i], i))
    microbatches: list[list[OpenGroup]] = []
    while waiting:
        groups, waiting = _one_microbatch(problem, waiting)
        microbatches.append(without_idle(problem, groups))
    return microbatches


def _one_microbatch(
    problem: DynamicProblem, waiting: Sequence[int]
) -> tuple[list[OpenGroup], list[int]]:
    """Fill the groups of one micro-batch; return them and the sequences that are left."""
    groups: list[OpenGroup] = []
    left: list[int] = []
    free = problem.num_ranks
    for at, index in enumerate(waiting):
        size = problem.sizes[problem.least[index]]
        room = size.capacity - problem.lengths[index]
        fitting = [g for g in groups if g.size is size and g.tokens <= room]
        if free >= size.size:
            groups.append(OpenGroup(size))
            groups[-1].add(problem, index)
            free -= size.size
        elif fitting:
            min(fitting, key=lambda group: group.load).add(problem, index)
        else:
            left.append(index)
            continue
        loads = [group.load for group in groups]
        if not free and (max(loads) - min(loads)) * EVEN <= max(loads):
            return groups, [*left, *waiting[at + 1 :]]
    return groups, left
