"""Planning a window: its micro-batches, on a canonical grid, with a strategy of choice."""

from collections.abc import Sequence
from itertools import chain
from math import fsum
from typing import NamedTuple

from evenstep.balance.bounds import max_load_bound
from evenstep.balance.checks import checked_dp_size, checked_groups, checked_window
from evenstep.balance.plan import check_groups, relative_gap
from evenstep.balance.route import Route, RouteColumns, route_columns
from evenstep.balance.strategy import Scope, Strategy, StrategyName, resolve
from evenstep.balance.synchronize import Synchronize


class WindowPlan(NamedTuple):
    """A route and what it achieves."""

    route: list[Route]
    """One `Route` per window-global index."""
    loads: tuple[tuple[float, ...], ...]
    """Total cost of every rank, per slot."""
    max_load: float
    """Where every micro-batch synchronises, the sum over slots of the largest load of a rank; where
    only the step does, the largest total of a rank."""
    lower_bound: float
    """What `max_load` cannot be below under the strategy's scope and equal counts."""
    gap: float
    """`max_load / lower_bound - 1`, or 0 where the bound is 0."""
    moved_share: float
    """Share of the cost that changes its rank."""


def build_window_route(
    costs_per_slot: Sequence[Sequence[float]],
    n_groups: int,
    dp_size: int,
    *,
    strategy: StrategyName | str | Strategy = "lpt",
) -> list[Route]:
    """Build the slot-major route of a window.

    Sample `j` of slot `s` has the window-global index `g = s * B_global + j`. With the default
    strategy each slot is balanced by itself, in the contract's order.

    Args:
        costs_per_slot: Cost per sample of every slot, by slot-local position, finite and >= 0;
            every slot holds equally many.
        n_groups: Groups of the canonical grid; must divide each slot's sample count.
        dp_size: DP size of this module; must divide `n_groups`.
        strategy: Name or object of the strategy. Paired modules must use the same.

    Returns:
        One `Route` per window-global index. Each (slot, rank) receives equally many samples.

    Raises:
        ValueError: A count does not divide, slots differ in size, a cost is bad, or the strategy
            or one of its settings is unknown.
        RuntimeError: A strategy of the caller's own returned groups that are none.
    """
    return plan_route(costs_per_slot, n_groups, dp_size, strategy=strategy).routes()


def plan_route(
    costs_per_slot: Sequence[Sequence[float]],
    n_groups: int,
    dp_size: int,
    *,
    strategy: StrategyName | str | Strategy = "lpt",
) -> RouteColumns:
    """Plan a window as `build_window_route` does, and return its routes as columns.

    Args:
        costs_per_slot: Cost per sample of every slot, by slot-local position.
        n_groups: Groups of the canonical grid.
        dp_size: DP size of this module.
        strategy: Name or object of the strategy.

    Raises:
        ValueError: As `build_window_route`.
        RuntimeError: As `build_window_route`.
    """
    slots = checked_window(costs_per_slot)
    return _route(slots, n_groups, dp_size, resolve(strategy))


def plan_window(
    costs_per_slot: Sequence[Sequence[float]],
    n_groups: int,
    dp_size: int,
    *,
    strategy: StrategyName | str | Strategy = "lpt",
) -> WindowPlan:
    """Plan a window as `build_window_route` does, and say what the route achieves.

    Args:
        costs_per_slot: Cost per sample of every slot, by slot-local position.
        n_groups: Groups of the canonical grid; must divide each slot's sample count.
        dp_size: DP size of this module; must divide `n_groups`.
        strategy: Name or object of the strategy.

    Raises:
        ValueError: As `build_window_route`.
        RuntimeError: As `build_window_route`.
    """
    slots = checked_window(costs_per_slot)
    chosen = resolve(strategy)
    route = _route(slots, n_groups, dp_size, chosen).routes()
    members: list[list[list[float]]] = [[[] for _ in range(dp_size)] for _ in slots]
    moved: list[float] = []
    costs = chain.from_iterable(slots)
    for g, (cost, (dst_slot, owner, _)) in enumerate(zip(costs, route, strict=True)):
        members[dst_slot][owner].append(cost)
        if owner != g % len(slots[0]) * dp_size // len(slots[0]):
            moved.append(cost)
    loads = tuple(tuple(map(fsum, ranks)) for ranks in members)
    cost = _synced(loads, chosen.synchronize)
    bound = min(cost, _bound(slots, dp_size, chosen.scope, chosen.synchronize))  # sums round
    total = fsum(chain.from_iterable(slots))
    return WindowPlan(
        route=route,
        loads=loads,
        max_load=cost,
        lower_bound=bound,
        gap=relative_gap(cost, bound),
        moved_share=fsum(moved) / total if total else 0.0,
    )


def _route(
    slots: Sequence[Sequence[float]], n_groups: int, dp_size: int, strategy: Strategy
) -> RouteColumns:
    per_slot = len(slots[0]) if slots else 0
    size = checked_groups(per_slot, n_groups)
    checked_dp_size(n_groups, dp_size)
    arranged = strategy.window(slots, n_groups)
    groups = [group for slot in arranged for group in slot]
    check_groups(groups, len(slots) * per_slot, len(slots) * n_groups, size, size)
    return route_columns([list(chain.from_iterable(slot)) for slot in arranged], dp_size)


def _synced(loads: Sequence[Sequence[float]], synchronize: Synchronize) -> float:
    if synchronize == "microbatch":
        return fsum(max(ranks) for ranks in loads)
    return max((fsum(totals) for totals in zip(*loads, strict=True)), default=0.0)


def _bound(
    slots: Sequence[Sequence[float]], dp_size: int, scope: Scope, synchronize: Synchronize
) -> float:
    """Return a lower bound on the cost of a window on `dp_size` ranks of equal sample counts."""
    if not slots:
        return 0.0
    size = len(slots[0]) // dp_size
    if scope == "slot" and synchronize == "microbatch":
        return fsum(max_load_bound(costs, dp_size, size) for costs in slots)
    return max_load_bound(list(chain.from_iterable(slots)), dp_size, size * len(slots))
