"""Least move, the last step: samples go back home wherever that saves moved cost.

An exchange that saves moved cost sends some sample home. So for each sample that is away, and each
small subset of company from its group, the subsets of its home that keep both groups within the
limit form a range of the list by cost, found by bisection; the one that saves most is taken.
"""

from bisect import bisect_left, bisect_right
from itertools import combinations
from math import fsum, inf
from typing import TypeAlias

from evenstep.balance.placement import Exchange, Placement

MIN_GAIN = 1e-9
"""Relative gain below which sending a sample home is rounding, not progress."""

_Companion: TypeAlias = tuple[int, float, float]
"""A sample that goes along, its cost, and what it saves by that."""


def send_home(placement: Placement, limit: float, most: int) -> None:
    """Exchange samples as long as that saves moved cost and keeps the limit.

    Every group is within the limit. A pass over the samples that are away, costliest first, takes
    O(C(m, most - 1) log m) each for groups of `m` samples; passes go on until one finds nothing.

    Args:
        placement: Groups; changed in place.
        limit: Largest load allowed.
        most: Most samples that a group gives in one exchange.
    """
    costs, homes, group_of = placement.costs, placement.homes, placement.group_of
    seen: dict[int, tuple[int, int, int]] = {}  # where and when a sample found no way home
    returned = True
    while returned:
        returned = False
        away = [i for i, g in enumerate(group_of) if g != homes[i] and costs[i] > 0]
        for i in sorted(away, key=lambda i: (-costs[i], i)):
            here, home = group_of[i], homes[i]
            when = here, placement.changes[here], placement.changes[home]
            if here == home or seen.get(i) == when:
                continue
            if exchange := _way_home(placement, i, limit, most):
                placement.apply(exchange)
                returned = True
            else:
                seen[i] = when


def _way_home(placement: Placement, i: int, limit: float, most: int) -> Exchange | None:
    """Return the exchange with sample `i` that saves most, of the smallest size that saves."""
    here, home = placement.group_of[i], placement.homes[i]
    limit *= 1 - MIN_GAIN  # sums that round stay below the limit itself
    room, spare = limit - placement.loads[home], limit - placement.loads[here]
    own_cost, own_saving = placement.costs[i], placement.weight(i, here)
    saved, best = limit * MIN_GAIN, None
    company: list[_Companion] = []
    for size in placement.sizes(home, most):
        if size == 2:
            company = _company(placement, i, room - saved, most)
        if len(company) < size - 1:
            break
        costs, away, samples = placement.subsets(home, size)
        for companions in combinations(company, size - 1):
            cost, saving = own_cost, own_saving
            for _, more_cost, more_saving in companions:
                cost += more_cost
                saving += more_saving
            for at in range(bisect_left(costs, cost - room), bisect_right(costs, cost + spare)):
                if saving + 2 * away[at] - costs[at] <= saved:
                    continue
                both = saving + away[at] - fsum(placement.weight(j, here) for j in samples[at])
                if both > saved:
                    given = (i, *[j for j, _, _ in companions])
                    saved, best = both, Exchange(here, given, home, samples[at])
        if best:
            return best
    return None


def _company(placement: Placement, i: int, room: float, most: int) -> list[_Companion]:
    """Return the samples with which `i` may go home, so that more is saved than without.

    What comes in return costs `room` less at most, and saves twice what is away of it, less its
    cost, at most. So company must not cost much more than it saves itself.
    """
    here, home = placement.group_of[i], placement.homes[i]
    made_up = 2 * fsum(sorted(placement.subsets(home, 1).away)[-most:])
    margin = room + made_up + placement.weight(i, here) - placement.costs[i]
    if placement.has_nodes:  # where a sample may save more than it costs
        margin = inf
    savings = placement.savings(here, home)
    return [
        (j, cost, saving)
        for (cost, j), saving in zip(placement.members[here], savings, strict=True)
        if cost - saving < margin and j != i
    ]
