"""Wraps a data iterator so that every micro-batch costs each data-parallel rank the same."""

from evenstep.reorder_buffer.agreement import check_agreement
from evenstep.reorder_buffer.cost import (
    CostFunction,
    SampleCost,
    costs_of_samples,
    sample_cost,
    samples_with_costs,
)
from evenstep.reorder_buffer.device import batch_to_cuda, record_stream_for_batch
from evenstep.reorder_buffer.field_kinds import Batched, FieldKind, Global, Items, Ragged
from evenstep.reorder_buffer.item_counts import Counts, ItemCounter, TokenCounter
from evenstep.reorder_buffer.layout import BatchLayout, Layout, MicroBatch
from evenstep.reorder_buffer.local_reorder import reorder_window_local
from evenstep.reorder_buffer.microbatch import (
    apply_sample_dispatch,
    gather_vision_subdict,
    merge_samples,
    reorder_vision_by_images,
    split_microbatch,
)
from evenstep.reorder_buffer.presets import (
    MIMO_LAYOUT,
    audio_layout,
    hf_vision_layout,
    image_layout,
    padded_text,
)
from evenstep.reorder_buffer.sample_list import SAMPLE_LIST, SampleListLayout
from evenstep.reorder_buffer.vision import (
    cu_img_from_counts,
    empty_like_vision,
    patches_per_image,
)

__all__ = [
    "MIMO_LAYOUT",
    "SAMPLE_LIST",
    "BatchLayout",
    "Batched",
    "CostFunction",
    "Counts",
    "FieldKind",
    "Global",
    "ItemCounter",
    "Items",
    "Layout",
    "MicroBatch",
    "Ragged",
    "SampleCost",
    "SampleListLayout",
    "TokenCounter",
    "apply_sample_dispatch",
    "audio_layout",
    "batch_to_cuda",
    "check_agreement",
    "costs_of_samples",
    "cu_img_from_counts",
    "empty_like_vision",
    "gather_vision_subdict",
    "hf_vision_layout",
    "image_layout",
    "merge_samples",
    "padded_text",
    "patches_per_image",
    "record_stream_for_batch",
    "reorder_vision_by_images",
    "reorder_window_local",
    "sample_cost",
    "samples_with_costs",
    "split_microbatch",
]
