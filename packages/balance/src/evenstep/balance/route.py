"""Routes: for every sample of a window, its slot, its owner and its place in the balanced order.

A module of `dp_size` ranks owns `n_groups // dp_size` consecutive groups of the canonical grid per
rank. Paired modules of different DP size plan on the same grid, so their routes name the same
canonical positions.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from evenstep.balance.checks import checked_count, checked_dp_size, checked_window
from evenstep.balance.order import balanced_index_order


class Route(NamedTuple):
    """Where one sample goes."""

    dst_slot: int
    """Micro-batch of the window that it will be part of."""
    owner_rank: int
    """Module-local DP rank that computes it."""
    canonical_pos: int
    """Its place in the balanced order of its slot, 0 .. samples per slot - 1."""


# `Route(...)` in C: a window on many ranks has tens of thousands of them.
_NEW_ROUTE: Callable[[tuple[int, int, int]], Route] = partial(tuple.__new__, Route)


class RouteColumns(NamedTuple):
    """The routes of a window as columns, int64 (type code "q"), by window-global index.

    Without an object for each sample, which for tens of thousands takes longer than planning.
    """

    dst_slot: "array[int]"
    owner_rank: "array[int]"
    canonical_pos: "array[int]"

    def routes(self) -> list[Route]:
        """Return one `Route` per window-global index."""
        return [*map(_NEW_ROUTE, zip(*self, strict=True))]


def balanced_assignment(
    costs: Sequence[float], n_groups: int, dp_size: int
) -> list[tuple[int, int]]:
    """Map each sample of one micro-batch to its owner rank and canonical position.

    Args:
        costs: Cost per sample, by global position in the micro-batch, finite and >= 0.
        n_groups: Groups of the canonical grid (least common multiple of the modules' DP sizes);
            must divide `len(costs)`.
        dp_size: DP size of this module; must divide `n_groups`.

    Returns:
        `(owner_rank, canonical_pos)` per global sample index.

    Raises:
        ValueError: A count does not divide, or a cost is bad.
    """
    order = balanced_index_order(costs, n_groups)
    checked_dp_size(n_groups, dp_size)
    columns = route_columns([order], dp_size)
    return [*zip(columns.owner_rank, columns.canonical_pos, strict=True)]


def intra_route(assignment: Sequence[tuple[int, int]], *, src_slot: int = 0) -> list[Route]:
    """Lift the assignment of one slot to a route that stays in its slot.

    Args:
        assignment: `(owner_rank, canonical_pos)` per sample, from `balanced_assignment`.
        src_slot: Slot that the samples were read from.

    Returns:
        One `Route` per global sample index, with `dst_slot == src_slot`.

    Raises:
        ValueError: `src_slot` is negative.
    """
    slot = checked_count(src_slot, "src_slot", minimum=0)
    return [Route(slot, owner, position) for owner, position in assignment]


def route_columns(orders: Sequence[Sequence[int]], dp_size: int) -> RouteColumns:
    """Return the routes that lay sample `orders[s][p]` at canonical position `p` of slot `s`.

    Args:
        orders: Per slot, the window-global sample indices in canonical order; together a
            permutation, and of equal length.
        dp_size: DP size of the module; divides the length of an order.
    """
    per_slot = len(orders[0]) if orders else 0
    owners = [rank for rank in range(dp_size) for _ in range(per_slot // dp_size)]
    slot_of, position_of = ([0] * (len(orders) * per_slot) for _ in range(2))
    positions = [*range(per_slot)]  # one object for a position in every slot
    for slot, order in enumerate(orders):
        for position, sample in zip(positions, order, strict=True):
            slot_of[sample], position_of[sample] = slot, position
    owner_of = [*map(owners.__getitem__, position_of)]
    return RouteColumns(array("q", slot_of), array("q", owner_of), array("q", position_of))


def assert_intra_no_cross_slot(route: Sequence[tuple[int, int, int]], b_global: int) -> None:
    """Raise if a sample's `dst_slot` differs from its source slot `g // b_global`.

    Args:
        route: `(dst_slot, owner_rank, canonical_pos)` per window-global index.
        b_global: Samples per slot over all ranks; 0 skips the check.

    Raises:
        RuntimeError: A sample changes its slot.
        ValueError: `b_global` is negative or no integer.
    """
    per_slot = checked_count(b_global, "b_global", minimum=0)
    if not per_slot:
        return
    for g, (dst_slot, _, _) in enumerate(route):
        if dst_slot != g // per_slot:
            raise RuntimeError(
                f"route[{g}] sends a sample of slot {g // per_slot} to slot {dst_slot}; this route "
                "must stay within its slots (b_global is "
                f"{per_slot}); plan it with scope='slot'"
            )


def window_cost_spread(
    costs_per_slot: Sequence[Sequence[float]],
    route: Sequence[tuple[int, int, int]],
    dp_size: int,
) -> list[dict[str, float]]:
    """Return the spread of the ranks' costs in every slot, before and after balancing.

    Before, rank `r` holds the `r`-th of `dp_size` equal blocks of each slot's samples.

    Args:
        costs_per_slot: Cost per sample of every slot, by slot-local position.
        route: Route of the window, from `build_window_route`.
        dp_size: DP size of the module; must divide each slot's sample count.

    Returns:
        Per slot `before_max`, `before_min`, `after_max`, `after_min` (largest and smallest total
        cost of a rank) and `remote` (samples read into this slot that leave their rank).

    Raises:
        ValueError: A count does not fit, a cost is bad, or the route leaves the window or its
            ranks.
    """
    slots = checked_window(costs_per_slot)
    per_slot = len(slots[0]) if slots else 0
    block = checked_dp_size(per_slot, dp_size)
    if len(route) != len(slots) * per_slot:
        raise ValueError(
            f"route has {len(route)} entries, but costs_per_slot {len(slots) * per_slot} samples"
        )
    before = [[0.0] * dp_size for _ in slots]
    after = [[0.0] * dp_size for _ in slots]
    remote = [0] * len(slots)
    for g, (dst_slot, owner, _) in enumerate(route):
        slot, position = divmod(g, per_slot)
        if not (0 <= dst_slot < len(slots) and 0 <= owner < dp_size):
            raise ValueError(
                f"route[{g}] names slot {dst_slot} and rank {owner}, outside of {len(slots)} slots "
                f"and {dp_size} ranks"
            )
        source = position // block
        before[slot][source] += slots[slot][position]
        after[dst_slot][owner] += slots[slot][position]
        remote[slot] += owner != source
    return [
        {
            "before_max": max(before[slot]),
            "before_min": min(before[slot]),
            "after_max": max(after[slot]),
            "after_min": min(after[slot]),
            "remote": remote[slot],
        }
        for slot in range(len(slots))
    ]
