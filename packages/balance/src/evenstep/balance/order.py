"""The balanced order that the contract fixes: longest processing time first, equal counts.

R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969), is the source of the rule. Two
modules that never talk to each other rely on computing the very same permutation, so the rule and
both tie-breaks are part of the contract, and so is the arithmetic: a group's total is the float64
sum of its costs in the order in which they were placed.
"""

from collections.abc import Sequence
from heapq import heappop, heapreplace

from evenstep.balance.checks import checked_costs, checked_groups


def balanced_index_order(costs: Sequence[float], n_groups: int) -> list[int]:
    """Permute indices so that contiguous groups of equal size have balanced total cost.

    Items by decreasing cost, ties by index, each into the group of lowest total cost that still has
    room, ties by group index. O(n log n).

    Args:
        costs: Cost per item, finite and >= 0.
        n_groups: Number of contiguous groups; must divide `len(costs)`.

    Returns:
        A permutation of `range(len(costs))`, group by group, each group in the order of placement.

    Raises:
        ValueError: `n_groups` is not positive or does not divide `len(costs)`, or a cost is bad.
    """
    values = checked_costs(costs)
    size = checked_groups(len(values), n_groups)
    return [i for group in lpt_groups(values, n_groups, size, size) for i in group]


def decreasing(costs: Sequence[float]) -> list[int]:
    """Return the indices by decreasing cost, ties by index."""
    return sorted(range(len(costs)), key=costs.__getitem__, reverse=True)  # reverse keeps ties


def lpt_groups(costs: Sequence[float], n_groups: int, least: int, most: int) -> list[list[int]]:
    """Divide by longest processing time first into groups of `least` to `most` samples.

    A group is closed at `most` samples, and at `least` once the samples that remain are all needed
    to bring the other groups to `least`.

    Args:
        costs: Checked costs; `least * n_groups <= len(costs) <= most * n_groups`.
        n_groups: Number of groups.
        least: Fewest samples of a group.
        most: Most samples of a group.

    Returns:
        The samples of each group, in the order of placement.
    """
    groups: list[list[int]] = [[] for _ in range(n_groups)]
    waiting = [(0.0, g) for g in range(n_groups)]  # a heap: (total cost, group) of open groups
    spare = len(costs) - n_groups * least  # samples that no group needs to reach `least`
    for i in decreasing(costs):
        load, g = waiting[0]
        group = groups[g]
        while len(group) >= least and not spare:
            heappop(waiting)
            load, g = waiting[0]
            group = groups[g]
        spare -= len(group) >= least
        group.append(i)
        if len(group) == most:
            heappop(waiting)
        else:
            heapreplace(waiting, (load + costs[i], g))
    return groups
