"""The balanced order that the contract fixes: longest processing time first, equal counts.

R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969), is the source of the rule. Two
modules that never talk to each other rely on computing the very same permutation, so the rule and
both tie-breaks are part of the contract, and so is the arithmetic: a group's total is the float64
sum of its costs in the order in which they were placed.

Planners work on *ranks*: the place of a sample when all are laid out by decreasing cost, ties by
index. Rank 0 is the costliest, and a group sorted by rank is a group sorted by cost.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heapreplace
from itertools import chain

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
    order = decreasing(values)
    return [*chain.from_iterable(deal_evenly(order, [values[i] for i in order], n_groups, size))]


def decreasing(costs: Sequence[float]) -> list[int]:
    """Return the indices by decreasing cost, ties by index: the sample of every rank."""
    return sorted(range(len(costs)), key=costs.__getitem__, reverse=True)  # reverse keeps ties


def unranked(order: Sequence[int], groups: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return groups of ranks as groups of sample indices, `order` being `decreasing(costs)`."""
    return [[order[rank] for rank in group] for group in groups]


def deal_evenly(
    items: Iterable[int], falling: Sequence[float], n_groups: int, size: int
) -> list[list[int]]:
    """Deal out items by longest processing time first, equally many to each group.

    As `deal` does with one size, without what only a choice of sizes needs.

    Args:
        items: What is dealt.
        falling: The cost of each, `size * n_groups` of them.
        n_groups: Number of groups.
        size: Items of a group.

    Returns:
        The items of each group, in their order.
    """
    groups: list[list[int]] = [[] for _ in range(n_groups)]
    open_groups = [(0.0, g) for g in range(n_groups)]  # a heap of (total cost, group)
    for item, cost in zip(items, falling, strict=True):
        load, g = open_groups[0]
        group = groups[g]
        group.append(item)
        if len(group) == size:
            heappop(open_groups)
        else:
            heapreplace(open_groups, (load + cost, g))
    return groups


def deal(falling: Sequence[float], n_groups: int, least: int, most: int) -> list[list[int]]:
    """Deal out samples by longest processing time first.

    A group is closed at `most` samples, and at `least` once the samples that remain are all needed
    to bring the other groups to `least`.

    Args:
        falling: Cost of every rank; `least * n_groups <= len(falling) <= most * n_groups`.
        n_groups: Number of groups.
        least: Fewest samples of a group.
        most: Most samples of a group.

    Returns:
        The ranks of each group, rising.
    """
    groups: list[list[int]] = [[] for _ in range(n_groups)]
    open_groups = [(0.0, g) for g in range(n_groups)]  # a heap of (total cost, group)
    spare = len(falling) - n_groups * least  # samples that no group needs to reach `least`
    for rank, cost in enumerate(falling):
        load, g = open_groups[0]
        group = groups[g]
        while len(group) >= least and not spare:
            heappop(open_groups)
            load, g = open_groups[0]
            group = groups[g]
        if len(group) >= least:
            spare -= 1
        group.append(rank)
        if len(group) == most:
            heappop(open_groups)
        else:
            heapreplace(open_groups, (load + cost, g))
    return groups
