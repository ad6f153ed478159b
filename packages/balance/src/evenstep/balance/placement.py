"""Which group every sample is in, what the groups weigh, and what being away from home costs.

The state that the search for least move changes: samples change sides by exchanges of equally many,
so groups keep their counts. Small subsets of a group are listed by cost, once per change.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import comb, fsum
from typing import NamedTuple

CROSSING = 4.0
"""Weight of cost that leaves its node, against cost that moves inside it."""

MAX_SUBSETS = 128
"""Subsets of one size that are listed for a group; larger sizes are not tried."""


class Subsets(NamedTuple):
    """Subsets of equal size of a group, by rising cost; ties by the rising samples they are of."""

    costs: list[float]
    away: list[float]
    """Weight of the cost that is away from home."""
    samples: list[tuple[int, ...]]


class Exchange(NamedTuple):
    """Equally many samples that two groups give each other."""

    one: int
    given: tuple[int, ...]
    """Samples that leave group `one` for group `other`."""
    other: int
    taken: tuple[int, ...]
    """Samples that leave group `other` for group `one`."""


class Placement:
    """Samples in groups, while they move.

    Args:
        costs: Cost of every sample.
        homes: Home group of every sample.
        groups: The samples of each group.
        groups_per_node: Groups per node; None: one node.
    """

    def __init__(
        self,
        costs: Sequence[float],
        homes: Sequence[int],
        groups: Sequence[Iterable[int]],
        groups_per_node: int | None,
    ) -> None:
        self.costs, self.homes = costs, homes
        self.has_nodes = groups_per_node is not None
        self.groups_per_node = groups_per_node or len(groups)
        self.members = [sorted((costs[i], i) for i in group) for group in groups]  # (cost, index)
        self.group_of = list(homes)
        for g, members in enumerate(self.members):
            for _, i in members:
                self.group_of[i] = g
        self.loads = [fsum(cost for cost, _ in members) for members in self.members]
        self.rising = sorted((load, g) for g, load in enumerate(self.loads))
        self.changes = [0] * len(groups)
        """How often each group has changed."""
        self._subsets: list[dict[int, Subsets]] = [{} for _ in groups]

    def price(self) -> float:
        """Return the cost away from home, weighted where it left its node."""
        return fsum(self.weight(i, g) for i, g in enumerate(self.group_of))

    def weight(self, i: int, group: int) -> float:
        """Return what having sample `i` in `group` costs: nothing at home, most in other nodes."""
        home = self.homes[i]
        if group == home:
            return 0.0
        same_node = group // self.groups_per_node == home // self.groups_per_node
        return self.costs[i] if same_node else self.costs[i] * CROSSING

    def savings(self, group: int, destination: int) -> list[float]:
        """Return what each member of `group` saves, or if negative costs, by going to another."""
        members, homes = self.members[group], self.homes
        if self.has_nodes:
            return [self.weight(i, group) - self.weight(i, destination) for _, i in members]
        return [
            cost if homes[i] == destination else -cost if homes[i] == group else 0.0
            for cost, i in members
        ]

    def sizes(self, group: int, most: int) -> Iterable[int]:
        """Return the sizes up to `most` whose subsets of a group are few enough to list."""
        n = len(self.members[group])
        return (size for size in range(1, min(n, most) + 1) if comb(n, size) <= MAX_SUBSETS)

    def subsets(self, group: int, size: int) -> Subsets:
        """Return the subsets of `size` samples of a group."""
        known = self._subsets[group]
        if size not in known:
            costs, samples = zip(*self.members[group], strict=True)
            away = [0.0 if self.homes[i] == group else self.weight(i, group) for i in samples]
            known[size] = _subsets(costs, away, samples, size)
        return known[size]

    def apply(self, exchange: Exchange) -> None:
        """Let two groups exchange samples."""
        one, given, other, taken = exchange
        for source, destination, samples in ((one, other, given), (other, one, taken)):
            for i in samples:
                self.members[source].remove((self.costs[i], i))
                insort(self.members[destination], (self.costs[i], i))
                self.group_of[i] = destination
        for group in (one, other):
            self.rising.remove((self.loads[group], group))
            self.loads[group] = fsum(cost for cost, _ in self.members[group])
            insort(self.rising, (self.loads[group], group))
            self.changes[group] += 1
            self._subsets[group].clear()


def _subsets(
    costs: Sequence[float], away: Sequence[float], samples: Sequence[int], size: int
) -> Subsets:
    """Return the subsets of `size` of samples that rise by cost."""
    if size == 1:
        return Subsets([*costs], [*away], [(i,) for i in samples])
    totals = [*map(fsum, combinations(costs, size))]
    totals_away = [*map(fsum, combinations(away, size))] if any(away) else [0.0] * len(totals)
    chosen = [*combinations(samples, size)]
    order = sorted(range(len(totals)), key=totals.__getitem__)
    return Subsets(
        [*map(totals.__getitem__, order)],
        [*map(totals_away.__getitem__, order)],
        [*map(chosen.__getitem__, order)],
    )
