"""One window of micro-batches: what a rank offers, who computes what, and the result joined.

Nothing here communicates: `SampleExchange` executes what is planned here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

from evenstep.balance import RouteColumns, Strategy, plan_route
from evenstep.exchange import Agreement, Arrival, Offer, Placement
from evenstep.reorder_buffer.agreement import check_agreement, check_schemas
from evenstep.reorder_buffer.common_values import check_common_values, note_of
from evenstep.reorder_buffer.cost import CostFunction, cut_with_costs
from evenstep.reorder_buffer.layout import BatchLayout, BatchT, Layout, cuts_as_declared
from evenstep.reorder_buffer.local_reorder import ImageCountFunction
from evenstep.serialize import Leaf, SampleLayout

__all__ = ["WindowBalancer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBalancer(Generic[BatchT]):
    """How the micro-batches of a window are cut, balanced and joined.

    Attributes:
        dp_size: Number of ranks.
        n_groups: Canonical group count; a multiple of `dp_size`.
        cost_of: The cost of a flat sample.
        image_count_of: The items per sample of a micro-batch; None for what the layout finds.
        layout: The form of the micro-batches.
        strategy: Who gets what.
        donated: Whether a micro-batch whose samples all stay is handed on as it was read.

    Raises:
        ValueError: If `dp_size` does not divide `n_groups`, `cost_of` is no function, or no
            strategy has that name.
    """

    dp_size: int
    n_groups: int
    cost_of: CostFunction
    image_count_of: ImageCountFunction[BatchT] | None
    layout: Layout[BatchT]
    strategy: str | Strategy
    donated: bool

    def __post_init__(self) -> None:
        if self.dp_size < 1 or self.n_groups < 1 or self.n_groups % self.dp_size:
            raise ValueError(
                f"n_groups is {self.n_groups} and dp_size {self.dp_size}; n_groups must be a "
                "positive multiple of dp_size, the least common multiple of the modules' DP sizes"
            )
        if not (hasattr(self.layout, "split") and hasattr(self.layout, "merge")):
            raise ValueError(
                f"layout is a {type(self.layout).__name__}; it must cut and join micro-batches, as "
                "the presets do. Rules of fields, such as padded_text(...) makes, go into one: "
                "BatchLayout(fields=...)"
            )
        if not callable(self.cost_of):
            raise ValueError(f"cost_of is {self.cost_of!r}; it must be a function of a flat sample")
        plan_route([], self.n_groups, self.dp_size, strategy=self.strategy)  # checks it

    def offer(self, batches: Sequence[BatchT], *, exhausted: bool = False) -> Offer:
        """Cut this rank's micro-batches and compute the costs.

        Raises:
            ValueError: If they differ in size, or a field or a cost is bad.
        """
        samples: list[Mapping[str, Leaf]] = []
        costs: list[float] = []
        slot_counts: list[int] = []
        firsts: list[Mapping[str, Leaf]] = []
        for batch in batches:
            counts = None if self.image_count_of is None else self.image_count_of(batch)
            flats, costs_of_slot = cut_with_costs(
                batch, layout=self.layout, cost_of=self.cost_of, counts=counts
            )
            samples += flats
            firsts += flats[:1]
            costs += costs_of_slot
            slot_counts.append(len(flats))
        if len({*slot_counts}) > 1:
            raise ValueError(
                f"the micro-batches of this window have {slot_counts} samples; all must have "
                "equally many, so let the loader drop the last incomplete one (drop_last=True)"
            )
        note = b""
        if isinstance(self.layout, BatchLayout):
            note = note_of(self.layout, firsts)
        return Offer(
            samples=samples,
            slot_counts=slot_counts,
            costs=costs,
            exhausted=exhausted,
            note=note,
        )

    def route(self, agreement: Agreement) -> RouteColumns:
        """Return the route of every sample by global index; the same on every rank.

        Raises:
            ValueError: If the ranks' micro-batches differ in number, size, fields or values that
                all samples share, or their samples do not divide into the groups.
        """
        counts = [report.slot_counts for report in agreement.reports]
        if len({*counts}) > 1:
            told = ", ".join(f"rank {rank}: {[*count]}" for rank, count in enumerate(counts[:8]))
            raise ValueError(
                "ranks must bring equally many samples to each micro-batch of a window, but their "
                f"counts per micro-batch are {told}{' ...' if len(counts) > 8 else ''}"
            )
        if isinstance(self.layout, BatchLayout):
            check_schemas(self.layout, [report.schemas for report in agreement.reports])
            check_common_values(
                [report.note for report in agreement.reports],
                agreement.num_slots,
                across_slots=getattr(self.strategy, "scope", "slot") == "window",
            )
        return plan_route(
            self.costs(agreement), self.n_groups, self.dp_size, strategy=self.strategy
        )

    def costs(self, agreement: Agreement) -> list[list[float]]:
        """Return the cost per sample of every slot, by slot-local position."""
        return [agreement.costs_of_slot(slot) for slot in range(agreement.num_slots)]

    def check(
        self, arriving: Sequence[tuple[int, Placement]], layouts: Sequence[SampleLayout]
    ) -> None:
        """Raise unless the samples that will be on this rank can be joined, slot by slot.

        Args:
            arriving: The rank that holds each sample, and its placement.
            layouts: Their metadata.

        Raises:
            ValueError: Naming the field and two samples that differ in it.
        """
        if not isinstance(self.layout, BatchLayout):
            return
        # By slot, the first sample of each layout: few layouts repeat over many samples.
        slots: dict[int, dict[int, int]] = {}
        for i, (_, place) in enumerate(arriving):
            slots.setdefault(place.dst_slot, {}).setdefault(id(layouts[i]), i)
        for slot in sorted(slots):
            members = slots[slot].values()
            check_agreement(
                self.layout,
                [layouts[i] for i in members],
                [f"rank {arriving[i][0]}, sample {arriving[i][1].local_idx}" for i in members],
            )

    def merge(
        self,
        arrivals: Sequence[Arrival],
        num_slots: int,
        *,
        fetched: Callable[[], None] | None = None,
    ) -> list[BatchT]:
        """Join the samples of this rank to micro-batches, each in canonical order.

        Args:
            arrivals: By slot and canonical position.
            num_slots: Number of micro-batches.
            fetched: Called, if that comes first, once what peers lend is copied.
        """
        slots: list[list[Any]] = [[] for _ in range(num_slots)]
        for arrival in arrivals:
            slots[arrival.dst_slot].append(arrival.sample)
        if cuts_as_declared(self.layout):
            merged = self.layout.merge_each(slots, fetched=fetched, donated=self.donated)
            return cast("list[BatchT]", merged)
        return [self.layout.merge(flats) for flats in slots]

    @property
    def keeps_views(self) -> bool:
        """Whether merged micro-batches may hold views of what they were merged from."""
        return not cuts_as_declared(self.layout)
