"""Planning a window: its micro-batches, on a canonical grid, with a strategy of choice."""

from collections.abc import Sequence

from evenstep.balance.checks import checked_dp_size, checked_groups, checked_window
from evenstep.balance.route import Route, slot_routes
from evenstep.balance.strategy import Strategy, StrategyName, resolve


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
            is unknown.
    """
    slots = checked_window(costs_per_slot)
    checked_groups(len(slots[0]) if slots else 0, n_groups)
    checked_dp_size(n_groups, dp_size)
    arranged = resolve(strategy).window(slots, n_groups)
    return slot_routes([[i for group in groups for i in group] for groups in arranged], dp_size)
