"""Values that all samples of a micro-batch share: compared between ranks before any bytes move.

Such a value stands in every sample, and samples from all ranks meet in a micro-batch. Where ranks
differ, those that mix would fail and the others go on; so each tells digests of its values with its
offer, and all find the same difference.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch

from evenstep.reorder_buffer.columns import is_indivisible
from evenstep.reorder_buffer.field_kinds import Global
from evenstep.reorder_buffer.layout import BatchLayout
from evenstep.serialize import FlatSample, SampleSchema, dumps, is_laid_out

__all__ = ["check_common_values", "note_of"]

_Digests: TypeAlias = Mapping[str, str]
"""Of one micro-batch: by key, a digest of the value, or the type of a list that is cut."""

_DIGEST_BYTES: Final = 8
_MISSING: Final = "missing"


def note_of(layout: BatchLayout, firsts: Sequence[FlatSample]) -> bytes:
    """Return the note for a window's offer; empty if its micro-batches share no values.

    Args:
        layout: The form of the micro-batches.
        firsts: The first sample of each.
    """
    slots = [_digests(layout, flat) for flat in firsts]
    return json.dumps(slots, sort_keys=True).encode() if any(slots) else b""


def check_common_values(notes: Sequence[bytes], num_slots: int, *, across_slots: bool) -> None:
    """Raise unless all ranks have the same values in each micro-batch; on all ranks alike.

    Args:
        notes: What `note_of` returned on each rank.
        num_slots: Micro-batches to look at.
        across_slots: Whether samples may change their micro-batch, so that all must agree.

    Raises:
        ValueError: Naming the field, the micro-batch and two ranks.
    """
    if not any(notes) or (not across_slots and len({*notes}) == 1):
        return
    told: list[list[_Digests]] = [json.loads(note) if note else [{}] * num_slots for note in notes]
    first = told[0]
    for rank, slots in enumerate(told):
        for slot in range(num_slots):
            other = 0 if across_slots else slot
            for key in sorted({*slots[slot], *first[other]}):
                found, wanted = slots[slot].get(key, _MISSING), first[other].get(key, _MISSING)
                if found != wanted:
                    raise ValueError(
                        f"field {key!r}: rank {rank} has another value than rank 0"
                        f"{_where(slot, other)} ({found}, {wanted}). What has no batch dim must be "
                        "the same for all samples that may meet; give each sample its own in a "
                        "list or a tensor with a batch dim, or leave the field out."
                    )


def _where(slot: int, other: int) -> str:
    if slot == other:
        return f" in micro-batch {slot} of the window"
    return f": in micro-batch {slot} of the window, and in {other}"


def _digests(layout: BatchLayout, flat: FlatSample) -> _Digests:
    digests = {}
    for key in flat:
        if is_laid_out(flat) and _is_cut(layout, flat.layout.schema, key):
            continue
        value = flat[key]
        if isinstance(layout.kind_of(key, value), Global) or is_indivisible(value):
            encoded = dumps({"": value})
            digests[key] = hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()
        elif not isinstance(value, torch.Tensor):
            digests[key] = type(value).__name__
    return digests


def _is_cut(layout: BatchLayout, schema: SampleSchema, key: str) -> bool:
    """Tell from its schema whether a value is a part of a tensor, which would cost a view."""
    place = schema.places[key]
    ndim = 0 if place is None else schema.fields[place].ndim
    return ndim > 0 and not isinstance(layout.kind_of_dims(key, ndim), Global)
