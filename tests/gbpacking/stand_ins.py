"""Megatron-Core's schedulers as main and dev have them: the exact signatures, no behaviour."""

import enum
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

SCHEDULE = "megatron.core.datasets.data_schedule"


class BaseScheduler:
    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size = cp_size
        self.dp_size = dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage


class DpBalancedScheduler(BaseScheduler):
    def get_groups_and_subsamples(
        self, sample_id_seqlens: list[tuple[int, int]]
    ) -> list[list[list[int]]]:
        return [[[sample_id] for sample_id, _ in sample_id_seqlens]]


class Calls(list[tuple[str, dict[str, Any]]]):
    """What was called, with which arguments."""


def main_module(calls: Calls) -> ModuleType:
    """As on Megatron-Core main: an enum of schedulers, a fetch without `config`."""

    def wrap_data_iterator(
        data_iterator: Iterator[Any] | None,
        config: object,
        num_microbatches: int,
        pg_collection: object | None = None,
    ) -> tuple[Any, int, float, float]:
        calls.append(("wrap", dict(locals())))
        return data_iterator, num_microbatches, 10.0, 100.0

    def get_batch_on_this_rank_for_sequence_packing(
        data_iterator: Iterator[Any] | None,
        vpp_size: int | None = None,
        mtp_on_this_rank: bool = False,
        vp_stage: int | None = None,
        pg_collection: object | None = None,
    ) -> tuple[Any, ...]:
        calls.append(("fetch", dict(locals())))
        return ("tokens", "labels", "loss_mask", None, "position_ids", None)

    class Enum(enum.Enum):
        DP_BALANCED = "dp_balanced"

    module = ModuleType(SCHEDULE)
    module.__dict__.update(
        PackingScheduler=Enum,
        DpBalancedScheduler=DpBalancedScheduler,
        scheduler_map={Enum.DP_BALANCED: DpBalancedScheduler},
        wrap_data_iterator=wrap_data_iterator,
        get_batch_on_this_rank_for_sequence_packing=get_batch_on_this_rank_for_sequence_packing,
    )
    return module


def dev_module(calls: Calls) -> ModuleType:
    """As on Megatron-Core dev: a dict of schedulers, a fetch with `dynamic_cp` and `config`."""

    def get_batch_on_this_rank_for_sequence_packing(
        data_iterator: Iterator[Any] | None,
        vpp_size: int | None = None,
        mtp_on_this_rank: bool = False,
        vp_stage: int | None = None,
        pg_collection: object | None = None,
        dynamic_cp: bool = False,
        config: object | None = None,
    ) -> tuple[Any, ...]:
        calls.append(("fetch", dict(locals())))
        return ("tokens", "labels", "loss_mask", None, "position_ids", None, "padding_mask")

    module = main_module(calls)
    module.__dict__.update(
        scheduler_map={
            "dp_balanced": DpBalancedScheduler,
            "default_dynamic_cp": DpBalancedScheduler,
        },
        get_batch_on_this_rank_for_sequence_packing=get_batch_on_this_rank_for_sequence_packing,
    )
    del module.__dict__["PackingScheduler"]
    return module


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> None:
    """Put a stand-in where Megatron-Core's module is; None makes importing it fail."""
    monkeypatch.setitem(sys.modules, SCHEDULE, module)
