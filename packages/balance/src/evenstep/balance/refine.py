"""Local search on groups: exchange a few samples between a heavy and a light group.

Two groups that differ in load by `2 d` are both as light as they can be when samples worth `d`
change sides. With the subsets of both groups sorted by cost, one merge finds the pair whose
difference comes closest to `d`, as in Horowitz and Sahni, "Computing partitions with applications
to the knapsack problem" (1974). Single samples come first; two for two, three for three and so on
follow where single ones no longer help.

The search ends when the largest load is down to the target, or when no exchange that it knows
lowers the heaviest group. It never ends above where it started. Loads are `math.fsum` of their
costs, hence independent of the order of samples; ties go to the lower index.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from math import comb, fsum
from typing import NamedTuple

from evenstep.balance.bounds import max_load_bound
from evenstep.balance.order import deal, decreasing, unranked

MAX_SUBSETS = 600
"""Subsets of one size that are listed for a group; larger sizes are not tried."""

MAX_PARTNERS = 16
"""Lightest groups that are asked for an exchange of more than one sample."""

MAX_RESTART = 256
"""Samples up to which a second start is tried: few samples leave the search stuck more often."""

MIN_GAIN = 1e-9
"""Relative gain below which an exchange is rounding, not progress."""

MIN_ROUND_GAIN = 1e-4
"""Relative gain below which pairing off all groups once more is not worth a round."""


class Subsets(NamedTuple):
    """Subsets of equal size of a group, by falling cost."""

    costs: list[float]
    ranks: list[tuple[int, ...]]


class Exchange(NamedTuple):
    """Samples that two groups could exchange, and the larger load of the two afterwards."""

    max_load: float
    light: int
    given: tuple[int, ...]
    taken: tuple[int, ...]


class Refinement:
    """Groups of ranks while they change.

    Args:
        falling: Cost of every rank.
        groups: Ranks of each group, rising; each group has `least` to `most` of them.
        least: Fewest samples of a group.
        most: Most samples of a group.
        target: Largest load at which the search is content.
    """

    def __init__(
        self,
        falling: Sequence[float],
        groups: Iterable[Iterable[int]],
        *,
        least: int,
        most: int,
        target: float,
    ) -> None:
        self.falling = falling
        self.groups = [list(group) for group in groups]
        self.loads = [self._load(group) for group in self.groups]
        self.least, self.most, self.target = least, most, target
        self._subsets: list[dict[int, Subsets]] = [{} for _ in self.groups]

    def run(self) -> list[list[int]]:
        """Search until the target is met or nothing helps, and return the groups."""
        self._pair_off()
        while max(self.loads) > self.target:
            rising = self._rising()
            heavy = max(rising, key=lambda g: (self.loads[g], -g))
            partners = [g for g in rising if g != heavy]
            exchange = self._best_partner(heavy, partners, 1)
            for size in range(2, len(self.groups[heavy]) // 2 + 1):
                if exchange or comb(len(self.groups[heavy]), size) > MAX_SUBSETS:
                    break
                exchange = self._best_partner(heavy, partners[:MAX_PARTNERS], size)
            if not exchange:
                break
            self._apply(heavy, exchange)
        return self.groups

    def _pair_off(self) -> None:
        """Let the heaviest exchange with the lightest, the second with the second, and again."""
        before = float("inf")
        while self.target < (worst := max(self.loads)) < before * (1 - MIN_ROUND_GAIN):
            before = worst
            rising = self._rising()
            for light, heavy in zip(rising, reversed(rising[len(rising) // 2 :]), strict=False):
                if self.loads[heavy] <= self.target:
                    break
                if light != heavy and (exchange := self._best_exchange(heavy, light, 1)):
                    self._apply(heavy, exchange)

    def _rising(self) -> list[int]:
        """Return the groups by rising load, ties by index."""
        return sorted(range(len(self.loads)), key=self.loads.__getitem__)

    def _best_partner(self, heavy: int, partners: list[int], size: int) -> Exchange | None:
        """Return the best exchange of `size` samples with one of `partners`, lightest first."""
        best: Exchange | None = None
        for light in partners:
            if best and (self.loads[heavy] + self.loads[light]) / 2 >= best.max_load:
                break  # neither this group nor the heavier ones after it can do better
            exchange = self._best_exchange(heavy, light, size)
            if exchange and (not best or exchange.max_load < best.max_load):
                best = exchange
                if best.max_load <= self.target:
                    break
        return best

    def _best_exchange(self, heavy: int, light: int, size: int) -> Exchange | None:
        """Return the best exchange where one side gives `size` samples, the other at most that."""
        half = (self.loads[heavy] - self.loads[light]) / 2
        error = half - self.loads[heavy] * MIN_GAIN
        best: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        for n_given, n_taken in self._sizes(heavy, light, size):
            given, taken = self._list(heavy, n_given), self._list(light, n_taken)
            error, at, other = _closest(given.costs, taken.costs, half, error)
            if at >= 0:
                best = given.ranks[at], taken.ranks[other]
        if best is None:
            return None
        return Exchange(self.loads[heavy] - half + error, light, *best)

    def _sizes(self, heavy: int, light: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield how many samples both sides may give so that their counts stay allowed."""
        if self.least == self.most:
            yield size, size
            return
        n_heavy, n_light = len(self.groups[heavy]), len(self.groups[light])
        for given, taken in product(range(size + 1), repeat=2):
            surplus = given - taken
            if (
                max(given, taken) == size
                and given <= n_heavy
                and taken <= n_light
                and self.least <= n_heavy - surplus
                and n_light + surplus <= self.most
                and self.least <= n_light + surplus
                and n_heavy - surplus <= self.most
                and comb(n_light, taken) <= MAX_SUBSETS
            ):
                yield given, taken

    def _list(self, group: int, size: int) -> Subsets:
        known = self._subsets[group]
        if size not in known:
            chosen = list(combinations(self.groups[group], size))
            costs = [self._load(ranks) for ranks in chosen]
            if size > 1:
                order = sorted(range(len(chosen)), key=costs.__getitem__, reverse=True)
                chosen, costs = [chosen[i] for i in order], [costs[i] for i in order]
            known[size] = Subsets(costs, chosen)
        return known[size]

    def _load(self, group: Iterable[int]) -> float:
        return fsum(map(self.falling.__getitem__, group))

    def _apply(self, heavy: int, exchange: Exchange) -> None:
        light = exchange.light
        for ranks, source, destination in (
            (exchange.given, heavy, light),
            (exchange.taken, light, heavy),
        ):
            for rank in ranks:
                self.groups[source].remove(rank)
                insort(self.groups[destination], rank)
        for group in (heavy, light):
            self.loads[group] = self._load(self.groups[group])
            self._subsets[group].clear()


