"""The window of a module that one rank holds whole: the canonical order, without any exchange."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from evenstep.balance import Strategy, build_window_route
from evenstep.reorder_buffer.cost import CostFunction, samples_with_costs
from evenstep.reorder_buffer.item_counts import Counts
from evenstep.reorder_buffer.layout import BatchT, Layout
from evenstep.reorder_buffer.presets import MIMO_LAYOUT
from evenstep.serialize import FlatSample

__all__ = ["ImageCountFunction", "reorder_window_local"]

ImageCountFunction: TypeAlias = Callable[[BatchT], Counts]
"""Returns the images per sample of a micro-batch: an integer tensor ``[B]``, or one per group."""


def reorder_window_local(
    batches: Sequence[BatchT],
    *,
    n_groups: int,
    cost_of: CostFunction,
    image_count_of: ImageCountFunction[BatchT] | None = None,
    layout: Layout[BatchT] = MIMO_LAYOUT,  # type: ignore[assignment]  # then BatchT is a dict
    strategy: str | Strategy = "lpt",
) -> list[BatchT]:
    """Permute a window into canonical order on a ``dp_size == 1`` module without any exchange.

    Args:
        batches: This rank's W whole micro-batches, of equally many samples.
        n_groups: Canonical group count (LCM of the module DP sizes), same as the paired module.
        cost_of: ``callable(flat) -> float`` per-sample cost, same as the paired module.
        image_count_of: Optional ``callable(batch) -> LongTensor`` of per-sample image counts, or
            of a mapping of them by encoder.
        layout: The form of the micro-batches.
        strategy: How the samples are balanced, same as the paired module.

    Returns:
        W micro-batches permuted into canonical order.

    Raises:
        ValueError: If ``batches`` is empty, they differ in size, ``n_groups`` does not divide it,
            or a micro-batch or cost is bad.
    """
    if not batches:
        raise ValueError("batches is empty: a window needs at least one micro-batch.")
    flats: list[FlatSample] = []
    costs_per_slot: list[list[float]] = []
    for batch in batches:
        counts = None if image_count_of is None else image_count_of(batch)
        samples, costs = samples_with_costs(batch, layout=layout, cost_of=cost_of, counts=counts)
        flats += samples
        costs_per_slot.append(costs)
    route = build_window_route(costs_per_slot, n_groups, 1, strategy=strategy)
    slots: list[list[tuple[int, FlatSample]]] = [[] for _ in batches]
    for where, flat in zip(route, flats, strict=True):
        slots[where.dst_slot].append((where.canonical_pos, flat))
    return [layout.merge([flat for _, flat in sorted(slot, key=_position)]) for slot in slots]


def _position(placed: tuple[int, FlatSample]) -> int:
    return placed[0]
