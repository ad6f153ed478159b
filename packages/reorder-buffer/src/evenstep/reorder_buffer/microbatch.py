"""The reference's functions on micro-batches: cut, join, and pick samples of one."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from evenstep.reorder_buffer.field_kinds import Items, Ragged
from evenstep.reorder_buffer.item_counts import Counts
from evenstep.reorder_buffer.layout import BatchLayout, MicroBatch
from evenstep.reorder_buffer.microbatch_fields import MicrobatchFields
from evenstep.reorder_buffer.presets import MIMO_LAYOUT
from evenstep.reorder_buffer.vision import (
    ImageCounts,
    empty_like_vision,
    image_counts_from_cu_img,
    patches_per_image,
)
from evenstep.serialize import FlatSample

__all__ = [
    "CuImg",
    "apply_sample_dispatch",
    "gather_vision_subdict",
    "merge_samples",
    "reorder_vision_by_images",
    "split_microbatch",
]

CuImg: TypeAlias = ImageCounts | Mapping[str, ImageCounts] | None
"""Cumulative image offsets per sample (``B + 1``), for all encoders or by group of items."""

_VISION = BatchLayout(
    fields={"grid_thw": Items(of="image", one_each=True), "hidden_states": Ragged(along="grid_thw")}
)


def split_microbatch(
    batch: Mapping[str, object], *, cu_img: CuImg = None, layout: BatchLayout = MIMO_LAYOUT
) -> list[FlatSample]:
    """Split a micro-batch into ``B`` per-sample flat (dotted-key) dicts with size-1 batch dims.

    Args:
        batch: Nested micro-batch.
        cu_img: Cumulative per-sample image offsets (length ``B + 1``), one table for all encoders
            or one per group (``{"modality_inputs.images.clip": [0, 2, 3], ...}``); None is one
            image per sample, or what the layout counts by itself.
        layout: The form of ``batch``.

    Returns:
        ``B`` flat samples in batch order, all tensors views of ``batch``; see
        :meth:`BatchLayout.split`.

    Raises:
        ValueError: If a field does not fit its kind, naming it, or ``cu_img`` is no such table.
    """
    return layout.split(batch, counts=_counts_of(cu_img))


def merge_samples(flats: Sequence[FlatSample], *, layout: BatchLayout = MIMO_LAYOUT) -> MicroBatch:
    """Rebuild a micro-batch from per-sample flat dicts (inverse of :func:`split_microbatch`).

    Args:
        flats: Per-sample flat dicts in the desired batch order, of one or many micro-batches.
        layout: The form of the micro-batch.

    Returns:
        The nested micro-batch, tensors concatenated on their batch, patch, or image dim.

    Raises:
        ValueError: If ``flats`` is empty, or samples disagree about a field, naming it.
    """
    return layout.merge(flats)


def apply_sample_dispatch(
    batch: Mapping[str, object],
    sample_indices: Sequence[int],
    *,
    cu_img: CuImg = None,
    layout: BatchLayout = MIMO_LAYOUT,
) -> MicroBatch:
    """Pick samples of a micro-batch: their entries of every tensor, encoder input and list.

    Args:
        batch: Nested micro-batch.
        sample_indices: Indices of samples in the wanted order.
        cu_img: As in :func:`split_microbatch`.
        layout: The form of ``batch``.

    Returns:
        The micro-batch of these samples.

    Raises:
        ValueError: As :func:`split_microbatch`, or if there are no indices or one is out of range.
    """
    flats = split_microbatch(batch, cu_img=cu_img, layout=layout)
    return layout.merge(_pick("sample_indices", flats, sample_indices))


def gather_vision_subdict(
    value: Mapping[str, torch.Tensor | None],
    sample_indices: Sequence[int],
    n_samples: int,
    *,
    cu_img: CuImg = None,
) -> MicroBatch:
    """Pick whole samples from one encoder's inputs, 0 to N images per sample.

    Args:
        value: ``hidden_states`` ``[patches, ...]`` and ``grid_thw`` ``[n_images, 3]``, or None.
        sample_indices: Indices of samples in the wanted order.
        n_samples: Number of samples in ``value``.
        cu_img: Cumulative image offsets (length ``n_samples + 1``); None is one image per sample.

    Returns:
        ``hidden_states`` and ``grid_thw`` of these samples.

    Raises:
        ValueError: If offsets, grid and patches disagree, or an index is missing or out of range.
    """
    fields = MicrobatchFields(_VISION, value, size=n_samples, counts=_counts_of(cu_img))
    return _VISION.merge(_pick("sample_indices", fields.samples(), sample_indices))


def reorder_vision_by_images(
    hidden_states: torch.Tensor, grid_thw: torch.Tensor, image_perm: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick whole images: rows of ``grid_thw`` and the patches that belong to them.

    Args:
        hidden_states: ``[patches, ...]``, the images' patches end to end.
        grid_thw: ``[n_images, 3]``.
        image_perm: Indices of images in the wanted order.

    Returns:
        ``hidden_states`` and ``grid_thw`` of these images.

    Raises:
        ValueError: If grid and patches disagree, or an index is out of range.
    """
    images = patches_per_image(grid_thw).shape[0]
    if not image_perm:
        return empty_like_vision(hidden_states, grid_thw)
    picked = gather_vision_subdict(
        {"hidden_states": hidden_states, "grid_thw": grid_thw}, image_perm, images
    )
    return picked["hidden_states"], picked["grid_thw"]


def _counts_of(cu_img: CuImg) -> Counts | None:
    if cu_img is None:
        return None
    if isinstance(cu_img, Mapping):
        return {group: image_counts_from_cu_img(table) for group, table in cu_img.items()}
    return image_counts_from_cu_img(cu_img)


def _pick(name: str, flats: Sequence[FlatSample], indices: Sequence[int]) -> list[FlatSample]:
    for position, index in enumerate(indices):
        if not 0 <= index < len(flats):
            raise ValueError(
                f"{name}[{position}]={index}: must be the index of one of {len(flats)} samples."
            )
    return [flats[index] for index in indices]
