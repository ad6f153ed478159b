"""One micro-batch read by its layout: how many rows of each field each sample has, and the cut."""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from evenstep.reorder_buffer.columns import Column, is_indivisible, split_column
from evenstep.reorder_buffer.cut_samples import CutField, CutSample, cut_field, cut_samples
from evenstep.reorder_buffer.field_kinds import (
    Batched,
    FieldKind,
    Global,
    Items,
    Ragged,
    parent_key,
)
from evenstep.reorder_buffer.item_counts import Counts, ItemCounter, row_products
from evenstep.reorder_buffer.vision import checked_counts
from evenstep.serialize import Leaf

__all__ = ["MicrobatchFields"]

# Subclasses, such as named tuples, would not come back as they were.
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict})


class FieldRules(Protocol):
    """What a layout says about fields."""

    @property
    def counters(self) -> Mapping[str, ItemCounter]:
        """What finds the items per sample, by group."""
        ...

    def kind_of(self, key: str, value: Leaf) -> FieldKind:
        """Return the kind of a field."""
        ...


class MicrobatchFields:
    """The fields of one micro-batch, with the rows that each sample has of each.

    Rows and totals are counted once per field, when first asked for.

    Attributes:
        fields: Values by dotted key.
        size: Number of samples.
    """

    __slots__ = ("_counts", "_items", "_rows", "_rules", "_totals", "fields", "size")

    def __init__(
        self,
        rules: FieldRules,
        fields: Mapping[str, Leaf],
        *,
        size: int,
        counts: Counts | None = None,
    ) -> None:
        self.fields = fields
        self.size = size
        self._rules = rules
        self._counts = counts
        self._items: dict[str, list[int]] = {}
        self._rows: dict[str, list[int]] = {}
        self._totals: dict[str, list[int]] = {}

    def samples(self) -> list[dict[str, Leaf]]:
        """Cut every field; return the samples in order, one value or view per field."""
        columns = [self._column(key, value) for key, value in self.fields.items()]
        return [dict(zip(self.fields, row, strict=True)) for row in zip(*columns, strict=True)]

    def cut(self) -> list[CutSample] | None:
        """Return :meth:`samples` cut by arithmetic; None unless all are tensors in host memory."""
        cut: dict[str, CutField | None] = {}
        for key, value in self.fields.items():
            if value is None:
                cut[key] = None
                continue
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                return None
            kind = self._rules.kind_of(key, value)
            dim, rows = None, [1] * self.size
            if not (isinstance(kind, Global) or value.ndim == 0):
                dim = kind.dim % value.ndim if isinstance(kind, Batched) else 0
                rows = self.rows(key)
            cut[key] = cut_field(value, dim, rows)
            if cut[key] is None:
                return None
        return cut_samples(cut)

    def batch_dim(self, key: str) -> int | None:
        """Return the batch dim of a batched tensor that fits, None for every other field."""
        value = self.fields.get(key)
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return None
        kind = self._rules.kind_of(key, value)
        return kind.dim % value.ndim if isinstance(kind, Batched) and self.rows(key) else None

    def totals(self, key: str) -> list[int]:
        """Return the sum of each sample's entries in a count field, as patches of a grid.

        Args:
            key: Key of an integer tensor ``[n]`` or ``[n, k]`` (entry: the product of a row).
        """
        totals = self._totals.get(key)
        if totals is None:
            entries = row_products(key, self.fields[key])
            cuts = accumulate(self.rows(key), initial=0)
            totals = [sum(entries[start:end]) for start, end in pairwise(cuts)]
            self._totals[key] = totals
        return [*totals]

    def rows(self, key: str) -> list[int]:
        """Return how many rows of the field ``key`` each sample has; they are all its rows.

        Raises:
            ValueError: If the field does not fit its kind or the number of samples, naming it.
        """
        rows = self._rows.get(key)
        if rows is None:
            value = self.fields[key]
            kind = self._rules.kind_of(key, value)
            rows = self._rows[key] = self._find_rows(key, kind)
            self._check_rows(key, value, kind, rows)
        return rows

    def _column(self, key: str, value: Leaf) -> Column:
        if type(value) not in _PLAIN_TYPES and not isinstance(value, torch.Tensor):
            raise ValueError(
                f"field {key!r}: a {type(value).__name__} can be neither cut nor sent; give a "
                "tensor (torch.as_tensor), a plain list or tuple with one value per sample, or a "
                "plain value that all samples share."
            )
        kind = self._rules.kind_of(key, value)
        if isinstance(kind, Global) or is_indivisible(value):
            return [value] * self.size
        assert isinstance(value, torch.Tensor | list | tuple)
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise ValueError(
                f"field {key!r}: a tensor of layout {value.layout} cannot be cut into samples; "
                "make it dense with .to_dense()."
            )
        return split_column(value, self.rows(key), kind.dim if isinstance(kind, Batched) else 0)

    def _find_rows(self, key: str, kind: FieldKind) -> list[int]:
        if isinstance(kind, Items):
            return self._items_of(key, kind)
        if not isinstance(kind, Ragged):
            return [1] * self.size
        count_key = kind.count_key(key)
        if self.fields.get(count_key) is not None:
            self._rows[key] = []  # a circle of count fields ends here, and fails the check below
            return self.totals(count_key)
        count_kind = self._rules.kind_of(count_key, None)
        if isinstance(count_kind, Items):
            return self._items_of(count_key, count_kind)
        raise ValueError(
            f"field {key!r}: its rows are counted by {count_key!r}, which the micro-batch does not "
            "have; add that field, or give this one another kind in the layout."
        )

    def _items_of(self, key: str, kind: Items) -> list[int]:
        group = kind.of or parent_key(key)
        items = self._items.get(group)
        if items is None:
            items = self._items[group] = self._find_items(group, one_each=kind.one_each)
        return items

    def _find_items(self, group: str, *, one_each: bool) -> list[int]:
        """Return the items per sample of a group: as given, as counted, or one per sample."""
        given = self._counts
        counter = self._rules.counters.get(group)
        if isinstance(given, Mapping):
            given = given.get(group)
            if given is None and counter is None:
                raise ValueError(
                    f"counts for {group!r} are missing: counts by group must name every group "
                    f"whose fields the micro-batch has; got {sorted(self._counts or ())}."
                )
        elif counter is not None:
            given = None  # counts without a name are for the groups that nothing else counts
        if given is not None:
            items = checked_counts(f"counts for {group!r}", given)
        elif counter is not None:
            items = checked_counts(f"counts found for {group!r}", counter(self.fields))
        elif one_each:
            return [1] * self.size
        else:
            raise ValueError(
                f"counts for {group!r} are missing: the micro-batch does not say how many each "
                "sample has; give them (image_count_of, cu_img), or a counter in the layout."
            )
        if len(items) != self.size:
            raise ValueError(
                f"counts for {group!r} are of {len(items)} samples, and the micro-batch has "
                f"{self.size}: must hold one count per sample."
            )
        return items

    def _check_rows(self, key: str, value: Leaf, kind: FieldKind, rows: list[int]) -> None:
        dim = kind.dim if isinstance(kind, Batched) else 0
        if isinstance(value, torch.Tensor):
            if not -value.ndim <= dim < value.ndim:
                raise ValueError(
                    f"field {key!r}: a tensor {list(value.shape)} has no dim {dim}, its rule is "
                    f"{kind}; give the field another kind in the layout."
                )
            found = value.shape[dim]
        else:
            assert isinstance(value, list | tuple)
            found = len(value)
        if found != sum(rows):
            raise ValueError(self._misfit(key, value, kind, rows))

    def _misfit(self, key: str, value: Leaf, kind: FieldKind, rows: list[int]) -> str:
        """Return why a field cannot be cut into ``rows`` rows per sample, and what to do."""
        assert isinstance(value, torch.Tensor | list | tuple)
        found = f"field {key!r}: a {type(value).__name__} of {len(value)}"
        if isinstance(value, torch.Tensor):
            dim = kind.dim if isinstance(kind, Batched) else 0
            found = f"field {key!r}: a tensor {list(value.shape)} with {value.shape[dim]}"
        if isinstance(kind, Batched):
            return (
                f"{found} entries on dim {kind.dim}, and the micro-batch has {self.size} samples. "
                "It must have one entry per sample there; if its samples lie along another dim, or "
                "it belongs to all of them, say so in the layout (Batched(dim=...), Items, Ragged, "
                "Global; hf_vision_layout(...) for a Hugging Face processor's output)."
            )
        remedy = f"they come from {kind.along!r}." if isinstance(kind, Ragged) else ""
        if isinstance(kind, Items) or rows == [1] * self.size:
            remedy = (
                "give the items per sample (cu_img, image_count_of), by group where encoders "
                "differ."
            )
        return f"{found} rows, and the samples' counts {rows} add up to {sum(rows)}; {remedy}"
