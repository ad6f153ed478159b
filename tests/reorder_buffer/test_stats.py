"""Statistics: right figures, on every rank, for whoever looks, and nothing for nobody."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.reorder_buffer import (
    ReorderingBuffer,
    SlotLoads,
    StatsFile,
    TextCost,
    WindowSeconds,
    WindowStats,
    on_every,
    read_stats,
    to_log,
    to_tensorboard,
)
from evenstep.reorder_buffer.measuring import PhaseClock
from evenstep.reorder_buffer.observer import WindowObserver
from evenstep.reorder_buffer.stats import plan_stats
from tests.harness import RankPools
from tests.reorder_buffer.loaders import PlainLoader, numbered_batches


def window(number: int, **changed: Any) -> WindowStats:
    slot = SlotLoads(
        before_max=30.0,
        before_min=10.0,
        before_mean=20.0,
        after_max=21.0,
        after_min=19.0,
        after_mean=20.0,
        moved_samples=2,
    )
    fields: dict[str, Any] = {
        "window": number,
        "dp_rank": 0,
        "dp_size": 2,
        "slots": (slot, slot),
        "samples": 16,
        "moved_cost_share": 0.25,
        "bytes_sent": 1000,
        "bytes_received": 3000,
        "seconds": WindowSeconds(collect=0.5, wait=0.125),
    }
    return WindowStats(**{**fields, **changed})


def alone(count: int, **settings: Any) -> ReorderingBuffer[Any]:
    return ReorderingBuffer(
        PlainLoader(numbered_batches(count)),
        dp_rank=0,
        dp_size=1,
        n_groups=1,
        dp_group_gloo=None,
        dp_group_nccl=None,
        **{"overlap": False, "cost_of": TextCost(), **settings},
    )


def test_plan_stats_of_a_window_by_hand() -> None:
    # Rank 0 reads 8 and 4, rank 1 reads 1 and 3; 4 and 3 change places in the first slot.
    costs = [[8.0, 4.0, 1.0, 3.0], [1.0, 1.0, 1.0, 1.0]]
    route = [(0, 0, 0), (0, 1, 2), (0, 1, 3), (0, 0, 1)]
    route += [(1, 0, 0), (1, 0, 1), (1, 1, 2), (1, 1, 3)]
    stats = plan_stats(costs, route, 2)
    first, second = stats.slots
    assert (first.before_max, first.before_min, first.before_mean) == (12.0, 4.0, 8.0)
    assert (first.after_max, first.after_min, first.after_mean) == (11.0, 5.0, 8.0)
    assert (first.moved_samples, second.moved_samples) == (2, 0)
    assert stats.samples == 8
    assert stats.moved_cost_share == 7.0 / 20.0
    across = plan_stats(costs, [(1 - slot, rank, pos) for slot, rank, pos in route], 2)
    assert [slot.after_mean for slot in across.slots] == [2.0, 8.0]


def test_what_follows_from_a_record() -> None:
    stats = window(3)
    assert stats.imbalance_before == 1.5
    assert stats.imbalance_after == 1.05
    assert stats.moved_sample_share == 0.25
    assert stats.scalars() == {
        "imbalance_before": 1.5,
        "imbalance_after": 1.05,
        "moved_cost_share": 0.25,
        "moved_sample_share": 0.25,
        "bytes_sent": 1000.0,
        "bytes_received": 3000.0,
        "collect_s": 0.5,
        "cost_s": 0.0,
        "control_s": 0.0,
        "pack_s": 0.0,
        "transfer_s": 0.0,
        "merge_s": 0.0,
        "wait_s": 0.125,
    }
    assert str(stats).startswith("window 3: largest / mean load 1.500 -> 1.050; moved 25.0% of")
    free = window(0, slots=tuple(plan_stats([[0.0, 0.0]], [(0, 0, 0), (0, 1, 1)], 2).slots))
    assert free.imbalance_before == free.imbalance_after == 1.0


def test_nested_phases_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = PhaseClock()
    with clock.phase("control"):
        now += 1.0
        with clock.phase("collect"):
            now += 2.0
        now += 4.0
        with clock.phase("pack"):
            now += 8.0
    with clock.phase("control"):
        now += 16.0
    assert clock.read() == WindowSeconds(control=21.0, collect=2.0, pack=8.0)


def test_phases_are_ranges_of_the_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(alone(2))
    names = {event.key for event in profile.key_averages()}
    assert {f"evenstep/{phase}" for phase in WindowSeconds.__slots__} <= names


def test_rank_0_logs_the_first_three_windows_and_every_fiftieth(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="evenstep.reorder_buffer"):
        list(alone(101))
        logged = [text for text in caplog.messages if text.startswith("window ")]
        assert [text.split(":")[0] for text in logged] == [
            f"window {number}" for number in (0, 1, 2, 50, 100)
        ]
        assert sum(text.startswith("slot 0: ") for text in caplog.messages) == 5
        assert not WindowObserver(dp_rank=1).wants(0)
    caplog.set_level(logging.WARNING, logger="evenstep.reorder_buffer")
    assert not WindowObserver(dp_rank=0).wants(0)  # so nothing is computed


def test_the_callback_gets_every_window_and_its_errors_end_the_run() -> None:
    seen: list[WindowStats] = []
    list(alone(5, window_size=2, on_window=seen.append))
    assert [(stats.window, len(stats.slots)) for stats in seen] == [(0, 2), (1, 2), (2, 1)]
    assert all(stats.seconds.wait > 0 and stats.seconds.merge > 0 for stats in seen)

    def refuse(_: WindowStats) -> None:
        raise OSError("the disk is full")

    for _ in range(2):
        buffer = alone(2, on_window=refuse)
        with pytest.raises(OSError, match="the disk is full"):
            next(buffer)


def stats_of(rank: int, world_size: int, overlap: bool) -> list[WindowStats]:
    import torch.distributed as dist

    from evenstep.exchange import ModuleGroups

    seen: list[WindowStats] = []
    main = dist.group.WORLD
    assert main is not None
    with ModuleGroups.create(main, overlap=overlap) as groups:
        list(
            ReorderingBuffer(
                PlainLoader(numbered_batches(3, size=4, first=rank * 12)),
                dp_rank=rank,
                dp_size=world_size,
                n_groups=world_size,
                cost_of=TextCost(),
                dp_group_gloo=groups.control,
                dp_group_nccl=groups.payload,
                overlap=overlap,
                on_window=seen.append,
            )
        )
    return seen


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_agree_about_loads_and_each_counts_its_own_bytes(
    ranks: RankPools, *, overlap: bool
) -> None:
    first, second = ranks(2).run(stats_of, overlap)
    assert len(first) == 3
    for mine, other in zip(first, second, strict=True):
        assert mine.slots == other.slots
        assert (mine.dp_rank, other.dp_rank) == (0, 1)
        assert (mine.bytes_sent, mine.bytes_received) == (other.bytes_received, other.bytes_sent)
        assert (mine.bytes_sent > 0) == (mine.moved_cost_share > 0 or mine.moved_sample_share > 0)
        assert mine.imbalance_after <= mine.imbalance_before


def test_adapters_count_steps_over_epochs_and_know_no_library() -> None:
    logged: list[tuple[dict[str, float], int]] = []
    points: list[tuple[str, float, int | None]] = []

    class Writer:
        def add_scalar(
            self, tag: str, scalar_value: float, global_step: int | None = None, /
        ) -> None:
            points.append((tag, scalar_value, global_step))

    def log(scalars: dict[str, float], step: int, /) -> None:
        logged.append((scalars, step))

    callback = on_every(to_log(log, prefix="load/"), to_tensorboard(Writer()))
    for number in (0, 1, 2, 0, 1, 0):  # epochs of 3, 2 and 1 windows
        callback(window(number))
    assert [step for _, step in logged] == [0, 1, 2, 3, 4, 5]
    assert logged[0][0]["load/imbalance_before"] == 1.5
    assert ("evenstep/imbalance_after", 1.05, 5) in points
    assert len(points) == 6 * len(window(0).scalars())


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    written = [window(0), window(1, bytes_sent=7)]
    for stats in written:
        StatsFile(path)(stats)
    assert read_stats(path, path) == written * 2
    lines = path.read_text().splitlines()
    broken = {**json.loads(lines[1]), "surprise": 1}
    path.write_text(f"{lines[0]}\n{json.dumps(broken)}\n")
    with pytest.raises(ValueError, match=r"rank0.jsonl, line 2 is no window of StatsFile: .*surp"):
        read_stats(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1 is no window"):
        read_stats(path)
