"""Several costs per sample: phases of a step that each end in a synchronisation.

A step whose encoder and language model wait for the slowest rank one after the other takes the sum
over phases of the largest load. Balancing a weighted sum of the costs lets a rank be slow in one
phase and idle in the other; here the sum of the largest loads itself is lowered.
"""

from collections.abc import Iterator, Sequence
from math import fsum
from typing import NamedTuple

from evenstep.balance.bounds import max_load_bound
from evenstep.balance.checks import check_ordered, checked_costs, checked_groups
from evenstep.balance.plan import check_groups, relative_gap
from evenstep.balance.refine import refined_groups
from evenstep.balance.strategy import TOLERANCE

PARTNERS = 16
"""Groups, the lightest in the phase at hand, that the heaviest group may swap with."""

MIN_GAIN = 1e-9
"""Relative gain below which a swap is rounding, not progress."""


class PhasePlan(NamedTuple):
    """Samples divided into groups for several phases."""

    groups: tuple[tuple[int, ...], ...]
    """The sample indices of each group, by index."""
    loads: tuple[tuple[float, ...], ...]
    """Per phase, the total cost of each group."""
    max_load: float
    """Sum over phases of the largest load: the time of a step."""
    lower_bound: float
    """Sum over phases of what the largest load cannot be below."""
    gap: float
    """`max_load / lower_bound - 1`, or 0 where the bound is 0."""


class _Swap(NamedTuple):
    max_load: float
    heavy: int
    light: int
    given: int
    taken: int


def plan_phases(costs_per_phase: Sequence[Sequence[float]], n_groups: int) -> PhasePlan:
    """Divide samples into groups of equal count for a low sum over phases of the largest load.

    Starts from the groups balanced by the sum of costs and from those balanced by each phase
    alone. From each start, the heaviest group of a phase swaps one sample with one of the 16
    lightest, whichever swap lowers the objective most, until the objective is within 0.02 % of the
    bound or no such swap lowers it. The best result stays.

    Args:
        costs_per_phase: Per phase, the cost of every sample in it, finite and >= 0, all phases in
            one unit (seconds, or FLOPs of one device).
        n_groups: Number of groups; must divide the number of samples.

    Returns:
        The checked plan.

    Raises:
        ValueError: There is no phase, phases differ in their number of samples, a cost is bad, or
            `n_groups` does not divide.
    """
    check_ordered(costs_per_phase, "costs_per_phase")
    phases = [checked_costs(c, f"costs_per_phase[{p}]") for p, c in enumerate(costs_per_phase)]
    if not phases:
        raise ValueError("costs_per_phase is empty; give the costs of at least one phase")
    for p, costs in enumerate(phases):
        if len(costs) != len(phases[0]):
            raise ValueError(
                f"costs_per_phase[{p}] has {len(costs)} samples, but phase 0 has {len(phases[0])}; "
                "every sample has a cost in every phase (0 where it takes no part)"
            )
    size = checked_groups(len(phases[0]), n_groups)
    bound = fsum(max_load_bound(costs, n_groups, size) for costs in phases)
    summed = [fsum(of_sample) for of_sample in zip(*phases, strict=True)]
    starts = [summed, *phases] if len(phases) > 1 else [summed]
    searches = []
    for start in starts:
        groups = refined_groups(start, n_groups, least=size, most=size, tolerance=TOLERANCE)
        search = _Search(phases, groups)
        search.run(bound * (1 + TOLERANCE))
        searches.append(search)
    best = min(searches, key=lambda search: search.objective())
    check_groups(best.groups, len(summed), n_groups, size, size)
    return PhasePlan(
        groups=tuple(tuple(sorted(group)) for group in best.groups),
        loads=tuple(tuple(loads) for loads in best.loads),
        max_load=best.objective(),
        lower_bound=min(bound, best.objective()),  # sums round
        gap=relative_gap(best.objective(), bound),
    )


class _Search:
    """Groups while samples are swapped."""

    def __init__(self, phases: Sequence[Sequence[float]], groups: list[list[int]]) -> None:
        self.phases, self.groups = phases, groups
        self.loads = [[fsum(costs[i] for i in group) for group in groups] for costs in phases]

    def objective(self) -> float:
        return fsum(map(max, self.loads))

    def run(self, target: float) -> None:
        while (before := self.objective()) > target:
            swap = min(self._swaps(before * (1 - MIN_GAIN)), default=None)
            if swap is None:
                return
            heavy, light = self.groups[swap.heavy], self.groups[swap.light]
            at, to = heavy.index(swap.given), light.index(swap.taken)
            heavy[at], light[to] = swap.taken, swap.given
            for costs, loads in zip(self.phases, self.loads, strict=True):
                for g in (swap.heavy, swap.light):
                    loads[g] = fsum(costs[i] for i in self.groups[g])

    def _swaps(self, below: float) -> Iterator[_Swap]:
        """Yield the swaps of the heaviest group of a phase that get the objective below `below`."""
        for loads in self.loads:
            rising = sorted(range(len(loads)), key=loads.__getitem__)
            heavy = rising[-1]
            for light in rising[: min(PARTNERS, len(rising) - 1)]:
                others = [
                    max((x for g, x in enumerate(phase) if g not in (heavy, light)), default=0.0)
                    for phase in self.loads
                ]
                yield from self._pair(heavy, light, others, below)

    def _pair(
        self, heavy: int, light: int, others: Sequence[float], below: float
    ) -> Iterator[_Swap]:
        terms = [
            (costs, loads[heavy], loads[light], other)
            for costs, loads, other in zip(self.phases, self.loads, others, strict=True)
        ]
        for given in self.groups[heavy]:
            for taken in self.groups[light]:
                total = 0.0
                for costs, load, other_load, other in terms:
                    shift = costs[given] - costs[taken]
                    total += max(other, load - shift, other_load + shift)
                if total < below:
                    yield _Swap(total, heavy, light, given, taken)
