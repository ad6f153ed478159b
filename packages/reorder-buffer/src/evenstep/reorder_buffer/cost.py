"""What a sample costs: vision patches and real tokens, weighted.

The same figures come from one flat sample or, in one pass per field, from a whole micro-batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import torch

from evenstep.reorder_buffer.item_counts import Counts, row_products
from evenstep.reorder_buffer.layout import BatchLayout, BatchT, Layout, cuts_as_declared
from evenstep.reorder_buffer.microbatch_fields import MicrobatchFields
from evenstep.reorder_buffer.presets import MIMO_LAYOUT
from evenstep.serialize import FlatSample, Leaf

__all__ = [
    "Cost",
    "CostFunction",
    "SampleCost",
    "costs_of_samples",
    "sample_cost",
    "samples_with_costs",
]

Cost: TypeAlias = float | torch.Tensor
"""A cost as users return it: a number, or a tensor of one element."""


class CostFunction(Protocol):
    """Computes the cost of one sample."""

    def __call__(self, flat: FlatSample, /) -> Cost:
        """Return the cost, finite and >= 0, of a sample with dotted keys, and leave it as it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """``encoder_cost_weight * patches + language_cost_weight * real_tokens``, as a callable.

    Both terms are independent of collation, so that vision and language modules derive the same
    costs without talking: with ``image_token_id`` the patches come from ``input_ids``, which every
    module holds, and tokens come from ``attention_mask``.

    Attributes:
        encoder_cost_weight: Weight per vision patch; 0.0 disables the term.
        language_cost_weight: Weight per real token; 0.0 disables the term.
        image_token_id: Placeholder token counted in ``input_ids``; None sums the grids (fields
            whose key ends in ``grid_thw``) of all encoders instead. A grid that is None, as on
            language shards, adds nothing: set the id where modules are paired.
        square_merge_size: Patches per placeholder token (``spatial_merge_size ** 2``).
    """

    encoder_cost_weight: float
    language_cost_weight: float = 0.0
    image_token_id: int | None = None
    square_merge_size: int = 1

    def __post_init__(self) -> None:
        for name in ("encoder_cost_weight", "language_cost_weight"):
            weight = getattr(self, name)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"{name}={weight}: must be finite and >= 0.")
        if self.square_merge_size < 1:
            raise ValueError(
                f"square_merge_size={self.square_merge_size}: must be >= 1, the patches per "
                "placeholder token (spatial_merge_size ** 2)."
            )

    def __call__(self, flat: FlatSample, /) -> float:
        """Return the cost of one flat sample, its tensors with a batch dim of size 1 or without.

        Raises:
            ValueError: If the sample lacks a field that a term needs.
        """
        patches = self._patches(flat) if self.encoder_cost_weight else 0
        tokens = 0
        if self.language_cost_weight:
            tokens = int(_text_field(flat, "attention_mask", dims=(1, 2)).count_nonzero())
        return self._weigh(patches, tokens)

    def of_microbatch(
        self,
        batch: Mapping[str, object],
        *,
        layout: BatchLayout = MIMO_LAYOUT,
        counts: Counts | None = None,
    ) -> list[float]:
        """Return the cost of each sample of a micro-batch, as if it were split, in one pass.

        Args:
            batch: A nested micro-batch.
            layout: Its form.
            counts: Items per sample, as for :meth:`BatchLayout.split`.

        Raises:
            ValueError: If the micro-batch lacks a field that a term needs, or it does not fit.
        """
        return self.of_fields(layout.read(batch, counts=counts))

    def of_fields(self, read: MicrobatchFields) -> list[float]:
        """Return the cost of each sample of a micro-batch that a layout has read already."""
        tokens = patches = [0] * read.size
        if self.encoder_cost_weight:
            patches = self._patches_of_each(read)
        if self.language_cost_weight:
            mask = _text_field(read.fields, "attention_mask", dims=(2,))
            tokens = _count_per_sample(read, "attention_mask", mask)
        return [self._weigh(*pair) for pair in zip(patches, tokens, strict=True)]

    def _patches(self, flat: Mapping[str, Leaf]) -> int:
        if self.image_token_id is None:
            return sum(sum(row_products(key, flat[key])) for key in _grid_keys(flat))
        ids = _text_field(flat, "input_ids", dims=(1, 2))
        return int(ids.eq(self.image_token_id).count_nonzero()) * self.square_merge_size

    def _patches_of_each(self, read: MicrobatchFields) -> list[int]:
        if self.image_token_id is None:
            grids = [read.totals(key) for key in _grid_keys(read.fields)]
            return [sum(totals) for totals in zip(*grids, strict=True)] or [0] * read.size
        ids = _text_field(read.fields, "input_ids", dims=(2,))
        found = _count_per_sample(read, "input_ids", ids.eq(self.image_token_id))
        return [count * self.square_merge_size for count in found]

    def _weigh(self, patches: int, tokens: int) -> float:
        return self.encoder_cost_weight * patches + self.language_cost_weight * tokens


