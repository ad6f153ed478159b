"""Samples that may change their micro-batch as well: arrangements across the slots of a window.

Every (slot, group) keeps its sample count. Two objectives: every micro-batch ends in a
synchronisation, and a window takes the sum over slots of the largest load; or only the step does,
and it takes the largest total of a group.
"""

from collections.abc import Sequence
from itertools import chain
from math import fsum

from evenstep.balance.refine import refined_groups

SlotGroups = list[list[list[int]]]
"""Per slot, per group, the window-global sample indices."""


def synced_cost(costs: Sequence[float], slots: SlotGroups) -> float:
    """Return the sum over slots of the largest load."""
    return fsum(max(fsum(costs[i] for i in group) for group in groups) for groups in slots)


def spread_per_step(costs: Sequence[float], n_slots: int, n_groups: int, tol: float) -> SlotGroups:
    """Return groups of low largest total; each group's own slots are balanced as well."""
    size = len(costs) // n_groups
    totals = refined_groups(costs, n_groups, least=size, most=size, tolerance=tol)
    return in_slots(costs, totals, n_slots, tol)


def in_slots(
    costs: Sequence[float], totals: Sequence[Sequence[int]], n_slots: int, tol: float
) -> SlotGroups:
    """Divide the samples of every group evenly over the slots, the heaviest share first."""
    shares = []
    for group in totals:
        size = len(group) // n_slots
        bins = _bins(costs, list(group), n_slots, size, tol)
        shares.append(sorted(bins, key=lambda b: -fsum(costs[i] for i in b)))
    return [list(groups) for groups in zip(*shares, strict=True)]


def spread_per_microbatch(
    costs: Sequence[float], n_slots: int, n_groups: int, tol: float
) -> SlotGroups:
    """Return slots of low summed largest load.

    All `n_slots * n_groups` bins are balanced at once and sorted into slots by load. Where a giant
    sample lifts the first slot, the other bins of that slot are filled up to the giant's load with
    costlier samples, and the remaining slots are arranged again without them. The better of both
    is returned, or the balance within each source slot if that is better still.
    """
    size = len(costs) // (n_slots * n_groups)
    per_slot = n_groups * size
    own = [
        _bins(costs, list(range(s * per_slot, (s + 1) * per_slot)), n_groups, size, tol)
        for s in range(n_slots)
    ]
    plain = _sorted_slots(costs, list(range(len(costs))), n_slots, n_groups, tol)
    filled: SlotGroups = []
    left, slots = list(range(len(costs))), plain
    for remaining in range(n_slots, 1, -1):
        chosen = _filled(costs, slots)
        filled.append(_bins(costs, chosen, n_groups, size, tol))
        taken = set(chosen)
        left = [i for i in left if i not in taken]
        slots = _sorted_slots(costs, left, remaining - 1, n_groups, tol)
    filled += slots
    return min((own, plain, filled), key=lambda found: synced_cost(costs, found))


def _sorted_slots(
    costs: Sequence[float], samples: list[int], n_slots: int, n_groups: int, tol: float
) -> SlotGroups:
    """Return the samples in balanced bins, bins of similar load in the same slot."""
    n_bins = n_slots * n_groups
    bins = _bins(costs, samples, n_bins, len(samples) // n_bins, tol)
    bins.sort(key=lambda b: -fsum(costs[i] for i in b))
    return [bins[s * n_groups : (s + 1) * n_groups] for s in range(n_slots)]


def _filled(costs: Sequence[float], slots: SlotGroups) -> list[int]:
    """Return the samples of the first slot once its lighter groups are filled up from later slots.

    The smallest sample of the slot is swapped for the largest one elsewhere that still fits.
    """
    loads = [fsum(costs[i] for i in group) for group in slots[0]]
    deficit = max(loads) * len(loads) - fsum(loads)
    chosen = sorted(chain.from_iterable(slots[0]), key=lambda i: (costs[i], i))
    later = chain.from_iterable(chain.from_iterable(slots[1:]))
    offered = iter(sorted(later, key=lambda i: (-costs[i], i)))
    for place, sample in enumerate(chosen):
        for other in offered:
            gain = costs[other] - costs[sample]
            if gain <= deficit:
                break
        else:
            break
        if gain <= 0:
            break
        chosen[place] = other
        deficit -= gain
    return sorted(chosen)


def _bins(
    costs: Sequence[float], samples: list[int], n_bins: int, size: int, tol: float
) -> list[list[int]]:
    bins = refined_groups([costs[i] for i in samples], n_bins, least=size, most=size, tolerance=tol)
    return [[samples[i] for i in members] for members in bins]
