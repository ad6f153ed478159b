"""A declarative description of a micro-batch, by which it is cut into samples and joined again."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar, cast

import torch

from evenstep.exchange import HOST_MEMORY, collection_paused
from evenstep.reorder_buffer.columns import join_column
from evenstep.reorder_buffer.cut_samples import uncut
from evenstep.reorder_buffer.field_kinds import (
    Batched,
    FieldKind,
    Global,
    Items,
    Ragged,
    key_pattern,
)
from evenstep.reorder_buffer.item_counts import Counts, ItemCounter
from evenstep.reorder_buffer.microbatch_fields import MicrobatchFields
from evenstep.serialize import (
    Copies,
    FieldJoiner,
    FlatSample,
    Leaf,
    flatten_nested,
    is_laid_out,
    unflatten_nested,
)

__all__ = ["LANGUAGE_FIELDS", "BatchLayout", "BatchT", "Layout", "MicroBatch"]

MicroBatch: TypeAlias = dict[str, Any]
"""A nested micro-batch; its values are the user's, who knows their types, as in a collate."""

BatchT = TypeVar("BatchT")

LANGUAGE_FIELDS = ("input_ids", "labels", "loss_mask", "attention_mask", "position_ids")
"""Fields of which every micro-batch for a language model has one, with a batch dim."""


class Layout(Protocol[BatchT]):
    """Cuts micro-batches of one form into samples and joins samples to such micro-batches.

    ``merge(split(batch))`` equals ``batch`` exactly, and ``merge`` takes samples from any mixture
    of micro-batches, also such as arrived from other ranks.
    """

    def split(self, batch: BatchT, *, counts: Counts | None = None) -> list[FlatSample]:
        """Return the samples of ``batch`` in order, as views."""
        ...

    def merge(self, flats: Sequence[FlatSample]) -> BatchT:
        """Return the micro-batch of ``flats`` in order."""
        ...


