"""Wraps a data iterator so that every micro-batch costs each data-parallel rank the same."""

from evenstep.balance import (
    assert_intra_no_cross_slot,
    balanced_assignment,
    balanced_index_order,
    build_window_route,
    intra_route,
    window_cost_spread,
)
from evenstep.exchange import (
    build_module_dp_process_groups,
    prepare_sample_exchange,
)
from evenstep.reorder_buffer.agreement import check_agreement
from evenstep.reorder_buffer.buffer import ReorderingBuffer
from evenstep.reorder_buffer.by_route import exchange_by_route, reassemble_window
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
from evenstep.reorder_buffer.loader import BalancedLoader, balance_loader
from evenstep.reorder_buffer.local_reorder import reorder_window_local
from evenstep.reorder_buffer.microbatch import (
    apply_sample_dispatch,
    gather_vision_subdict,
    merge_samples,
    reorder_vision_by_images,
    split_microbatch,
)
from evenstep.reorder_buffer.paired import PairedCheck, PairedOrderError
from evenstep.reorder_buffer.presets import (
    MIMO_LAYOUT,
    audio_layout,
    hf_vision_layout,
    image_layout,
    padded_text,
)
from evenstep.reorder_buffer.reader import Stateful
from evenstep.reorder_buffer.ready_costs import ImageCost, TextAndImageCost, TextCost
from evenstep.reorder_buffer.report import write_report
from evenstep.reorder_buffer.sample_list import SAMPLE_LIST, SampleListLayout
from evenstep.reorder_buffer.single_window import exchange_window
from evenstep.reorder_buffer.state import StateDict
from evenstep.reorder_buffer.stats import OnWindow, SlotLoads, WindowSeconds, WindowStats
from evenstep.reorder_buffer.stats_adapters import (
    StatsFile,
    on_every,
    read_stats,
    to_log,
    to_tensorboard,
)
from evenstep.reorder_buffer.vision import (
    cu_img_from_counts,
    empty_like_vision,
    patches_per_image,
)
from evenstep.reorder_buffer.window import OnUnevenEnd, UnevenEndError
from evenstep.reorder_buffer.windows import Launch
from evenstep.serialize import (
    deserialize_sample,
    sample_byte_size,
    sample_keys,
    serialize_sample,
    tensor_metadata,
)

__all__ = [
    "MIMO_LAYOUT",
    "SAMPLE_LIST",
    "BalancedLoader",
    "BatchLayout",
    "Batched",
    "CostFunction",
    "Counts",
    "FieldKind",
    "Global",
    "ImageCost",
    "ItemCounter",
    "Items",
    "Launch",
    "Layout",
    "MicroBatch",
    "OnUnevenEnd",
    "OnWindow",
    "PairedCheck",
    "PairedOrderError",
    "Ragged",
    "ReorderingBuffer",
    "SampleCost",
    "SampleListLayout",
    "SlotLoads",
    "StateDict",
    "Stateful",
    "StatsFile",
    "TextAndImageCost",
    "TextCost",
    "TokenCounter",
    "UnevenEndError",
    "WindowSeconds",
    "WindowStats",
    "apply_sample_dispatch",
    "assert_intra_no_cross_slot",
    "audio_layout",
    "balance_loader",
    "balanced_assignment",
    "balanced_index_order",
    "batch_to_cuda",
    "build_module_dp_process_groups",
    "build_window_route",
    "check_agreement",
    "costs_of_samples",
    "cu_img_from_counts",
    "deserialize_sample",
    "empty_like_vision",
    "exchange_by_route",
    "exchange_window",
    "gather_vision_subdict",
    "hf_vision_layout",
    "image_layout",
    "intra_route",
    "merge_samples",
    "on_every",
    "padded_text",
    "patches_per_image",
    "prepare_sample_exchange",
    "read_stats",
    "reassemble_window",
    "record_stream_for_batch",
    "reorder_vision_by_images",
    "reorder_window_local",
    "sample_byte_size",
    "sample_cost",
    "sample_keys",
    "samples_with_costs",
    "serialize_sample",
    "split_microbatch",
    "tensor_metadata",
    "to_log",
    "to_tensorboard",
    "window_cost_spread",
    "write_report",
]
