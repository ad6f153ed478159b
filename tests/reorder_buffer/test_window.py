"""`exchange_window` on real ranks, against what the contract's route says, byte for byte."""

import logging
import re
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from evenstep.balance import build_window_route
from evenstep.exchange import ModuleGroups
from evenstep.reorder_buffer import (
    MIMO_LAYOUT,
    SAMPLE_LIST,
    BatchLayout,
    exchange_window,
    reorder_window_local,
)
from evenstep.reorder_buffer.balancer import WindowBalancer
from evenstep.serialize import copies, flatten_nested, laid_out
from evenstep.serialize.copies import copy_all
from tests.harness import RankPools
from tests.reorder_buffer.microbatches import share_memory
from tests.reorder_buffer.numbered import (
    checked,
    cost_of,
    groups,
    image_counts,
    microbatch,
    numbers_in,
    shard,
)

SIZE = 4


def _window(rank: int, world_size: int, slots: int, size: int, max_images: int) -> list[Any]:
    return [
        microbatch(shard(slot, rank, world_size, size), max_images=max_images)
        for slot in range(slots)
    ]


def _cost_of_number(number: int) -> float:
    return cost_of({"input_ids": torch.tensor([[number * 100]])})


def _expected(world_size: int, slots: int, size: int, n_groups: int) -> list[list[list[int]]]:
    """Return the numbers on each rank in each slot, by the contract's route."""
    shards = [
        [number for rank in range(world_size) for number in shard(slot, rank, world_size, size)]
        for slot in range(slots)
    ]
    costs = [[_cost_of_number(number) for number in slot] for slot in shards]
    route = build_window_route(costs, n_groups, world_size)
    numbers = [number for slot in shards for number in slot]
    placed: list[list[list[tuple[int, int]]]] = [
        [[] for _ in range(slots)] for _ in range(world_size)
    ]
    for number, (slot, owner, position) in zip(numbers, route, strict=True):
        placed[owner][slot].append((position, number))
    return [[[number for _, number in sorted(slot)] for slot in rank] for rank in placed]


def _exchange(
    rank: int, world_size: int, slots: int, size: int, max_images: int, settings: dict[str, Any]
) -> list[list[int]]:
    with groups(settings.get("dp_size")) as made:
        settings = {"n_groups": world_size, "dp_size": world_size, **settings}
        dp_size = settings["dp_size"]
        if rank >= dp_size:
            return []  # of another module
        found = exchange_window(
            _window(rank, dp_size, slots, size, max_images),
            dp_rank=rank,
            cost_of=cost_of,
            dp_group_gloo=made.control,
            dp_group_nccl=made.payload,
            image_count_of=image_counts,
            **settings,
        )
        return [checked(batch, max_images=max_images) for batch in found]


