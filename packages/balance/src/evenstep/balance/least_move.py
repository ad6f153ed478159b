"""Least move: reach a largest load while as little cost as possible leaves its home group.

Groups keep their counts, so samples move by exchanges: a heavy group gives `x`, a light one gives
`y` in return, and `x + y` is moved to shift a load of `x - y`. Text-only or short samples make
cheap company for a heavy one. The search:

1. A group whose costliest sample leaves room for nothing but the smallest ones is served first.
2. The heaviest group swaps one sample with whichever light group costs least to use, where load
   that stays above the limit counts `PATIENCE` times; where no swap helps, two for two samples,
   three for three; and again, until no group is above the limit.
3. If that gets stuck, the exchanges of `refine` finish the job; if those fail too, the groups that
   proved the limit reachable are taken instead, each at the home it shares most cost with.
4. Samples away from home go back wherever an exchange allows it within the limit (`send_home`):
   one for one, then up to three for three.

With nodes, cost that leaves its node counts `CROSSING` times. Everything is decided by costs and
indices alone, in a fixed order.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from math import fsum, inf

from evenstep.balance.order import decreasing, unranked
from evenstep.balance.placement import CROSSING, Exchange, Placement
from evenstep.balance.refine import Refinement
from evenstep.balance.send_home import send_home

PATIENCE = (3.0, 2.0, 8.0)
"""Weight of load that an exchange leaves above the limit, against cost that it moves: one per
start."""

THOROUGH = 512
"""Samples up to which a placement is improved further, and from `SMALL` on all starts are made."""

SMALL = 64
"""Samples up to which one start is made: it moves 1 to 5 % more than the best of all does, which
takes less time than the other starts would."""

LARGEST = 3
"""Most samples that a group gives in one exchange."""

MIN_PROGRESS = 1e-6
"""Share of the load above the limit that an exchange takes off at least."""

PARTNERS = 12
"""Lightest groups that are asked for an exchange before all are."""

SMALLEST = 3
"""Smallest samples of a light group that may be given in return, before all may."""

TIGHT = 0.95
"""A group is served first if its costliest sample and the smallest fill this share of the limit."""


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
    at_home: list[list[int]] = [[] for _ in reachable]
    for i, home in enumerate(homes):
        at_home[home].append(i)
    few = len(costs) <= THOROUGH
    found = []
    reached: list[list[int]] = []  # most starts come to the same placement
    for patience in PATIENCE if few and len(costs) > SMALL else PATIENCE[:1]:
        search = _Search(Placement(costs, homes, at_home, groups_per_node), limit)
        search.seat_tight_groups()
        placement = search.placement
        if not search.lower(patience):
            groups = search.refined() or _nearest_homes(costs, homes, reachable)
            placement = Placement(costs, homes, groups, groups_per_node)
        if placement.group_of in reached:
            continue
        reached.append([*placement.group_of])
        send_home(placement, limit, 1)
        found.append(placement)
    best = min(found, key=Placement.price)
    if few:
        send_home(best, limit, LARGEST)
    return [sorted(i for _, i in members) for members in best.members]


class _Search:
    """Brings a placement below the limit."""

    def __init__(self, placement: Placement, limit: float) -> None:
        self.placement, self.limit = placement, limit
        self.seated: set[int] = set()

    def seat_tight_groups(self) -> None:
        """Give groups that have room for nothing but the smallest samples just those."""
        placement = self.placement
        smallest = sorted((cost, i) for i, cost in enumerate(placement.costs))
        tight = []
        for g, members in enumerate(placement.members):
            if placement.loads[g] > self.limit:
                company = fsum(cost for cost, _ in islice(smallest, len(members) - 1))
                if members[-1][0] + company > TIGHT * self.limit:
                    tight.append((-members[-1][0], g))
        for _, g in sorted(tight):
            members = placement.members[g]
            for cost, i in smallest:
                excess = placement.loads[g] - self.limit
                if excess <= 0:
                    break
                other = placement.group_of[i]
                if other == g or other in self.seated:
                    continue
                place = min(bisect_left(members, (excess + cost, -1)), len(members) - 2)
                if place < 0 or members[place][0] <= cost:
                    break
                placement.apply(Exchange(g, (members[place][1],), other, (i,)))
            self.seated.add(g)

    def lower(self, patience: float) -> bool:
        """Exchange, once per sample at most, until no group is above the limit.

        Returns:
            Whether that succeeded.
        """
        placement = self.placement
        if placement.has_nodes:
            patience *= CROSSING - 1  # moved cost weighs more there
        for _ in placement.costs:  # an excess of mere rounding might go on for ever
            load, heavy = placement.rising[-1]
            if load <= self.limit:
                break
            exchange = self._best_exchange(heavy, patience, 1, PARTNERS, SMALLEST)
            if not exchange:
                exchange = self._best_exchange(heavy, patience, 1, len(placement.loads))
            for size in placement.sizes(heavy, LARGEST):
                exchange = exchange or self._best_exchange(heavy, patience, size, PARTNERS)
            if not exchange:
                break
            placement.apply(exchange)
        return placement.rising[-1][0] <= self.limit

    def refined(self) -> list[list[int]] | None:
        """Let `refine` bring the groups below the limit; return them, or None if it fails."""
        placement = self.placement
        order = decreasing(placement.costs)
        groups: list[list[int]] = [[] for _ in placement.members]
        for rank, i in enumerate(order):
            groups[placement.group_of[i]].append(rank)
        size = len(groups[0])
        falling = [placement.costs[i] for i in order]
        search = Refinement(falling, groups, least=size, most=size, target=self.limit)
        refined = unranked(order, search.run())
        return refined if max(search.loads) <= self.limit else None

    def _best_exchange(
        self,
        heavy: int,
        patience: float,
        size: int,
        n_partners: int,
        n_smallest: int | None = None,
    ) -> Exchange | None:
        """Return the exchange of lowest price that gets `heavy` closer to the limit.

        Args:
            heavy: A group above the limit.
            patience: Weight of load that stays above the limit.
            size: Samples that either group gives.
            n_partners: Lightest groups that are asked.
            n_smallest: Cheapest subsets of a light group that are considered; None: all.
        """
        placement, weight = self.placement, self.placement.weight
        excess = placement.loads[heavy] - self.limit
        costs, leaving, samples = placement.subsets(heavy, size)
        tolerable = excess * (1 - MIN_PROGRESS)
        native = not any(leaving)  # then `shifted + 2 * taken_cost` at least is moved
        lowest, best = inf, None
        for light in self._partners(heavy, n_partners):
            room = self.limit - placement.loads[light]
            shifted = min(excess, room)
            floor = patience * (excess - shifted) + shifted if native else -inf
            listed = zip(*placement.subsets(light, size), strict=True)
            for taken_cost, taken_leaving, taken in islice(listed, n_smallest):
                if floor + 2 * taken_cost >= lowest and not taken_leaving:
                    continue
                for at in _places(costs, taken_cost + shifted, taken_cost + excess):
                    shift = costs[at] - taken_cost
                    above = excess - shift if shift < excess else 0.0
                    if shift > room:
                        above += shift - room
                    price = patience * above - leaving[at] - taken_leaving
                    if above > tolerable or price >= lowest:
                        continue
                    for i in samples[at]:
                        price += weight(i, light)
                    for i in taken:
                        price += weight(i, heavy)
                    if price < lowest:
                        lowest, best = price, Exchange(heavy, samples[at], light, taken)
        return best

    def _partners(self, heavy: int, count: int) -> Iterator[int]:
        """Yield the `count` lightest groups with room, and those of the same node."""
        placement = self.placement
        per_node = placement.groups_per_node
        for at, (load, g) in enumerate(placement.rising):
            if load >= self.limit or (at >= count and not placement.has_nodes):
                return
            if g not in self.seated and (at < count or g // per_node == heavy // per_node):
                yield g


def _places(rising: Sequence[float], fitting: float, enough: float) -> list[int]:
    """Return the places of the most that is `fitting`, of the next, and of just `enough`."""
    after = bisect_right(rising, fitting)
    places = [after - 1] if after else []
    if after < len(rising):
        places.append(after)
        least = bisect_left(rising, enough, after)
        if after < least < len(rising):
            places.append(least)
    return places


def _nearest_homes(
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
