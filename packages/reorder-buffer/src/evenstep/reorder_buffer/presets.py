"""Layouts of the micro-batches that common loaders and processors make.

Each takes ``more``: rules of further fields, which come before its own and replace them.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from evenstep.reorder_buffer.field_kinds import Batched, FieldKind, Items, Ragged
from evenstep.reorder_buffer.item_counts import TokenCounter
from evenstep.reorder_buffer.layout import LANGUAGE_FIELDS, BatchLayout

__all__ = ["MIMO_LAYOUT", "audio_layout", "hf_vision_layout", "image_layout", "padded_text"]

_NO_FIELDS: Mapping[str, FieldKind] = MappingProxyType({})

# [3, B, S] or [4, B, S] with multimodal rotary embeddings; those of two dims are [B, S].
_ROTARY: Mapping[str, FieldKind] = MappingProxyType({"**.position_ids": Batched(dim=1, ndim=3)})

MIMO_LAYOUT = BatchLayout(
    fields={
        "modality_inputs.*.*.grid_thw": Items(one_each=True),
        "modality_inputs.*.*.hidden_states": Ragged(along=".grid_thw"),
        **_ROTARY,
    },
)
"""Megatron-MIMO's nested micro-batch, the layout of the reference.

``modality_inputs.<modality>.<encoder>`` holds ``hidden_states`` ``[patches, dim]`` and ``grid_thw``
``[images, 3]``. Each encoder is a group of its own, named by that path, with one image per sample
unless counts are given. ``position_ids`` are ``[B, S]`` or ``[3, B, S]``; all else has the batch on
dim 0. So it also fits any flat micro-batch of ``[B, ...]`` tensors."""


def padded_text(
    *, pad_token_id: int, pad_side: Literal["left", "right"] = "right"
) -> dict[str, FieldKind]:
    """Return the rules of text that a loader pads to the longest sample of each micro-batch.

    Micro-batches of different ranks then differ in length, and their samples are padded on to a
    common one when they meet: ``input_ids`` with ``pad_token_id``, ``labels`` with -100 (what
    ``torch.nn.functional.cross_entropy`` ignores), masks, types and positions with 0.

    Args:
        pad_token_id: The tokenizer's padding id.
        pad_side: The end that the loader pads.

    Returns:
        Rules for a layout's ``fields`` or ``more``.
    """

    def batched(pad: int, *, dim: int = 0, ndim: int | None = None) -> Batched:
        return Batched(dim=dim, ndim=ndim, pad=pad, pad_side=pad_side)

    masks_and_types = ("attention_mask", "loss_mask", "token_type_ids", "mm_token_type_ids")
    return {
        "input_ids": batched(pad_token_id),
        "labels": batched(-100),
        **{key: batched(0) for key in masks_and_types},
        "**.position_ids": batched(0, dim=1, ndim=3),
        "position_ids": batched(0),
    }


def hf_vision_layout(
    *,
    image_token_id: int | None = None,
    video_token_id: int | None = None,
    spatial_merge_size: int = 2,
    more: Mapping[str, FieldKind] = _NO_FIELDS,
) -> BatchLayout:
    """Return the layout of a Hugging Face processor's output with grids, as of Qwen2-VL and later.

    ``pixel_values`` ``[patches, dim]`` goes with ``image_grid_thw`` ``[images, 3]``, and
    ``pixel_values_videos`` with ``video_grid_thw`` (and ``second_per_grid_ts`` ``[videos]``).
    How many of them a sample has is counted from its placeholder tokens where their id is given,
    and else taken from the caller's counts for the groups ``image`` and ``video``.

    Args:
        image_token_id: The image placeholder in ``input_ids``.
        video_token_id: The video placeholder in ``input_ids``.
        spatial_merge_size: Patches per token along height and width; the processor's
            ``merge_size``.
        more: Rules of further fields.
    """
    token_ids = {"image": image_token_id, "video": video_token_id}
    return BatchLayout(
        fields=_ordered(
            more,
            {
                "image_grid_thw": Items(of="image"),
                "pixel_values": Ragged(along="image_grid_thw"),
                "video_grid_thw": Items(of="video"),
                "pixel_values_videos": Ragged(along="video_grid_thw"),
                "second_per_grid_ts": Items(of="video"),
            },
        ),
        counters={
            group: TokenCounter(
                token_id=token_id,
                grid=f"{group}_grid_thw",
                square_merge_size=spatial_merge_size**2,
            )
            for group, token_id in token_ids.items()
            if token_id is not None
        },
    )


def image_layout(
    *,
    count_field: str | None = "num_images",
    image_fields: Sequence[str] = ("pixel_values", "pixel_attention_mask", "image_sizes"),
    more: Mapping[str, FieldKind] = _NO_FIELDS,
) -> BatchLayout:
    """Return the layout of whole images, ``pixel_values`` ``[images, C, H, W]``.

    Args:
        count_field: Key of the images per sample, ``[B]``; None takes the caller's counts for the
            group ``image``. (One image per sample needs no layout: that is ``[B, C, H, W]``.)
        image_fields: Keys of the fields with one row per image.
        more: Rules of further fields.
    """
    kind: FieldKind = Items(of="image") if count_field is None else Ragged(along=count_field)
    return BatchLayout(fields=_ordered(more, dict.fromkeys(image_fields, kind)))


def audio_layout(
    *,
    lengths: str = "audio_lengths",
    frame_fields: Sequence[str] = ("audio_features",),
    clip_fields: Sequence[str] = (),
    count_field: str | None = None,
    more: Mapping[str, FieldKind] = _NO_FIELDS,
) -> BatchLayout:
    """Return the layout of audio features laid end to end, ``[frames, ...]``, with their lengths.

    Args:
        lengths: Key of the frames per clip, ``[clips]``.
        frame_fields: Keys of the fields with one row per frame.
        clip_fields: Keys of further fields with one row per clip.
        count_field: Key of the clips per sample, ``[B]``; None is one clip per sample.
        more: Rules of further fields.
    """
    kind: FieldKind = Batched() if count_field is None else Ragged(along=count_field)
    return BatchLayout(
        fields=_ordered(
            more,
            {
                **dict.fromkeys((lengths, *clip_fields), kind),
                **dict.fromkeys(frame_fields, Ragged(along=lengths)),
            },
        ),
        # A micro-batch of speech need not have ids.
        size_fields=(*LANGUAGE_FIELDS, lengths if count_field is None else count_field),
    )


def _ordered(more: Mapping[str, FieldKind], own: Mapping[str, FieldKind]) -> dict[str, FieldKind]:
    """Return the rules of ``more``, then a preset's own, then the general ones, each key once."""
    return {**more, **own, **_ROTARY, **more}  # the first gives the place, the last the value