@pytest.mark.parametrize("max_images", [0, 1, 3], ids=["text", "single image", "several images"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_sample_arrives_where_the_route_says(
    ranks: RankPools, world_size: int, slots: int, max_images: int
) -> None:
    found = ranks(world_size).run(_exchange, slots, SIZE, max_images, {})
    assert found == _expected(world_size, slots, SIZE, world_size)


@pytest.mark.parametrize("strategy", ["refined", "least_move", "lpt"])
def test_other_strategies_keep_every_sample_in_its_slot(ranks: RankPools, strategy: str) -> None:
    found = ranks(2).run(_exchange, 3, SIZE, 3, {"strategy": strategy})
    for slot in range(3):
        there = sorted(number for rank in found for number in rank[slot])
        assert there == [*range(slot * 2 * SIZE, (slot + 1) * 2 * SIZE)]


@pytest.mark.parametrize(
    ("sizes", "n_groups"), [((2, 4), 4), ((4, 1), 4), ((2, 3), 6)], ids=["2|4", "1|4", "2|3"]
)
def test_modules_of_different_sizes_derive_one_order(
    ranks: RankPools, sizes: tuple[int, int], n_groups: int
) -> None:
    """Each of two modules holds all samples, and each orders them for itself."""
    total, slots = 24, 2
    orders = []
    for dp_size in sizes:
        settings = {"n_groups": n_groups, "dp_size": dp_size}
        if dp_size == 1:
            windows = [microbatch(shard(slot, 0, 1, total)) for slot in range(slots)]
            local = reorder_window_local(
                windows, n_groups=n_groups, cost_of=cost_of, image_count_of=image_counts
            )
            found = [[checked(batch) for batch in local]]
        else:
            found = ranks(4).run(_exchange, slots, total // dp_size, 3, settings)[:dp_size]
        orders.append([[n for rank in found for n in rank[slot]] for slot in range(slots)])
    assert orders[0] == orders[1]


def test_one_rank_needs_no_groups() -> None:
    found = exchange_window(
        [microbatch(range(6))],
        dp_rank=0,
        dp_size=1,
        n_groups=3,
        cost_of=cost_of,
        dp_group_gloo=None,
        dp_group_nccl=None,
        image_count_of=image_counts,
    )
    local = reorder_window_local(
        [microbatch(range(6))], n_groups=3, cost_of=cost_of, image_count_of=image_counts
    )
    assert checked(found[0]) == numbers_in(local[0])


def test_probe_logs_the_spread_per_slot(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="evenstep.reorder_buffer"):
        _alone([microbatch([0, 1]), microbatch([2, 3])], probe=True)
    assert [record.getMessage()[:6] for record in caplog.records] == ["slot 0", "slot 1"]
    assert "'after_max':" in caplog.text


def _joined(batch: Any, made: ModuleGroups, rank: int, world_size: int, **more: Any) -> Any:
    (joined,) = exchange_window(
        [batch],
        n_groups=world_size,
        dp_rank=rank,
        dp_size=world_size,
        cost_of=cost_of,
        dp_group_gloo=made.control,
        dp_group_nccl=made.payload,
        image_count_of=image_counts,
        **more,
    )
    return joined


def _uses_its_memory_again(rank: int, world_size: int) -> list[list[int]]:
    """Write to what was given as soon as it may be, while rank 1 takes its time to join."""
    merge = WindowBalancer.merge

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.1 if rank == 1 else 0.0)
        return merge(*args, **more)

    found = []
    with groups() as made, mock.patch.object(WindowBalancer, "merge", slow):
        for turn in range(4):
            batch = microbatch(shard(turn, rank, world_size, SIZE), names=False)
            joined = _joined(batch, made, rank, world_size)
            for value in flatten_nested(batch).values():
                assert isinstance(value, torch.Tensor)
                value.zero_()
            found.append(checked(joined))
    return found


def test_what_was_given_may_be_written_to_once_the_window_is_there(ranks: RankPools) -> None:
    found = ranks(3).run(_uses_its_memory_again)
    for turn in range(4):
        there = sorted(number for served in found for number in served[turn])
        assert there == [*range(turn * 3 * SIZE, (turn + 1) * 3 * SIZE)]


def _stays_where_it_is(rank: int, world_size: int, donate: bool) -> list[list[str]]:
    """Balance a window of which only the second micro-batch is uneven; write to it at once."""
    numbers = [[10, 10, 10], [90, 90, 10] if rank == 0 else [10, 10, 10]]
    merge = WindowBalancer.merge

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.2 if rank == 1 else 0.0)
        return merge(*args, **more)

    with groups() as made, mock.patch.object(WindowBalancer, "merge", slow):
        given = [microbatch(of_slot, names=False) for of_slot in numbers]
        found = exchange_window(
            given,
            n_groups=world_size,
            dp_rank=rank,
            dp_size=world_size,
            cost_of=lambda flat: float(flat["input_ids"].flatten()[0]),
            dp_group_gloo=made.control,
            dp_group_nccl=made.payload,
            image_count_of=image_counts,
            strategy="least_move",
            donate=donate,
        )
        for batch in found:
            checked(batch)
            for value in flatten_nested(batch).values():
                assert isinstance(value, torch.Tensor)
                value.zero_()
        return [share_memory(*pair) for pair in zip(given, found, strict=True)]


def test_a_micro_batch_that_stays_is_not_copied_if_it_was_given_away(ranks: RankPools) -> None:
    fields = [*flatten_nested(microbatch([1], names=False))]
    assert ranks(2).run(_stays_where_it_is, True) == [[fields, []]] * 2
    assert ranks(2).run(_stays_where_it_is, False) == [[[], []]] * 2


def _copies_its_own_slowly(rank: int, world_size: int) -> tuple[float, list[int]]:
    """Rank 1 takes a second for what it kept; the others write to what they gave meanwhile."""

    def slow(of_window: Any) -> None:
        time.sleep(1.0 if of_window else 0.0)
        copy_all(of_window)

    with groups() as made:
        for turn in range(2):  # the first connects the ranks
            batch = microbatch(shard(turn, rank, world_size, SIZE), names=False)
            dist.barrier()
            started = time.monotonic()
            chosen = slow if rank == 1 and turn else copy_all
            with (
                mock.patch.object(laid_out, "copy_all", chosen),
                mock.patch.object(copies, "copy_all", chosen),
            ):
                joined = _joined(batch, made, rank, world_size)
            took = time.monotonic() - started
            for value in flatten_nested(batch).values():
                assert isinstance(value, torch.Tensor)
                value.zero_()
        return took, checked(joined)


def test_who_has_copied_what_peers_lend_keeps_them_no_longer(ranks: RankPools) -> None:
    found = ranks(3).run(_copies_its_own_slowly)
    assert [took < 0.8 for took, _ in found] == [True, False, True]
    assert sorted(number for _, numbers in found for number in numbers) == [*range(12, 24)]


def _fails_to_join(rank: int, world_size: int) -> str:
    merge = WindowBalancer.merge

    def slow_or_failing(*args: Any, **more: Any) -> Any:
        if rank == 1:
            raise MemoryError("no room")
        time.sleep(0.3)
        return merge(*args, **more)

    with groups() as made, mock.patch.object(WindowBalancer, "merge", slow_or_failing):
        try:
            joined = _joined(
                microbatch(shard(0, rank, world_size, SIZE), names=False), made, rank, world_size
            )
        except MemoryError as error:
            return str(error)
        return f"{len(checked(joined))} samples"


def test_who_cannot_join_a_window_does_not_keep_the_others_from_it(ranks: RankPools) -> None:
    assert ranks(3).run(_fails_to_join) == ["4 samples", "no room", "4 samples"]


def _alone(batches: list[Any], **settings: Any) -> list[Any]:
    settings = {"cost_of": cost_of, "n_groups": 2, "dp_size": 1, "dp_rank": 0, **settings}
    return exchange_window(
        batches, dp_group_gloo=None, dp_group_nccl=None, image_count_of=image_counts, **settings
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"n_groups": 3, "dp_size": 2}, "n_groups is 3 and dp_size 2; n_groups must be a positive"),
        ({"n_groups": 0}, "n_groups is 0"),
        ({"dp_size": 0}, "dp_size 0"),
        ({"dp_size": 2}, "a control group is needed for 2 ranks"),
        ({"strategy": "unknown"}, "unknown"),
        ({"n_groups": 3}, "must divide"),
        ({"cost_of": lambda _: float("nan")}, "cost_of returned nan for sample 0"),
    ],
)
def test_bad_input_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _alone([microbatch([0, 1, 2, 3])], **settings)