def sample_cost(
    flat: FlatSample,
    *,
    encoder_cost_weight: float,
    language_cost_weight: float = 0.0,
    image_token_id: int | None = None,
    square_merge_size: int = 1,
) -> float:
    """Return ``encoder_cost_weight * patches + language_cost_weight * real_tokens``.

    The parameters are those of :class:`SampleCost`, which as an object also takes a whole
    micro-batch at once.

    Args:
        flat: One per-sample flat (dotted-key) dict.
        encoder_cost_weight: Weight per vision patch.
        language_cost_weight: Weight per real token; 0.0 disables the term.
        image_token_id: Placeholder token id counted in ``input_ids``; None sums ``grid_thw``.
        square_merge_size: Patches represented by one placeholder token.

    Returns:
        The weighted cost.

    Raises:
        ValueError: If a weight is no cost, or the sample lacks a field that a term needs.
    """
    return SampleCost(
        encoder_cost_weight=encoder_cost_weight,
        language_cost_weight=language_cost_weight,
        image_token_id=image_token_id,
        square_merge_size=square_merge_size,
    )(flat)


def samples_with_costs(
    batch: BatchT, *, layout: Layout[BatchT], cost_of: CostFunction, counts: Counts | None = None
) -> tuple[list[FlatSample], list[float]]:
    """Split a micro-batch and compute its samples' costs, reading it once where that is possible.

    Args:
        batch: A micro-batch of the layout's form.
        layout: Its form.
        cost_of: The cost of a flat sample; a :class:`SampleCost` is computed for all at once.
        counts: Items per sample, as for ``layout.split``.

    Returns:
        The flat samples, and one cost for each.

    Raises:
        ValueError: As ``layout.split`` and :func:`costs_of_samples`.
    """
    if isinstance(layout, BatchLayout) and isinstance(cost_of, SampleCost):
        read = layout.read(cast("Mapping[str, object]", batch), counts=counts)  # refuses others
        return read.samples(), cost_of.of_fields(read)
    flats = layout.split(batch, counts=counts)
    return flats, costs_of_samples(flats, cost_of)


def cut_with_costs(
    batch: BatchT, *, layout: Layout[BatchT], cost_of: CostFunction, counts: Counts | None = None
) -> tuple[Sequence[Mapping[str, Leaf]], list[float]]:
    """Return :func:`samples_with_costs`, the samples cut by arithmetic where that is possible."""
    if cuts_as_declared(layout) and isinstance(batch, Mapping):
        read = layout.read(batch, counts=counts)
        cut = read.cut()
        if cut is not None:
            if isinstance(cost_of, SampleCost):
                return cut, cost_of.of_fields(read)
            return cut, costs_of_samples([dict(sample) for sample in cut], cost_of)
    return samples_with_costs(batch, layout=layout, cost_of=cost_of, counts=counts)


def costs_of_samples(flats: Sequence[FlatSample], cost_of: CostFunction) -> list[float]:
    """Return ``cost_of`` of every sample as a checked float.

    Raises:
        ValueError: If a cost is not one finite number >= 0, naming the sample. What ``cost_of``
            itself raises passes through, with a note that names the sample.
    """
    costs = []
    for index, flat in enumerate(flats):
        try:
            value = cost_of(flat)
        except Exception as error:
            error.add_note(f"raised by cost_of for sample {index} of its micro-batch")
            raise
        costs.append(_checked_cost(index, value))
    return costs


def _checked_cost(index: int, value: Cost) -> float:
    number: Any = value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = value.item()
    try:
        cost = math.nan if isinstance(number, str | bytes) else float(number)
    except (TypeError, ValueError, OverflowError):
        cost = math.nan
    if not (math.isfinite(cost) and cost >= 0):
        shown = (
            f"a tensor {list(value.shape)}"
            if isinstance(value, torch.Tensor) and value.numel() != 1
            else repr(value)
        )
        raise ValueError(
            f"cost_of returned {shown} for sample {index}: a cost must be one finite number >= 0."
        )
    return cost


def _grid_keys(fields: Mapping[str, Leaf]) -> list[str]:
    return [k for k, value in fields.items() if k.endswith("grid_thw") and value is not None]


def _text_field(fields: Mapping[str, Leaf], key: str, *, dims: tuple[int, ...]) -> torch.Tensor:
    value = fields.get(key)
    if not isinstance(value, torch.Tensor) or value.ndim not in dims:
        found = (
            f"a tensor {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else "missing"
            if key not in fields
            else repr(value)
        )
        needed_by, instead = "image_token_id", ""
        if key == "attention_mask":
            needed_by = "language_cost_weight"
            instead = ", or count tokens in another field: TextCost(field='loss_mask')"
        raise ValueError(
            f"field {key!r} is {found}: {needed_by} needs a tensor [B, S] of the micro-batch's "
            f"text; add it to the samples, or leave that term out of the cost{instead}."
        )
    return value


def _count_per_sample(read: MicrobatchFields, key: str, marks: torch.Tensor) -> list[int]:
    dim = read.batch_dim(key)
    if dim is None:
        raise ValueError(
            f"field {key!r}: the layout gives it no batch dim, so it has no cost per sample."
        )
    marks = marks.bool().view(torch.uint8)
    counts: list[int] = marks.sum(dim=1 - dim, dtype=torch.int32).tolist()  # sooner than it counts
    return counts
