"""A mistake in the arguments of one rank: all ranks raise, and the next step works."""

from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from evenstep.gbpacking import (
    DynamicCpOptions,
    PackingOptions,
    Sample,
    build_unpacked_sample,
    wrap_data_iterator_for_global_batch_packing,
)
from evenstep.gbpacking.step_lengths import StepLengths
from tests.harness import RankPools

pytest.importorskip("megatron.core")  # for its iterator

Layout = tuple[int, int, int, int]
"""Ranks along TP, CP, DP and PP."""

FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "num_microbatches": ("num_microbatches is 0", {"num_microbatches": 0}),
    "iterator": ("data_iterator is None", {"loader": None}),
    "capacity": ("max_seqlen_per_dp_cp_rank is None", {"max_seqlen_per_dp_cp_rank": None}),
    "scheduler": ("is 'nonesuch'", {"sequence_packing_scheduler": "nonesuch"}),
    "timeout": ("timeout_s is -1", {"options": PackingOptions(timeout_s=-1)}),
    "other options": ("options is DynamicCpOptions", {"options": DynamicCpOptions()}),
    "no options": ("options is {}", {"options": {}}),
}
"""What one rank gets wrong: the text of its error, and what it passes."""


def _groups(layout: Layout) -> Any:
    """Return this rank's groups, laid out as Megatron-Core does: TP fastest, then CP, DP, PP."""
    import torch
    import torch.distributed as dist

    tp, cp, dp, pp = layout
    ranks = torch.arange(dist.get_world_size()).view(pp, dp, cp, tp)
    p, d, c, t = (int(i) for i in (ranks == dist.get_rank()).nonzero()[0])
    members = {
        "tp": ranks[p, d, c, :],
        "cp": ranks[p, d, :, t],
        "dp": ranks[p, :, c, t],
        "pp": ranks[:, d, c, t],
    }
    return SimpleNamespace(
        **{
            name: dist.new_group(of_group.tolist(), use_local_synchronization=True)
            for name, of_group in members.items()
        }
    )


def _samples() -> Iterator[Sample]:
    for number in count(1):
        yield build_unpacked_sample([number] * 8, [number] * 8, multiple=4)


def _step(groups: Any, samples: Iterator[Sample], /, **changes: Any) -> str:
    """Run one step; return its error, or that there was none."""
    arguments: dict[str, Any] = {
        "sequence_packing_scheduler": "evenstep_balanced",
        "max_seqlen_per_dp_cp_rank": 32,
        "hidden_size": 64,
        "num_microbatches": 2,
        "loader": samples,
        "options": PackingOptions(timeout_s=30),
        **changes,
    }
    try:
        wrap_data_iterator_for_global_batch_packing(
            arguments["loader"],
            SimpleNamespace(**arguments),
            arguments["num_microbatches"],
            groups,
            options=arguments["options"],
        )
    except Exception as error:  # noqa: BLE001 - its text is the result
        return f"{type(error).__name__}: {error}"
    return "none"


def _faults(
    rank: int, _: int, layout: Layout, at_fault: int, names: Sequence[str]
) -> list[tuple[str, str]]:
    """Return, by fault, the error of the step with it and that of the next one."""
    groups, loader = _groups(layout), _samples()
    return [
        (
            _step(groups, loader, **(FAULTS[name][1] if rank == at_fault else {})),
            _step(groups, loader),
        )
        for name in names
    ]


_ABOVE_TP_0 = [name for name in FAULTS if name != "iterator"]


@pytest.mark.parametrize(
    ("layout", "at_fault", "names"),
    [
        ((1, 1, 2, 1), 1, [*FAULTS]),
        ((1, 1, 2, 1), 0, ["scheduler", "iterator"]),
        ((2, 1, 1, 2), 2, ["iterator", *FAULTS]),
        ((2, 1, 1, 2), 1, _ABOVE_TP_0),
        ((1, 2, 2, 1), 3, ["capacity", *FAULTS]),
    ],
    ids=["dp2", "dp2-rank0", "tp2-pp2", "above-tp0", "cp2-dp2"],
)
def test_a_mistake_of_one_rank_raises_on_all_and_the_next_step_works(
    ranks: RankPools, layout: Layout, at_fault: int, names: list[str]
) -> None:
    world_size = layout[0] * layout[1] * layout[2] * layout[3]
    results = ranks(world_size).run(_faults, layout, at_fault, names, deadline_s=120)
    for name, outcomes in zip(names, zip(*results, strict=True), strict=True):
        for rank, (during, after) in enumerate(outcomes):
            assert FAULTS[name][0] in during, (rank, name)
            kind = "ValueError" if rank == at_fault else "PeerFailedError"
            assert during.startswith(kind), (rank, name)
            assert after == "none", (rank, name)


def _changed(rank: int, _: int) -> list[str]:
    groups, loader = _groups((1, 1, 2, 1)), _samples()
    other = [PackingOptions(timeout_s=20), PackingOptions(timeout_s=30, extra_microbatches=0.1)]
    return [
        _step(groups, loader),
        _step(groups, loader, **({"options": other[0]} if rank else {})),
        _step(groups, loader, options=other[1]),
        *(_step(groups, loader, **({"options": other[1]} if rank else {})) for _ in range(2)),
    ]


def test_settings_may_change_on_all_ranks_and_not_on_one(ranks: RankPools) -> None:
    for first, timeout, on_all, on_one, again in ranks(2).run(_changed, deadline_s=120):
        assert (first, timeout, on_all) == ("none", "none", "none")
        assert on_one.startswith(("MismatchError", "ProtocolError"))
        assert again == on_one


def _new(rank: int, _: int) -> list[str]:
    groups, loader = _groups((1, 1, 2, 1)), _samples()
    other = PackingOptions(timeout_s=30, extra_microbatches=0.1)
    return [_step(groups, loader, **({"options": other} if rank else {})) for _ in range(3)]


def test_settings_that_only_one_rank_has_not_seen_are_told(ranks: RankPools) -> None:
    for errors in ranks(2).run(_new, deadline_s=120):
        assert all("rank 1 has extra_microbatches = 0.1" in error for error in errors)


def test_an_iterator_on_some_ranks_of_a_stage_is_refused() -> None:
    reports: Any = [SimpleNamespace(slot_counts=counts) for counts in ((1, 1), ())]
    with pytest.raises(ValueError, match="data_iterator is None on data-parallel rank 1 alone"):
        StepLengths.from_agreement(SimpleNamespace(reports=reports))  # type: ignore[arg-type] # as much as is read


def test_without_process_groups_the_mistake_is_raised_all_the_same() -> None:
    with pytest.raises(ValueError, match="sequence_packing_scheduler is not set"):
        wrap_data_iterator_for_global_batch_packing(
            iter([]),
            SimpleNamespace(sequence_packing_scheduler=None),
            1,
            SimpleNamespace(tp=None, cp=None, pp=None, dp=None),
        )
