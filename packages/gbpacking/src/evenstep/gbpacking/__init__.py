"""Global-batch sequence packing and dynamic context parallelism for Megatron-Core."""

from evenstep.gbpacking.enabled import (
    DYNAMIC_CP_SCHEDULERS,
    dynamic_context_parallel_enabled,
    global_batch_packing_enabled,
)
from evenstep.gbpacking.finalize import finalize_packed_seq_params
from evenstep.gbpacking.megatron_api import probe_global_batch_packing_support
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

__all__ = [
    "DYNAMIC_CP_SCHEDULERS",
    "PackingSettings",
    "Sample",
    "Violation",
    "build_unpacked_sample",
    "check_packing_settings",
    "dynamic_context_parallel_enabled",
    "finalize_packed_seq_params",
    "fold_alignment_padding",
    "folding_collate",
    "global_batch_packing_enabled",
    "identity_collate",
    "packing_violations",
    "padding_multiple",
    "probe_global_batch_packing_support",
]
