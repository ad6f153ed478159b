"""`ReorderingBuffer` on real ranks: every sample once, in all modes, to the end and not further."""

import functools
import logging
import logging.handlers
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from evenstep.exchange import MismatchError
from evenstep.reorder_buffer import ReorderingBuffer, UnevenEndError
from evenstep.serialize import flatten_nested
from tests.harness import RankPools
from tests.reorder_buffer.microbatches import share_memory
from tests.reorder_buffer.numbered import (
    MODES,
    buffer,
    checked,
    cost_of,
    data,
    groups,
    image_counts,
    microbatch,
    shard,
)

ALL_MODES = pytest.mark.parametrize("mode", MODES)


def _served(
    rank: int, world_size: int, slots: list[int], settings: dict[str, Any], names: bool = False
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Iterate over as many micro-batches per rank as given; return what was served."""
    with groups() as made:
        source = data(rank, world_size, slots=slots[rank], names=names)
        with buffer(source, made, **settings) as balanced:
            found = [checked(batch) for batch in balanced]
            for _ in range(2):
                with pytest.raises(StopIteration):
                    next(balanced)
            assert iter(balanced) is balanced
            return found, balanced.left_over


@ALL_MODES
@pytest.mark.parametrize(("world_size", "window_size"), [(2, 1), (2, 3), (4, 3)])
@pytest.mark.parametrize("names", [False, True], ids=["lent", "packed"])
def test_every_sample_is_served_once_and_stays_in_its_slot(
    ranks: RankPools, mode: str, world_size: int, window_size: int, names: bool
) -> None:
    slots = 7  # the last window is short
    settings = {**MODES[mode], "window_size": window_size}
    found = ranks(world_size).run(_served, [slots] * world_size, settings, names)
    for slot in range(slots):
        there = sorted(number for served, _ in found for number in served[slot])
        size = 4 * world_size
        assert there == [*range(slot * size, (slot + 1) * size)]
    assert [left_over for _, left_over in found] == [()] * world_size


@ALL_MODES
def test_what_stays_is_served_where_it_lies_if_given_away(ranks: RankPools, mode: str) -> None:
    settings = {**MODES[mode], "strategy": "least_move", "window_size": 2}
    fields = [*flatten_nested(microbatch([1], names=False))]
    donated = ranks(2).run(_where_it_was_read, {**settings, "donate": True})
    assert donated == [[fields, []] * 3] * 2
    assert ranks(2).run(_where_it_was_read, settings) == [[[], []] * 3] * 2


def _where_it_was_read(rank: int, _: int, settings: dict[str, Any]) -> list[list[str]]:
    """Iterate over micro-batches of which every other one is uneven; tell what was not copied."""
    read = [
        microbatch([9, 9, 1] if slot % 2 and rank else [1, 1, 1], names=False) for slot in range(6)
    ]
    with groups() as made, buffer(read, made, cost_of=_number, **settings) as balanced:
        return [share_memory(batch, served) for batch, served in zip(read, balanced, strict=True)]


def test_a_loader_may_fill_its_memory_again_in_line(ranks: RankPools) -> None:
    found = ranks(2).run(_from_one_memory)
    for slot in range(5):
        there = sorted(number for served in found for number in served[slot])
        assert there == [*range(8 * slot, 8 * slot + 8)]


def _from_one_memory(rank: int, world_size: int) -> list[list[int]]:
    """Iterate over micro-batches that all lie in the memory of the first."""

    def refilled() -> Iterator[dict[str, Any]]:
        kept = microbatch(shard(0, rank, world_size, 4), max_images=0, names=False)
        for slot in range(5):
            fresh = microbatch(shard(slot, rank, world_size, 4), max_images=0, names=False)
            for there, value in zip(_tensors(kept), _tensors(fresh), strict=True):
                there.copy_(value)
            yield kept

    with groups() as made, buffer(refilled(), made, overlap=False) as balanced:
        return [checked(batch, max_images=0) for batch in [*balanced]]


def _number(flat: Any) -> float:
    return float(flat["input_ids"].flatten()[0])


def test_all_modes_serve_the_same(ranks: RankPools) -> None:
    served = [
        ranks(2).run(_served, [5, 5], {**mode, "window_size": 2, "strategy": "least_move"})
        for mode in MODES.values()
    ]
    assert served[0] == served[1] == served[2]


@ALL_MODES
@pytest.mark.parametrize(
    ("slots", "served", "left_over"),
    [([7, 5], 5, (1, 0)), ([3, 9], 3, (0, 3)), ([0, 4], 0, (0, 3)), ([0, 0], 0, ())],
)
def test_all_ranks_stop_behind_the_last_micro_batch_that_all_have(
    ranks: RankPools, mode: str, slots: list[int], served: int, left_over: tuple[int, ...]
) -> None:
    found = ranks(2).run(_served, slots, {**MODES[mode], "window_size": 3})
    assert [(len(numbers), left) for numbers, left in found] == [(served, left_over)] * 2


def _uneven(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[int, list[str]]:
    """Return how many micro-batches came before the end, and what two further calls raised."""
    with groups() as made:
        source = data(rank, world_size, slots=5 + rank)
        with buffer(source, made, **settings) as balanced:
            return _drain(balanced)


def _drain(balanced: ReorderingBuffer[Any]) -> tuple[int, list[str]]:
    served = 0
    errors: list[str] = []
    while len(errors) < 2:
        try:
            checked(next(balanced))
            served += 1
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the caller looks at it
            errors.append(f"{type(error).__name__}: {error}")
    return served, errors


@ALL_MODES
def test_an_uneven_end_raises_on_all_ranks_if_so_chosen(ranks: RankPools, mode: str) -> None:
    settings = {**MODES[mode], "window_size": 2, "on_uneven_end": "raise"}
    found = ranks(2).run(_uneven, settings)
    for served, errors in found:
        assert served == 4
        assert errors[0] == errors[1]
        assert errors[0].startswith(
            "UnevenEndError: the data of rank 0 ended first; micro-batches read but left over per "
            "rank: [0, 1]. Give every rank equally many"
        )
    assert issubclass(UnevenEndError, RuntimeError)


def _settings_differ(rank: int, world_size: int, settings: list[dict[str, Any]]) -> str:
    with groups() as made:
        try:
            buffer([], made, **settings[rank])
        except (MismatchError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
    return f"no error on rank {rank} of {world_size}"


def _other_cost(_: object) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"n_groups": 4}, "rank 0 has n_groups = 2, rank 1 has n_groups = 4"),
        ({"window_size": 2}, "rank 1 has window_size = 2"),
        ({"strategy": "refined"}, "rank 1 has strategy = 'refined'"),
        ({"cost_of": _other_cost}, "cost_of = '.*_other_cost'"),
        ({"cost_of": functools.partial(_other_cost, 3)}, r"_other_cost\(3\)"),
        ({"on_uneven_end": "raise"}, "rank 1 has on_uneven_end = 'raise'"),
    ],
)
def test_settings_that_differ_are_found_at_construction(
    ranks: RankPools, setting: dict[str, Any], text: str
) -> None:
    found = ranks(2).run(_settings_differ, [{"n_groups": 2}, setting])
    for message in found:
        assert message.startswith("MismatchError: ranks must be set alike, but rank 0 has ")
        assert re.search(text, message)


class _CannotBeOpened:
    def __iter__(self) -> Any:
        raise OSError("no such file")


def _open(rank: int, world_size: int, settings: dict[str, Any]) -> str:
    with groups() as made:
        source = _CannotBeOpened() if rank == 1 else data(rank, world_size, slots=1)
        with buffer(source, made, **settings) as balanced:
            return _drain(balanced)[1][0]


@ALL_MODES
def test_a_source_that_cannot_be_opened_raises_on_all_ranks(ranks: RankPools, mode: str) -> None:
    peer, own = ranks(2).run(_open, MODES[mode])
    assert (
        peer
        == "PeerFailedError: failed while agreeing on a window on rank 1: OSError: no such file"
    )
    assert own == "OSError: no such file"


def test_a_source_that_is_none_is_refused_before_any_collective() -> None:
    with pytest.raises(ValueError, match="the data is a NoneType; it must be iterable"):
        _alone(None)


def _alone(source: Any, **settings: Any) -> ReorderingBuffer[Any]:
    settings = {"dp_rank": 0, "dp_size": 1, "n_groups": 2, "cost_of": cost_of, **settings}
    return ReorderingBuffer(
        source, dp_group_gloo=None, dp_group_nccl=None, image_count_of=image_counts, **settings
    )


@ALL_MODES
def test_one_rank_alone_is_put_in_order(mode: str) -> None:
    with _alone(data(0, 1, slots=3), **MODES[mode]) as balanced:
        found = [checked(batch) for batch in balanced]
    assert [sorted(numbers) for numbers in found] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert found[0] != [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"window_size": 0}, "window_size is 0; it must be a positive number of micro-batches"),
        ({"window_size": True}, "window_size is True"),
        ({"n_groups": 3, "dp_size": 2}, "n_groups is 3 and dp_size 2; n_groups must be a positive"),
        ({"launch": "gpu"}, "launch is 'gpu'; it must be 'auto', 'caller' or 'worker'"),
        ({"on_uneven_end": "pad"}, "on_uneven_end is 'pad'; it must be 'stop' or 'raise'"),
        ({"strategy": "best"}, "best"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0; it must be a positive number of seconds"),
        ({"dp_size": 2}, "a control group is needed for 2 ranks"),
        ({"dp_rank": 1}, r"dp_rank is 1; it must be in \[0, 1\)"),
        ({"cost_of": None}, "cost_of is None; it must be a function of a flat sample"),
    ],
)
def test_bad_arguments_are_refused_before_any_collective(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        _alone([], **settings)


def test_overlap_is_refused_where_one_hardware_queue_serves_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ValueError, match="overlap=True cannot work under CUDA_DEVICE_MAX_CONNECT"):
        _alone([])
    with _alone(data(0, 1, slots=1), overlap=False) as balanced:
        assert len([*balanced]) == 1


def _overlap_on_one_group(rank: int, world_size: int) -> list[str]:
    texts = []
    with groups() as made:
        pairs = [(made.control, dist.group.WORLD), (dist.group.WORLD, made.payload)]
        for control, payload in [*pairs, (made.control, made.control)]:
            with pytest.raises(ValueError, match="group") as caught:
                ReorderingBuffer(
                    [],
                    dp_rank=rank,
                    dp_size=world_size,
                    n_groups=2,
                    cost_of=cost_of,
                    dp_group_gloo=control,
                    dp_group_nccl=payload,
                    launch="caller",
                )
            texts.append(str(caught.value))
    return texts


def test_overlap_needs_groups_that_nobody_else_uses(ranks: RankPools) -> None:
    for default, control, same in ranks(2).run(_overlap_on_one_group):
        assert "dp_group_nccl is the default group, which the training loop uses" in default
        assert "dp_group_gloo is the default group" in control
        assert "dp_group_gloo and dp_group_nccl are one group" in same


def _odd_sizes(rank: int, world_size: int, mode: str) -> str:
    with groups() as made:
        source = data(rank, world_size, slots=1, size=3)
        with buffer(source, made, n_groups=4, **MODES[mode]) as balanced:
            served, errors = _drain(balanced)
    assert served == 0
    return errors[0]


@ALL_MODES
def test_samples_that_do_not_divide_are_refused_with_the_numbers(
    ranks: RankPools, mode: str
) -> None:
    for message in ranks(2).run(_odd_sizes, mode):
        assert message.startswith("ValueError")
        assert "6" in message
        assert "4" in message


def test_resident_bytes_are_those_of_three_windows_at_most(ranks: RankPools) -> None:
    one = sum(t.numel() * t.element_size() for t in _tensors(microbatch(range(4))))
    for mode, settings in MODES.items():
        for peak, now in ranks(2).run(_resident, settings):
            windows = {"inline": 2, "worker": 3, "caller": 3}[mode]
            assert one < peak < (windows + 4) * 2 * one, mode  # and packed, received, joined
            assert 0 < now < 3 * one


def _resident(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[int, int]:
    with groups() as made:
        source = (microbatch(range(4)) for _ in range(6))
        with buffer(source, made, cost_of=_other_cost, **settings) as balanced:
            served = sum(1 for _ in balanced)
            assert served == 6, (rank, world_size)
            return balanced.peak_resident_bytes, balanced.resident_bytes


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return [value] if hasattr(value, "element_size") else []


def test_a_warning_says_what_was_left_over(
    ranks: RankPools,
) -> None:
    for message in ranks(2).run(_logged):
        assert message == (
            "the data of rank 0 ended first; micro-batches read but left over per rank: [0, 1]; "
            "all ranks stop here"
        )


def _logged(rank: int, world_size: int) -> str:
    handler = logging.handlers.BufferingHandler(capacity=100)
    logger = logging.getLogger("evenstep.reorder_buffer")
    logger.addHandler(handler)
    try:
        _served(rank, world_size, [1, 2], {"overlap": False, "window_size": 2})
    finally:
        logger.removeHandler(handler)
    return handler.buffer[0].getMessage()
