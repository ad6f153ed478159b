"""Least move: reach a largest load while as little cost as possible leaves its home group.

Groups keep their counts, so samples move by swaps: a heavy group gives `x`, a light one gives `y`
in return, and `x + y` is moved to shift a load of `x - y`. Text-only or short samples make cheap
company for a heavy one. The search:

1. A group whose costliest sample leaves room for nothing but the smallest ones is served first.
2. The heaviest group swaps with whichever light group costs least to use, where load that stays
   above the limit counts `PATIENCE` times; and again, until no group is above the limit.
3. If that gets stuck, the exchanges of `refine` finish the job; if those fail too, the groups that
   proved the limit reachable are taken instead, each at the home it shares most cost with.
4. Samples away from home go back wherever a swap allows it within the limit.

With nodes, cost that leaves its node counts `CROSSING` times. Everything is decided by costs and
indices alone, in a fixed order.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import islice
from math import fsum, inf
from typing import NamedTuple

from evenstep.balance.order import decreasing, unranked
from evenstep.balance.refine import Refinement

PATIENCE = (4.0, 2.0, 8.0)
"""Weight of load that a swap leaves above the limit, against cost that it moves: one per start."""

MAX_RESTART = 512
"""Samples up to which all starts are made, and the one that moves least wins."""

CROSSING = 4.0
"""Weight of cost that leaves its node, against cost that moves inside it."""

MIN_PROGRESS = 1e-6
"""Share of the load above the limit that a swap takes off at least."""

MIN_GAIN = 1e-9
"""Relative gain below which sending a sample home is rounding, not progress."""

PARTNERS = 12
"""Lightest groups that are asked for a swap before all are."""

SMALLEST = 3
"""Smallest samples of a light group that may be given in return, before all may."""

TIGHT = 0.95
"""A group is served first if its costliest sample and the smallest fill this share of the limit."""


class Swap(NamedTuple):
    """A possible swap: the light group, and the places of both samples in their groups."""

    light: int
    given: int
    taken: int


def least_move_groups(
    costs: Sequence[float],
    homes: Sequence[int],
    *,
    limit: float,
    reachable: Sequence[Sequence[int]],
    groups_per_node: int | None = None,
) -> list[list[int]]:
    """Return groups of largest load `limit` at most that leave most of the cost at home.

    Args:
        costs: Checked costs.
        homes: Home group of every sample.
        limit: Largest load allowed, as `math.fsum` of a group's costs.
        reachable: Groups, as many samples each as they are home to, that keep the limit.
        groups_per_node: Groups per node: moves between the groups of a node are preferred.

    Returns:
        The samples of each group, by index.
    """
    starts = PATIENCE if len(costs) <= MAX_RESTART else PATIENCE[:1]
    found = [_searched(costs, homes, limit, reachable, groups_per_node, p) for p in starts]
    best = min(found, key=_Search.price)
    return [sorted(i for _, i in members) for members in best.members]


def _searched(
    costs: Sequence[float],
    homes: Sequence[int],
    limit: float,
    reachable: Sequence[Sequence[int]],
    groups_per_node: int | None,
    patience: float,
) -> "_Search":
    """Return the groups at the end of one search."""
    at_home: list[list[int]] = [[] for _ in reachable]
    for i, home in enumerate(homes):
        at_home[home].append(i)
    search = _Search(costs, homes, limit, groups_per_node, at_home)
    search.seat_tight_groups()
    if not search.lower(patience):
        groups = search.refined() or _at_home(costs, homes, reachable)
        search = _Search(costs, homes, limit, groups_per_node, groups)
    search.send_home()
    return search


class _Search:
    """The groups while samples move; the members of a group are (cost, index), rising."""

    def __init__(
        self,
        costs: Sequence[float],
        homes: Sequence[int],
        limit: float,
        groups_per_node: int | None,
        groups: Sequence[Sequence[int]],
    ) -> None:
        self.costs, self.homes, self.limit = costs, homes, limit
        self.nodes = groups_per_node is not None
        self.groups_per_node = groups_per_node or len(groups)
        self.members = [[(costs[i], i) for i in group] for group in groups]
        self.group_of = list(homes)
        for g, group in enumerate(groups):
            for i in group:
                self.group_of[i] = g
        for members in self.members:
            members.sort()
        self.loads = [fsum(cost for cost, _ in members) for members in self.members]
        self.rising = sorted((load, g) for g, load in enumerate(self.loads))
        self.seated: set[int] = set()

    def seat_tight_groups(self) -> None:
        """Give groups that have room for nothing but the smallest samples just those."""
        smallest = sorted((cost, i) for i, cost in enumerate(self.costs))
        tight = []
        for g, members in enumerate(self.members):
            if self.loads[g] > self.limit:
                company = fsum(cost for cost, _ in islice(smallest, len(members) - 1))
                if members[-1][0] + company > TIGHT * self.limit:
                    tight.append((-members[-1][0], g))
        for _, g in sorted(tight):
            for cost, i in smallest:
                excess = self.loads[g] - self.limit
                if excess <= 0:
                    break
                other = self.group_of[i]
                if other == g or other in self.seated:
                    continue
                members = self.members[g]
                place = min(bisect_left(members, (excess + cost, -1)), len(members) - 2)
                if place < 0 or members[place][0] <= cost:
                    break
                self._swap(g, place, other, self.members[other].index((cost, i)))
            self.seated.add(g)

    def price(self) -> float:
        """Return the cost away from home, weighted where it left its node."""
        return fsum(self._weight(i, g) for i, g in enumerate(self.group_of))

    def lower(self, patience: float) -> bool:
        """Swap until no group is above the limit; return whether that succeeded."""
        if self.nodes:
            patience *= CROSSING - 1  # moved cost weighs more there
        while self.rising[-1][0] > self.limit:
            heavy = self.rising[-1][1]
            swap = self._best_swap(heavy, patience, PARTNERS, SMALLEST)
            if swap is None:
                n_groups, size = len(self.members), len(self.members[heavy])
                swap = self._best_swap(heavy, patience, n_groups, size)
            if swap is None:
                return False
            self._swap(heavy, swap.given, swap.light, swap.taken)
        return True

    def refined(self) -> list[list[int]] | None:
        """Let `refine` bring the groups below the limit; return them, or None if it fails."""
        order = decreasing(self.costs)
        groups: list[list[int]] = [[] for _ in self.members]
        for rank, i in enumerate(order):
            groups[self.group_of[i]].append(rank)
        size = len(groups[0])
        falling = [self.costs[i] for i in order]
        search = Refinement(falling, groups, least=size, most=size, target=self.limit)
        refined = unranked(order, search.run())
        return refined if max(search.loads) <= self.limit else None

    def send_home(self) -> None:
        """Swap samples back to their homes as long as that saves moved cost."""
        while True:
            away = [i for i, g in enumerate(self.group_of) if g != self.homes[i]]
            returned = [self._send_home(i) for i in sorted(away, key=lambda i: (-self.costs[i], i))]
            if not any(returned):
                return

    def _send_home(self, i: int) -> bool:
        """Swap sample `i` with the one whose leaving its home saves most, if any does."""
        here, home, cost = self.group_of[i], self.homes[i], self.costs[i]
        best, saved = -1, self.limit * MIN_GAIN
        limit = self.limit * (1 - MIN_GAIN)  # sums that round stay below the limit itself
        room, spare = limit - self.loads[home], limit - self.loads[here]
        weight = self._weight(i, here)
        for place, (other_cost, other) in enumerate(self.members[home]):
            if -spare <= cost - other_cost <= room and i != other:
                price = self._weight(other, here) - self._weight(other, home)
                if weight - price > saved:
                    best, saved = place, weight - price
        if best < 0:
            return False
        self._swap(here, self.members[here].index((cost, i)), home, best)
        return True

    def _weight(self, i: int, group: int) -> float:
        """Return what having sample `i` in `group` costs: nothing at home, most in other nodes."""
        home = self.homes[i]
        if group == home:
            return 0.0
        same_node = group // self.groups_per_node == home // self.groups_per_node
        return self.costs[i] if same_node else self.costs[i] * CROSSING

    def _best_swap(
        self, heavy: int, patience: float, n_partners: int, n_smallest: int
    ) -> Swap | None:
        """Return the swap of lowest price that gets `heavy` closer to the limit."""
        members, excess = self.members[heavy], self.loads[heavy] - self.limit
        costs = [cost for cost, _ in members]
        leaving = [self._weight(i, heavy) for _, i in members]
        tolerable = excess * (1 - MIN_PROGRESS)
        lowest, best = inf, None
        for light in self._partners(heavy, n_partners):
            room = self.limit - self.loads[light]
            for taken, (taken_cost, other) in enumerate(self.members[light][:n_smallest]):
                returned = self._weight(other, heavy) - self._weight(other, light)
                # Just enough, and the most that fits or the least that does not.
                fits = bisect_right(costs, taken_cost + min(room, excess))
                for given in (bisect_left(costs, excess + taken_cost), fits - 1, fits):
                    if not 0 <= given < len(costs):
                        continue
                    shift = costs[given] - taken_cost
                    above = excess - shift if shift < excess else 0.0
                    if shift > room:
                        above += shift - room
                    price = patience * above - leaving[given] + returned
                    if above > tolerable or price >= lowest:
                        continue
                    price += self._weight(members[given][1], light)
                    if price < lowest:
                        lowest, best = price, Swap(light, given, taken)
        return best

    def _partners(self, heavy: int, count: int) -> list[int]:
        """Return the `count` lightest groups with room, and those of the same node."""
        node = heavy // self.groups_per_node
        return [
            g
            for at, (load, g) in enumerate(self.rising)
            if load < self.limit
            and g not in self.seated
            and (at < count or (self.nodes and g // self.groups_per_node == node))
        ]

    def _swap(self, one: int, place: int, other: int, other_place: int) -> None:
        """Swap two samples, given as places in the members of their groups."""
        given, taken = self.members[one].pop(place), self.members[other].pop(other_place)
        for group, member in ((one, taken), (other, given)):
            insort(self.members[group], member)
            self.group_of[member[1]] = group
            self.rising.remove((self.loads[group], group))
            self.loads[group] = fsum(cost for cost, _ in self.members[group])
            insort(self.rising, (self.loads[group], group))


def _at_home(
    costs: Sequence[float], homes: Sequence[int], groups: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the groups reordered so that each stands at a home it shares much cost with.

    The largest shared cost is served first, ties by group, then by home.
    """
    shared = [
        (-fsum(costs[i] for i in group if homes[i] == home), g, home)
        for g, group in enumerate(groups)
        for home in sorted({homes[i] for i in group})
    ]
    group_at: dict[int, int] = {}
    placed: set[int] = set()
    for _, g, home in sorted(shared):
        if g not in placed and home not in group_at:
            placed.add(g)
            group_at[home] = g
    rest = iter(g for g in range(len(groups)) if g not in placed)
    return [
        list(groups[group_at[home] if home in group_at else next(rest)])
        for home in range(len(groups))
    ]
