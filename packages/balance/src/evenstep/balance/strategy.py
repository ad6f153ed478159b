"""How to choose an algorithm: a name, `"lpt"`, `"refined"` or `"least_move"`, or its object.

A strategy object is a value: equal settings compare equal, and its `repr` names every setting, so
that paired modules can compare what they were given.
"""

from collections.abc import Sequence
from itertools import chain
from math import fsum
from typing import Literal, NamedTuple, Protocol, TypeAlias

from evenstep.balance.across import (
    SlotGroups,
    in_slots,
    spread_per_microbatch,
    spread_per_step,
    synced_cost,
)
from evenstep.balance.bounds import max_load_bound
from evenstep.balance.checks import checked_count
from evenstep.balance.least_move import least_move_groups
from evenstep.balance.order import deal_evenly, decreasing
from evenstep.balance.refine import refined_groups
from evenstep.balance.synchronize import Synchronize, check_synchronize

StrategyName: TypeAlias = Literal["lpt", "refined", "least_move"]
Scope: TypeAlias = Literal["slot", "window"]

TOLERANCE = 2e-4
"""Relative distance to the lower bound at which the search for better groups ends."""


class Strategy(Protocol):
    """Divides the samples of a window; write one of your own and every planner takes it."""

    @property
    def scope(self) -> Scope:
        """Whether samples stay in their slot, or may change it within the window."""
        ...

    @property
    def synchronize(self) -> Synchronize:
        """Where ranks wait for each other: after every micro-batch, or once per step."""
        ...

    def window(
        self, costs_per_slot: Sequence[Sequence[float]], n_groups: int
    ) -> Sequence[Sequence[Sequence[int]]]:
        """Return for every slot its `n_groups` groups of window-global sample indices.

        Sample `j` of slot `s` has the index `s * samples_per_slot + j`. All groups have equally
        many samples. The result depends on the arguments alone; the caller checks it.

        Args:
            costs_per_slot: Checked costs of every slot; equally many, a multiple of `n_groups`.
            n_groups: Groups of the canonical grid.
        """
        ...


class Lpt(NamedTuple):
    """The contract's algorithm: longest processing time first, each slot by itself."""

    @property
    def scope(self) -> Scope:
        """Samples stay in their slot."""
        return "slot"

    @property
    def synchronize(self) -> Synchronize:
        """Every micro-batch is balanced by itself."""
        return "microbatch"

    def window(self, costs_per_slot: Sequence[Sequence[float]], n_groups: int) -> SlotGroups:
        """Return the groups of every slot (see `Strategy`)."""
        first, slots = 0, []
        for costs in costs_per_slot:
            slots.append(lpt_groups(costs, n_groups, first))
            first += len(costs)
        return slots


class Refined(NamedTuple):
    """Longest processing time first, then local search: close to the lower bound.

    Never above the largest load of `Lpt` (under `scope="slot"`).
    """

    tolerance: float = TOLERANCE
    """Relative distance to the lower bound at which the search ends."""
    scope: Scope = "slot"
    """`"window"`: samples may change their micro-batch."""
    synchronize: Synchronize = "microbatch"
    """Objective of `scope="window"`: sum over slots of the largest load, or largest total."""

    def window(self, costs_per_slot: Sequence[Sequence[float]], n_groups: int) -> SlotGroups:
        """Return the groups of every slot (see `Strategy`)."""
        check_settings(self)
        if self.scope == "slot" or not costs_per_slot:
            return _shifted(
                [
                    refined_groups(
                        costs,
                        n_groups,
                        least=len(costs) // n_groups,
                        most=len(costs) // n_groups,
                        tolerance=self.tolerance,
                    )
                    for costs in costs_per_slot
                ]
            )
        spread = spread_per_step if self.synchronize == "step" else spread_per_microbatch
        flat = list(chain.from_iterable(costs_per_slot))
        return spread(flat, len(costs_per_slot), n_groups, self.tolerance)