def _closest(
    given: list[float], taken: list[float], half: float, error: float
) -> tuple[float, int, int]:
    """Return where `given[i] - taken[j]` comes closest to `half`, if closer than `error`.

    Both lists fall. The result is the new error and both places, -1 where nothing is closer.
    """
    best, other = -1, -1
    at, end = 0, len(taken)
    for i, cost in enumerate(given):
        wanted = cost - half
        while at < end and taken[at] > wanted:
            at += 1
        if at < end and wanted - taken[at] < error:
            error, best, other = wanted - taken[at], i, at
        if at and taken[at - 1] - wanted < error:
            error, best, other = taken[at - 1] - wanted, i, at - 1
    return error, best, other


def refined_groups(
    costs: Sequence[float], n_groups: int, *, least: int, most: int, tolerance: float
) -> list[list[int]]:
    """Divide samples into groups of low largest load: longest first, then local search.

    Where that misses the target on few samples, the search starts again from a deal to and fro
    (ranks 0 .. k-1, then k-1 .. 0), and the better result stays.

    Args:
        costs: Checked costs; `least * n_groups <= len(costs) <= most * n_groups`.
        n_groups: Number of groups.
        least: Fewest samples of a group.
        most: Most samples of a group.
        tolerance: The search is content at `(1 + tolerance)` times the lower bound.

    Returns:
        The samples of each group, by decreasing cost, ties by index. The largest load is never
        above that of longest processing time first.
    """
    order = decreasing(costs)
    falling = [costs[i] for i in order]
    target = max_load_bound(costs, n_groups, least) * (1 + tolerance)
    start = deal(falling, n_groups, least, most)
    search = Refinement(falling, start, least=least, most=most, target=target)
    search.run()
    if max(search.loads) > target and least == most and len(costs) <= MAX_RESTART:
        again = Refinement(
            falling, _to_and_fro(len(costs), n_groups), least=least, most=most, target=target
        )
        again.run()
        search = min(search, again, key=lambda found: max(found.loads))
    return unranked(order, search.groups)


def _to_and_fro(n: int, n_groups: int) -> list[list[int]]:
    """Return ranks dealt to and fro over the groups."""
    groups: list[list[int]] = [[] for _ in range(n_groups)]
    for rank in range(n):
        row, at = divmod(rank, n_groups)
        groups[n_groups - 1 - at if row % 2 else at].append(rank)
    return groups