def cuts_as_declared(layout: object) -> "TypeGuard[BatchLayout]":
    """Tell whether a layout is just its declaration: a derived class may cut and join otherwise."""
    return type(layout) is BatchLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchLayout:
    """The form of a nested dict of tensors, lists and plain values: each field's kind, by its key.

    Attributes:
        fields: Kinds by key pattern (``*`` is any one name of a dotted key, ``**`` any number);
            the first that matches counts.
        unlisted: The kind of a field that no pattern matches; None refuses such fields.
        counters: What finds the items per sample, by group of :class:`Items`.
        size_fields: Keys of :class:`Batched` fields that tell the number of samples; the first
            that the micro-batch has counts, and all others must agree with it.
    """

    fields: Mapping[str, FieldKind] = field(default_factory=dict)
    unlisted: FieldKind | None = field(default_factory=Batched)
    counters: Mapping[str, ItemCounter] = field(default_factory=dict)
    size_fields: Sequence[str] = LANGUAGE_FIELDS
    _patterns: tuple[tuple[re.Pattern[str], FieldKind], ...] = field(init=False, repr=False)
    _kinds: dict[tuple[str, int | None], FieldKind] = field(
        init=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for pattern, kind in self.fields.items():
            if not isinstance(kind, FieldKind):
                raise ValueError(
                    f"fields[{pattern!r}]={kind!r}: must be Batched, Items, Ragged or Global."
                )
        if isinstance(self.size_fields, str) or not self.size_fields:
            raise ValueError(
                f"size_fields={self.size_fields!r}: must name at least one field with a batch dim, "
                "such as ('input_ids',), from which the number of samples is read."
            )
        patterns = tuple((key_pattern(pattern), kind) for pattern, kind in self.fields.items())
        # Copies of its own, so that no later change of the caller's dicts goes halfway.
        object.__setattr__(self, "fields", dict(self.fields))
        object.__setattr__(self, "counters", dict(self.counters))
        object.__setattr__(self, "size_fields", tuple(self.size_fields))
        object.__setattr__(self, "_patterns", patterns)

    def kind_of(self, key: str, value: Leaf) -> FieldKind:
        """Return the kind of the field ``key``: by its key, and for a tensor by its number of dims.

        Raises:
            ValueError: If no pattern matches and ``unlisted`` is None.
        """
        return self.kind_of_dims(key, value.ndim if isinstance(value, torch.Tensor) else None)

    def kind_of_dims(self, key: str, ndim: int | None) -> FieldKind:
        """Return :meth:`kind_of` a tensor with ``ndim`` dims, or of another value (None)."""
        kind = self._kinds.get((key, ndim))
        if kind is None:
            kind = self._kinds[key, ndim] = self._find_kind(key, ndim)
        return kind

    def _find_kind(self, key: str, ndim: int | None) -> FieldKind:
        for pattern, kind in self._patterns:
            if isinstance(kind, Batched) and kind.ndim is not None and kind.ndim != ndim:
                continue
            if pattern.fullmatch(f"{key}."):
                return kind
        if self.unlisted is None:
            raise ValueError(
                f"field {key!r}: the layout has no rule for it and takes no unlisted fields; add "
                "one to BatchLayout.fields, or drop the field."
            )
        return self.unlisted

    def read(
        self, batch: Mapping[str, object], *, counts: Counts | None = None
    ) -> MicrobatchFields:
        """Return the fields of ``batch`` with their kinds, ready to be cut or counted.

        Args:
            batch: A nested micro-batch; any mapping.
            counts: Items per sample, for every group without a counter, or by group name (then
                for every group of :class:`Items` that the micro-batch has and no counter finds).

        Raises:
            ValueError: If the number of samples cannot be told or is 0.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"the micro-batch is a {type(batch).__name__}, and a BatchLayout takes a dict of "
                "fields; for a list of samples pass layout=SAMPLE_LIST, or let collate_fn return "
                "a dict"
            )
        fields = flatten_nested(cast("dict[str, Leaf]", dict(batch)))
        return MicrobatchFields(self, fields, size=self._batch_size(fields), counts=counts)

    def batch_size(self, batch: Mapping[str, object]) -> int:
        """Return the number of samples of ``batch``, from the first of ``size_fields`` it has."""
        return self.read(batch).size

    def _batch_size(self, fields: Mapping[str, Leaf]) -> int:
        for key in self.size_fields:
            value = fields.get(key)
            if value is None or not isinstance(kind := self.kind_of(key, value), Batched):
                continue
            if isinstance(value, torch.Tensor) and -value.ndim <= kind.dim < value.ndim:
                size = value.shape[kind.dim]
            elif isinstance(value, list | tuple):
                size = len(value)
            else:
                continue
            if size == 0:
                raise ValueError(f"field {key!r}: the micro-batch has no samples; leave it out.")
            return size
        raise ValueError(
            f"the micro-batch has none of {list(self.size_fields)} with a batch dim (its fields: "
            f"{list(fields)}), so its number of samples is unknown; name one in "
            "BatchLayout.size_fields."
        )

    def split(
        self, batch: Mapping[str, object], *, counts: Counts | None = None
    ) -> list[FlatSample]:
        """Cut a micro-batch into its samples.

        Args:
            batch: A nested micro-batch of ``B`` samples.
            counts: Items per sample; see :meth:`read`.

        Returns:
            ``B`` flat samples in batch order. Tensors are views with a batch dim of size 1 (or
            the sample's own rows, where ragged), detached from autograd; lists hold the sample's
            own entries; values without a batch dim stand in every sample.

        Raises:
            ValueError: If a field does not fit its kind or the number of samples, naming it.
        """
        return self.read(batch, counts=counts).samples()

    def merge(self, flats: Sequence[Mapping[str, Leaf]]) -> MicroBatch:
        """Join samples to a micro-batch (inverse of :meth:`split`), copying each byte once.

        Args:
            flats: Samples in the wanted order, views of anything.

        Returns:
            A nested micro-batch whose tensors have their own memory. A ragged field that some
            samples lack altogether has no rows of theirs.

        Raises:
            ValueError: If ``flats`` is empty, or samples disagree about a field, naming it.
        """
        return self.merge_each([flats])[0]

    def merge_each(
        self,
        slots: Sequence[Sequence[Mapping[str, Leaf]]],
        *,
        fetched: Callable[[], None] | None = None,
        donated: bool = False,
    ) -> list[MicroBatch]:
        """Return :meth:`merge` of each of several micro-batches, copying for all at the end.

        Args:
            slots: The samples of each.
            fetched: Called once nothing is needed any more that other processes lend.
            donated: Whether a micro-batch may keep the memory of the one that its samples were cut
                from, if they are all of it.
        """
        merged, copies = [], Copies()
        with torch.no_grad(), collection_paused():
            for flats in slots:
                if donated and (fields := uncut(flats)) is not None:
                    merged.append(unflatten_nested(fields))
                    continue
                laid_out = [flat for flat in flats if is_laid_out(flat)]
                joiner = None
                if laid_out and len(laid_out) == len(flats):
                    joiner = FieldJoiner(laid_out, HOST_MEMORY.empty, copies)
                merged.append(self._merged(flats, joiner))
        if fetched is not None:
            copies.fetch()
            fetched()
        copies.make()
        return merged

    def _merged(
        self, flats: Sequence[Mapping[str, Leaf]], joiner: FieldJoiner | None
    ) -> MicroBatch:
        if not flats:
            raise ValueError("flats is empty: a micro-batch needs at least one sample to merge.")
        keys: Iterable[str] = flats[0]
        if not (joiner is not None and joiner.is_uniform) and any(
            flat.keys() != flats[0].keys() for flat in flats
        ):
            keys = self._all_keys(flats)
        return unflatten_nested({key: self._join(key, flats, joiner) for key in keys})

    def _join(
        self, key: str, flats: Sequence[Mapping[str, Leaf]], joiner: FieldJoiner | None
    ) -> Leaf:
        if joiner is not None and (ndim := joiner.ndim(key)):
            kind = self.kind_of_dims(key, ndim)
            if not isinstance(kind, Global):
                dim = kind.dim % ndim if isinstance(kind, Batched) else 0
                if (joined := joiner.join(key, dim)) is not None:
                    return joined
        try:
            column = [flat[key] for flat in flats]
            owners: Sequence[int] = range(len(flats))
        except KeyError:  # of a ragged field, or _all_keys had refused
            owners = [index for index, flat in enumerate(flats) if key in flat]
            column = [flats[index][key] for index in owners]
        return join_column(key, column, self.kind_of(key, column[0]), owners)

    def _all_keys(self, flats: Sequence[Mapping[str, Leaf]]) -> list[str]:
        """Return all keys of samples with different keys, which only ragged fields may lack."""
        present = dict.fromkeys(key for flat in flats for key in flat)
        keys = []
        for key in present:
            owner = next(flat for flat in flats if key in flat)
            if owner[key] == {} and any(other.startswith(f"{key}.") for other in present):
                continue  # an empty dict in one sample is filled in another
            if not isinstance(self.kind_of(key, owner[key]), Items | Ragged):
                index = next((i for i, flat in enumerate(flats) if key not in flat), None)
                if index is not None:
                    raise ValueError(
                        f"field {key!r}: sample {index} lacks it and others have it; only ragged "
                        "fields may be missing, where a sample has no rows."
                    )
            keys.append(key)
        return keys