class LeastMove(NamedTuple):
    """As little cost as possible changes its group, at a largest load no higher than `Lpt`'s.

    A sample's home is the canonical group that it was read into: the `g`-th of `n_groups` equal
    blocks of its slot.
    """

    tolerance: float | None = None
    """Largest load allowed, relative to the lower bound (0.05: 5 % above); `Refined`'s where even
    that is higher. None: the largest load of `Lpt`."""
    ranks_per_node: int | None = None
    """Groups of the canonical grid per node; moves inside a node are preferred. For a module whose
    DP size is `n_groups` these are its ranks per node; paired modules must pass the same number."""
    scope: Scope = "slot"
    """`"window"`: samples may change their micro-batch, which costs nothing within a rank."""
    synchronize: Synchronize = "microbatch"
    """Objective of `scope="window"`: sum over slots of the largest load, or largest total."""

    def window(self, costs_per_slot: Sequence[Sequence[float]], n_groups: int) -> SlotGroups:
        """Return the groups of every slot (see `Strategy`)."""
        check_settings(self)
        per_slot = len(costs_per_slot[0]) if costs_per_slot else 0
        homes = [j * n_groups // per_slot for j in range(per_slot)]
        own = _shifted([self.groups(costs, homes, n_groups) for costs in costs_per_slot])
        if self.scope == "slot" or not costs_per_slot:
            return own
        flat = list(chain.from_iterable(costs_per_slot))
        n_slots = len(costs_per_slot)
        totals = self.groups(flat, homes * n_slots, n_groups)
        if self.synchronize == "step":
            return in_slots(flat, totals, n_slots, TOLERANCE)
        pooled = in_slots(flat, totals, n_slots, TOLERANCE)
        allowed = synced_cost(flat, Lpt().window(costs_per_slot, n_groups))
        return pooled if synced_cost(flat, pooled) <= allowed else own

    def groups(
        self, costs: Sequence[float], homes: Sequence[int], n_groups: int
    ) -> list[list[int]]:
        """Return groups of equal size for samples of any home.

        Args:
            costs: Checked costs.
            homes: Home group of every sample; equally many samples per group.
            n_groups: Number of groups.
        """
        size = len(costs) // n_groups
        reachable = lpt_groups(costs, n_groups)
        limit = _max_load(costs, reachable)
        if self.tolerance is not None:
            wanted = max_load_bound(costs, n_groups, size) * (1 + self.tolerance)
            if wanted < limit:
                reachable = refined_groups(
                    costs, n_groups, least=size, most=size, tolerance=self.tolerance
                )
                limit = _max_load(costs, reachable)
            limit = max(limit, wanted)
        return least_move_groups(
            costs, homes, limit=limit, reachable=reachable, groups_per_node=self.ranks_per_node
        )


def resolve(strategy: StrategyName | str | Strategy) -> Strategy:
    """Return the strategy object that `strategy` names.

    Raises:
        ValueError: No strategy has that name.
    """
    if not isinstance(strategy, str):
        return strategy
    named: dict[str, Strategy] = {"lpt": Lpt(), "refined": Refined(), "least_move": LeastMove()}
    if strategy not in named:
        raise ValueError(
            f"strategy is {strategy!r}; it must be one of {sorted(named)} or a strategy object"
        )
    return named[strategy]


def check_settings(strategy: Refined | LeastMove) -> None:
    """Raise ValueError if a setting of the strategy is none of its allowed values."""
    if strategy.scope not in ("slot", "window"):
        raise ValueError(f"scope is {strategy.scope!r}; it must be 'slot' or 'window'")
    check_synchronize(strategy.synchronize)
    tolerance = strategy.tolerance
    if tolerance is not None and not 0 <= tolerance <= 1:
        raise ValueError(
            f"tolerance is {tolerance!r}; it must be a share from 0 to 1 of the lower bound, 0.05 "
            "for 5 % above it"
        )
    if isinstance(strategy, LeastMove) and strategy.ranks_per_node is not None:
        checked_count(strategy.ranks_per_node, "ranks_per_node")


def lpt_groups(costs: Sequence[float], n_groups: int, first: int = 0) -> list[list[int]]:
    """Return the groups of the contract's balanced order; samples are counted from `first`."""
    size = len(costs) // n_groups
    order = decreasing(costs)
    falling = [costs[i] for i in order]
    return deal_evenly([first + i for i in order], falling, n_groups, size)


def _max_load(costs: Sequence[float], groups: Sequence[Sequence[int]]) -> float:
    return max((fsum(costs[i] for i in group) for group in groups), default=0.0)


def _shifted(slots: SlotGroups) -> SlotGroups:
    """Return groups of slot-local indices as groups of window-global ones."""
    per_slot = sum(map(len, slots[0])) if slots else 0
    return [
        [[slot * per_slot + i for i in group] for group in groups]
        for slot, groups in enumerate(slots)
    ]
