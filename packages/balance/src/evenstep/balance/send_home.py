"""Least move, the last step: samples go back home wherever that saves moved cost.

An exchange that saves moved cost sends some sample home. So for each sample that is away, and each
small subset of company from its group, the subsets of its home that keep both groups within the
limit form a range of the list by cost, found by bisection; the one that saves most is taken.
"""

from bisect import bisect_left, bisect_right
from math import fsum

from evenstep.balance.placement import Exchange, Placement

MIN_GAIN = 1e-9
"""Relative gain below which sending a sample home is rounding, not progress."""


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
    saved, best = limit * MIN_GAIN, None
    enters: dict[int, float] = {}  # what having the samples of `home` in `here` costs
    for size in placement.sizes(home, most):
        costs, away, samples = placement.subsets(home, size)
        native = not any(away)
        for total, gone, given in zip(*placement.subsets(here, size), strict=True):
            # What does not leave for its home leaves it, so a subset saves `2 * away - cost` at
            # most, less what comes for it, which is all at home: `cost - room` or more.
            if native and 2 * gone - (total if total < room else 2 * total - room) <= saved:
                continue
            if i not in given:
                continue
            first, end = bisect_left(costs, total - room), bisect_right(costs, total + spare)
            if first == end:
                continue
            enters = enters or {j: placement.weight(j, here) for _, j in placement.members[home]}
            saving = gone - fsum([placement.weight(j, home) for j in given if j != i])
            for at in range(first, end):
                if saving + 2 * away[at] - costs[at] <= saved:
                    continue
                both = saving + away[at] - fsum(map(enters.__getitem__, samples[at]))
                if both > saved:
                    saved, best = both, Exchange(here, given, home, samples[at])
        if best:
            return best
    return None