def test_windows_must_hold_equal_micro_batches() -> None:
    with pytest.raises(ValueError, match="batches is empty; a window needs at least one"):
        _alone([])
    with pytest.raises(ValueError, match=r"micro-batches of this window have \[2, 4\] samples"):
        _alone([microbatch([0, 1]), microbatch([2, 3, 4, 5])])


def _fail(rank: int, world_size: int, case: str) -> str:
    """Make one rank's window bad, and return what this rank got to hear."""
    batches = _window(rank, world_size, 2, SIZE, 3)
    settings: dict[str, Any] = {}
    last = rank == world_size - 1
    if case == "empty" and last:
        batches = []
    elif case == "fewer samples" and last:
        batches = [microbatch([0, 1]), microbatch([2, 3])]
    elif case == "other dtype" and last:
        batches[1]["loss_mask"] = batches[1]["loss_mask"].to(torch.float64)
    elif case == "field missing" and last:
        del batches[0]["loss_mask"]
    elif case == "other length" and last:
        batches[0]["input_ids"] = torch.zeros(SIZE, 9, dtype=torch.int64)
    elif case == "groups":
        settings = {"n_groups": 3 * world_size}
    elif case == "strategy" and last:
        settings = {"strategy": "least_move"}
    with groups() as made:
        try:
            exchange_window(
                batches,
                dp_rank=rank,
                dp_size=world_size,
                **{"n_groups": world_size, "cost_of": cost_of, **settings},
                dp_group_gloo=made.control,
                dp_group_nccl=made.payload,
                image_count_of=image_counts,
            )
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
    return "no error"


