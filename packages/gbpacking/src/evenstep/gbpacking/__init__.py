"""Global-batch sequence packing and dynamic context parallelism for Megatron-Core."""

from evenstep.gbpacking.choice import (
    DYNAMIC_SCHEDULERS,
    SCHEDULERS,
    SchedulerChoice,
    choose_scheduler,
)
from evenstep.gbpacking.dynamic_groups import cp_group_of, destroy_cp_groups, prepare_cp_groups
from evenstep.gbpacking.dynamic_plan import DynamicCpOptions
from evenstep.gbpacking.dynamic_register import register_dynamic_with_megatron
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
from evenstep.gbpacking.follow_cp import follow_cp_groups
from evenstep.gbpacking.loss import StepLoss, TokenLoss, step_loss, token_loss
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
    "DYNAMIC_SCHEDULERS",
    "SCHEDULERS",
    "DynamicCpOptions",
    "IteratorEndedError",
    "PackingError",
    "PackingOptions",
    "PackingSettings",
    "Sample",
    "SampleError",
    "SchedulerChoice",
    "StepLoss",
    "TokenLoss",
    "Violation",
    "build_unpacked_sample",
    "check_packing_settings",
    "choose_scheduler",
    "cp_group_of",
    "destroy_cp_groups",
    "dynamic_context_parallel_enabled",
    "finalize_packed_seq_params",
    "fold_alignment_padding",
    "folding_collate",
    "follow_cp_groups",
    "get_batch_for_global_batch_packing",
    "global_batch_packing_enabled",
    "identity_collate",
    "make_packed_seq_params",
    "pack_microbatch",
    "packing_violations",
    "padding_mask",
    "padding_multiple",
    "prepare_cp_groups",
    "probe_global_batch_packing_support",
    "register_dynamic_with_megatron",
    "register_with_megatron",
    "slice_for_cp",
    "step_loss",
    "token_loss",
    "wrap_data_iterator_for_global_batch_packing",
    "zigzag_indices",
]
