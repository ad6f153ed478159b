"""What a rank brings to a window, and what all ranks know of it once they have agreed."""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from evenstep.exchange.moves import int64_tensor
from evenstep.serialize import Leaf, SampleLayout, SampleSchema

MAX_COSTS = 255
"""Costs per sample; the number travels in one byte."""

Cost: TypeAlias = float | Sequence[float]
"""The estimated work of a sample, or of each of its phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The samples that one rank brings to a window.

    Attributes:
        samples: Flat samples, slot by slot.
        slot_counts: Number of samples per slot; their sum is the number of samples.
        costs: One cost per sample, finite and >= 0; or equally many per sample, for several phases.
        exhausted: Whether this rank's source has ended, so that this is its last window.
        note: What all ranks shall know besides; the exchange does not look at it.

    Raises:
        ValueError: If counts do not match, or a cost is not a finite number >= 0.
    """

    samples: Sequence[Mapping[str, Leaf]]
    slot_counts: Sequence[int]
    costs: Sequence[Cost]
    exhausted: bool = False
    note: bytes = b""

    def __post_init__(self) -> None:
        count = len(self.samples)
        if sum(self.slot_counts) != count or any(n < 0 for n in self.slot_counts):
            raise ValueError(
                f"slot_counts is {list(self.slot_counts)}; it must hold the number of samples of "
                f"each slot, {count} together"
            )
        if len(self.costs) != count:
            raise ValueError(f"{len(self.costs)} costs given for {count} samples; give one each")

    def cost_columns(self) -> tuple[int, "array[float]"]:
        """Return the number of costs per sample and all costs, sample by sample, as float64."""
        if {*map(type, self.costs)} == {float}:
            costs = array("d", cast("Sequence[float]", self.costs))
            if all(map(math.isfinite, costs)) and min(costs) >= 0:
                return 1, costs
        rows = [_cost_row(index, cost) for index, cost in enumerate(self.costs)]
        widths = {len(row) for row in rows} or {1}
        if len(widths) > 1 or not 1 <= max(widths) <= MAX_COSTS:
            raise ValueError(
                f"samples have {sorted(widths)} costs; give each the same number, 1 to {MAX_COSTS}"
            )
        return widths.pop(), array("d", [cost for row in rows for cost in row])


class RankReport(NamedTuple):
    """What every rank knows of one rank's offer.

    Attributes:
        slot_counts: Number of samples per slot.
        num_costs: Costs per sample.
        costs: float64, sample by sample.
        nbytes: Serialized bytes per sample, int64.
        exhausted: Whether the rank's source has ended.
        note: What its offer says besides.
        schemas: The distinct schemas of its samples, which all ranks have decoded.
        layout: Decodes the layout of the sample with the given local index.
    """

    slot_counts: tuple[int, ...]
    num_costs: int
    costs: "array[float]"
    nbytes: "array[int]"
    exhausted: bool
    note: bytes
    schemas: tuple[SampleSchema, ...]
    layout: Callable[[int], SampleLayout]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One window as all ranks see it; equal on all of them but for `samples` and `layouts`.

    The global index of a sample counts slot by slot, within a slot rank by rank, within a rank in
    local order.

    Attributes:
        reports: One report per rank.
        offer: This rank's offer.
        samples: The samples of `offer`, their plain values folded into one tensor field.
        layouts: The layouts of `samples`.
    """

    reports: tuple[RankReport, ...]
    offer: Offer
    samples: Sequence[Mapping[str, Tensor | None]]
    layouts: Sequence[SampleLayout]

    @property
    def num_slots(self) -> int:
        """The largest number of slots that a rank offers."""
        return len(self._spans)

    def first_slots(self, num_slots: int) -> "Agreement":
        """Return this agreement without the samples of later slots, on every rank alike."""
        reports = [
            report._replace(slot_counts=report.slot_counts[:num_slots]) for report in self.reports
        ]
        return replace(self, reports=tuple(reports))

    @property
    def holders(self) -> Tensor:
        """Rank and local index of each sample, by global index; int64 [samples, 2], read-only."""
        return self._order.holders

    @cached_property
    def nbytes(self) -> Tensor:
        """Serialized bytes of each sample, by global index; int64 [samples]."""
        nbytes, of_rank = array("q"), [report.nbytes for report in self.reports]
        for rank, start, end in chain.from_iterable(self._spans):
            nbytes += of_rank[rank][start:end]
        return int64_tensor(nbytes)

    def costs_of_slot(self, slot: int) -> list[float]:
        """Return the costs of one slot by slot-local position; the first of several per sample."""
        costs: list[float] = []
        for rank, start, end in self._spans[slot]:
            width, of_rank = self.reports[rank].num_costs, self.reports[rank].costs
            costs += of_rank[start * width : end * width : width]
        return costs

    def cost_rows_of_slot(self, slot: int) -> list[tuple[float, ...]]:
        """Return all costs of each sample of one slot, by slot-local position."""
        rows: list[tuple[float, ...]] = []
        for rank, start, end in self._spans[slot]:
            width, of_rank = self.reports[rank].num_costs, self.reports[rank].costs
            costs = iter(of_rank[start * width : end * width])
            rows += zip(*[costs] * width, strict=True)
        return rows

    @property
    def _spans(self) -> "list[list[_Span]]":
        return self._order.spans

    @cached_property
    def _order(self) -> "_Order":
        return _order_of(tuple([report.slot_counts for report in self.reports]))


_Span: TypeAlias = tuple[int, int, int]
"""A rank, and its first and its last local index, plus 1, in a slot."""


class _Order(NamedTuple):
    """The samples of a window in the order of their global indices.

    Attributes:
        spans: By slot, those of the ranks with samples in it.
        holders: As `Agreement.holders`.
    """

    spans: list[list[_Span]]
    holders: Tensor


@lru_cache(4)
def _order_of(slot_counts: tuple[tuple[int, ...], ...]) -> _Order:
    """Return the order for the ranks' counts, which most often are those of the window before."""
    spans: list[list[_Span]] = [[] for _ in range(max(map(len, slot_counts)))]
    for rank, counts in enumerate(slot_counts):
        bounds = pairwise(accumulate(counts, initial=0))
        for of_slot, (start, end) in zip(spans, bounds, strict=False):
            if end > start:
                of_slot.append((rank, start, end))
    flat = array("q", chain.from_iterable(chain.from_iterable(spans)))
    ranks, starts, ends = int64_tensor(flat).view(-1, 3).unbind(1)
    length = ends - starts
    first = length.cumsum(0) - length  # the global index of each span's first sample
    local = torch.arange(int(length.sum())) + (starts - first).repeat_interleave(length)
    return _Order(spans, torch.stack([ranks.repeat_interleave(length), local]).T)


def _cost_row(index: int, cost: Cost) -> tuple[float, ...]:
    try:
        if isinstance(cost, str | bytes):
            raise TypeError("text is no cost")
        row = tuple(map(float, cost)) if isinstance(cost, Sequence) else (float(cost),)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the cost of sample {index} is no number: {cost!r} ({error})") from error
    for value in row:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"the cost of sample {index} is {value!r}; a cost must be a finite number >= 0"
            )
    return row
