"""Global-batch sequence packing and dynamic context parallelism for Megatron-Core."""

from evenstep.gbpacking.choice import SCHEDULERS, SchedulerChoice, choose_scheduler
from evenstep.gbpacking.enabled import (
    DYNAMIC_CP_SCHEDULERS,
    dynamic_context_parallel_enabled,
    global_batch_packing_enabled,
)
from evenstep.gbpacking.entry_points import (
    get_batch_for_global_batch_packing,
    wrap_data_iterator_for_global_batch_packing,
)
from evenstep.gbpacking.errors import IteratorEndedError, PackingError, SampleError
from evenstep.gbpacking.finalize import finalize_packed_seq_params
from evenstep.gbpacking.megatron_api import probe_global_batch_packing_support
from evenstep.gbpacking.register import register_with_megatron
from evenstep.gbpacking.sample import (
    Sample,
    build_unpacked_sample,
    fold_alignment_padding,
    folding_collate,
    identity_collate,
    padding_multiple,
)
from evenstep.gbpacking.settings import (
    PackingSettings,
    Violation,
    check_packing_settings,
    packing_violations,
)
from evenstep.gbpacking.step_plan import PackingOptions
from evenstep.gbpacking.thd import (
    make_packed_seq_params,
    pack_microbatch,
    padding_mask,
    slice_for_cp,
)
from evenstep.gbpacking.zigzag import zigzag_indices

__all__ = [
    "DYNAMIC_CP_SCHEDULERS",
    "SCHEDULERS",
    "IteratorEndedError",
    "PackingError",
    "PackingOptions",
    "PackingSettings",
    "Sample",
    "SampleError",
    "SchedulerChoice",
    "Violation",
    "build_unpacked_sample",
    "check_packing_settings",
    "choose_scheduler",
    "dynamic_context_parallel_enabled",
    "finalize_packed_seq_params",
    "fold_alignment_padding",
    "folding_collate",
    "get_batch_for_global_batch_packing",
    "global_batch_packing_enabled",
    "identity_collate",
    "make_packed_seq_params",
    "pack_microbatch",
    "packing_violations",
    "padding_mask",
    "padding_multiple",
    "probe_global_batch_packing_support",
    "register_with_megatron",
    "slice_for_cp",
    "wrap_data_iterator_for_global_batch_packing",
    "zigzag_indices",
]