@pytest.mark.parametrize(
    ("case", "first", "last"),
    [
        ("empty", "PeerFailedError.*on rank 1: ValueError: batches is empty", "^ValueError: batch"),
        ("fewer samples", r"rank 0: \[4, 4\], rank 1: \[2, 2\]", r"rank 0: \[4, 4\], rank 1: \[2"),
        ("other dtype", "loss_mask", "loss_mask"),
        ("field missing", "loss_mask", "loss_mask"),
        ("other length", "input_ids", "input_ids"),
        ("groups", "6", "6"),
        ("strategy", "^MismatchError: rank 1 came to another plan", "^MismatchError: rank 1 came"),
    ],
)
def test_a_bad_window_raises_on_all_ranks(
    ranks: RankPools, case: str, first: str, last: str
) -> None:
    found = ranks(2).run(_fail, case)
    assert re.search(first, found[0]), found
    assert re.search(last, found[1]), found


def _sample_lists(rank: int, world_size: int) -> list[list[int]]:
    lists = [
        [{"x": torch.full((n + 1,), n), "n": n} for n in shard(slot, rank, world_size, 2)]
        for slot in range(2)
    ]
    with groups() as made:
        found = exchange_window(
            lists,
            dp_rank=rank,
            dp_size=world_size,
            n_groups=world_size,
            cost_of=lambda flat: float(flat["n"] + 1),
            dp_group_gloo=made.control,
            dp_group_nccl=made.payload,
            layout=SAMPLE_LIST,
        )
    for batch in found:
        for sample in batch:
            assert torch.equal(sample["x"], torch.full((sample["n"] + 1,), sample["n"]))
    return [[sample["n"] for sample in batch] for batch in found]


def test_lists_of_samples_are_exchanged_too(ranks: RankPools) -> None:
    found = ranks(2).run(_sample_lists)
    assert [sorted(found[0][slot] + found[1][slot]) for slot in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


class _KeepingLayout(BatchLayout):
    """A layout whose micro-batches keep the samples that they were joined from."""

    __slots__ = ()

    def merge(self, flats: Any) -> dict[str, Any]:
        raw = [flat["input_ids"] for flat in flats]
        return {**BatchLayout.merge(self, flats), "raw": raw}


def _kept_samples(rank: int, world_size: int) -> bool:
    """Exchange windows, and say whether earlier ones are still as they were."""
    layout = _KeepingLayout(fields=MIMO_LAYOUT.fields)
    with groups() as made:
        served = [
            _joined(
                microbatch(shard(turn, rank, world_size, 16)), made, rank, world_size, layout=layout
            )
            for turn in range(4)
        ]
    return all(torch.equal(torch.cat(batch["raw"]), batch["input_ids"]) for batch in served)


def test_a_layout_of_its_own_may_keep_the_samples(ranks: RankPools) -> None:
    assert ranks(2).run(_kept_samples) == [True, True]
