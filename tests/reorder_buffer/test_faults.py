"""What goes wrong on one rank, in all modes: together, in the same round, with rank and cause."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from evenstep.exchange import ExchangeError, ExchangeTimeoutError, Transfer
from evenstep.reorder_buffer import ReorderingBuffer
from evenstep.reorder_buffer.prepared_window import PreparedWindow
from evenstep.reorder_buffer.presets import MIMO_LAYOUT
from evenstep.serialize import FlatSample
from tests.harness import RankPools
from tests.reorder_buffer.numbered import (
    MODES,
    buffer,
    checked,
    cost_of,
    data,
    groups,
)

ALL_MODES = pytest.mark.parametrize("mode", MODES)
CULPRIT = 1
SIZE = 4
KEPT: list[object] = []
"""Groups with an operation under way: freeing them would wait for the peer to free them, too."""

Ending = tuple[int, str, str]
"""Micro-batches served before the error, the error, and what the next call raises."""


def _drain(balanced: ReorderingBuffer[Any], *, check: bool = True) -> Ending:
    """Serve until an error, or the end of the data, ends it."""
    served = 0
    errors: list[str] = []
    while len(errors) < 2:
        try:
            batch = next(balanced)
        except BaseException as error:  # noqa: BLE001 - SystemExit too
            errors.append(f"{type(error).__name__}: {error}")
        else:
            if check:
                checked(batch)
            served += 1
    assert not _threads()
    return served, errors[0], errors[1]


def _threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("evenstep")]


def _peer_error(ending: Ending, *texts: str) -> None:
    _, error, again = ending
    assert error.startswith(("PeerFailedError: failed while agreeing", "PeerFailedError: failed w"))
    assert f"rank {CULPRIT}: " in error
    assert all(text in error for text in texts), error
    assert again == error


# The source


class Broken:
    """A source that yields `good` micro-batches and then raises."""

    def __init__(self, rank: int, world_size: int, good: int, error: BaseException) -> None:
        self._data = data(rank, world_size, slots=good)
        self._error = error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self._data
        raise self._error


def _source_raises(
    rank: int, world_size: int, mode: str, window_size: int, good: int, error: BaseException
) -> Ending:
    source: Any = data(rank, world_size, slots=7)
    if rank == CULPRIT:
        source = Broken(rank, world_size, good, error)
    with groups() as made:
        return _drain(buffer(source, made, window_size=window_size, **MODES[mode]))


@ALL_MODES
@pytest.mark.parametrize(("window_size", "good"), [(1, 0), (1, 3), (3, 4), (3, 6)])
def test_a_source_that_raises_ends_all_ranks_behind_the_same_window(
    ranks: RankPools, mode: str, window_size: int, good: int
) -> None:
    peer, own = ranks(2).run(_source_raises, mode, window_size, good, OSError("disk gone"))
    whole_windows = good // window_size * window_size
    assert own == (whole_windows, "OSError: disk gone", "OSError: disk gone")
    assert peer[0] == whole_windows
    _peer_error(peer, "OSError: disk gone")


@ALL_MODES
@pytest.mark.parametrize("error", [SystemExit(3), MemoryError("no room"), GeneratorExit()])
def test_a_source_may_end_by_anything(ranks: RankPools, mode: str, error: BaseException) -> None:
    peer, own = ranks(2).run(_source_raises, mode, 1, 2, error)
    text = f"{type(error).__name__}: {error}"
    assert own == (2, text, text)
    assert peer[0] == 2
    _peer_error(peer, text)


# Costs


class BadCost:
    """The cost of a numbered sample, and something else for one of them."""

    def __init__(self, number: int, bad: object) -> None:
        self._number = number
        self._bad = bad

    def __call__(self, flat: FlatSample, /) -> Any:
        first = flat["input_ids"]
        assert isinstance(first, torch.Tensor)
        if int(first.flatten()[0]) // 100 != self._number:
            return cost_of(flat)
        if isinstance(self._bad, BaseException):
            raise self._bad
        return self._bad


def _cost_is_bad(rank: int, world_size: int, mode: str, number: int, bad: object) -> Ending:
    with groups() as made:
        source = data(rank, world_size, slots=3)
        balanced = buffer(source, made, cost_of=BadCost(number, bad), **MODES[mode])
        return _drain(balanced)


@ALL_MODES
@pytest.mark.parametrize("sample", [0, 2, 3], ids=["first", "middle", "last"])
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (ZeroDivisionError("no tokens"), "ZeroDivisionError: no tokens"),
        (float("nan"), "cost_of returned nan for sample {}"),
        (float("inf"), "cost_of returned inf for sample {}"),
        (-1.0, "cost_of returned -1.0 for sample {}"),
        (torch.ones(2), "cost_of returned a tensor [2] for sample {}"),
        ("7", "cost_of returned '7' for sample {}"),
    ],
    ids=["raises", "nan", "inf", "negative", "two elements", "text"],
)
def test_a_bad_cost_ends_all_ranks_and_names_the_sample(
    ranks: RankPools, mode: str, sample: int, bad: object, text: str
) -> None:
    number = 2 * SIZE + SIZE + sample  # of rank 1, in its second micro-batch
    peer, own = ranks(2).run(_cost_is_bad, mode, number, bad)
    text = text.format(sample)
    assert own[0] == peer[0] == 1
    assert text in own[1]
    assert own[1] == own[2]
    _peer_error(peer, text)


def _note_of_cost(rank: int, world_size: int, mode: str) -> list[str]:
    error = KeyError("grid")
    with groups() as made:
        source = data(rank, world_size, slots=1)
        balanced = buffer(source, made, cost_of=BadCost(SIZE + 2, error), **MODES[mode])
        with pytest.raises((KeyError, ExchangeError)) as caught:
            next(balanced)
    return getattr(caught.value, "__notes__", [])


@ALL_MODES
def test_an_exception_of_the_cost_function_says_at_which_sample(
    ranks: RankPools, mode: str
) -> None:
    _, notes = ranks(2).run(_note_of_cost, mode)
    assert notes == ["raised by cost_of for sample 2 of its micro-batch"]


# StopIteration of user code is no end of data


class StoppingLayout:
    """The layout of the contract, but joining raises once."""

    def __init__(self, error: BaseException, *, when: int) -> None:
        self._error = error
        self._left = when

    def split(self, batch: Any, *, counts: Any = None) -> list[FlatSample]:
        return MIMO_LAYOUT.split(batch, counts=counts)

    def merge(self, flats: Sequence[FlatSample]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return MIMO_LAYOUT.merge(flats)


def _user_code_stops(rank: int, world_size: int, mode: str, what: str) -> Ending:
    settings: dict[str, Any] = {}
    if what == "cost" and rank == CULPRIT:
        settings["cost_of"] = BadCost(2 * SIZE + SIZE, StopIteration())
    elif what == "cost":
        settings["cost_of"] = BadCost(-1, None)
    elif what == "layout":
        settings["layout"] = StoppingLayout(
            StopIteration(), when=1 if rank == CULPRIT else sys.maxsize
        )
    elif what == "callback":
        seen: list[object] = []

        def on_window(stats: object) -> None:
            seen.append(stats)
            if rank == CULPRIT and len(seen) == 2:
                raise StopIteration

        settings["on_window"] = on_window
    with groups() as made:
        source = data(rank, world_size, slots=5)
        return _drain(buffer(source, made, **settings, **MODES[mode]))


@ALL_MODES
@pytest.mark.parametrize("what", ["cost", "layout", "callback"])
def test_a_stop_iteration_of_user_code_is_an_error(ranks: RankPools, mode: str, what: str) -> None:
    peer, own = ranks(2).run(_user_code_stops, mode, what)
    assert own[0] == 1
    assert own[1].startswith("RuntimeError: cost_of, image_count_of, the layout, the strategy or")
    assert peer[0] >= 1  # joining and the callback come after the exchange
    _peer_error(peer, "StopIteration")


def _joining_fails(rank: int, world_size: int, mode: str) -> Ending:
    layout = StoppingLayout(MemoryError("no room"), when=1 if rank == CULPRIT else sys.maxsize)
    with groups() as made:
        source = data(rank, world_size, slots=9)
        return _drain(buffer(source, made, layout=layout, **MODES[mode]))


@ALL_MODES
def test_peers_hear_of_a_failure_after_the_exchange(ranks: RankPools, mode: str) -> None:
    peer, own = ranks(2).run(_joining_fails, mode)
    assert own == (1, "MemoryError: no room", "MemoryError: no room")
    assert 2 <= peer[0] <= 4  # served what it got before it heard
    _peer_error(peer, "MemoryError: no room")


def _interrupted_between(rank: int, world_size: int) -> Any:
    """Ctrl-C on one rank, once all have committed to a window and before its samples are read."""
    with groups() as made:
        balanced = buffer(data(rank, world_size, slots=9), made, **MODES["inline"])
        if rank != CULPRIT:
            return _drain(balanced)
        checked(next(balanced))
        started = time.monotonic()
        with (
            mock.patch.object(PreparedWindow, "finish", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            next(balanced)
        balanced.shutdown()
        return time.monotonic() - started


def test_a_rank_that_will_not_read_does_not_hold_those_who_lend(ranks: RankPools) -> None:
    peer, seconds = ranks(2).run(_interrupted_between)
    assert seconds < 10
    assert peer[0] == 2
    _peer_error(peer, "KeyboardInterrupt")


def _readers_are_late(rank: int, world_size: int, mode: str) -> Ending:
    late = ExchangeTimeoutError([0], doing="moving samples", limit="1 s")
    with groups() as made:
        balanced = buffer(data(rank, world_size, slots=9), made, **MODES[mode])
        if rank != CULPRIT:
            return _drain(balanced)
        with mock.patch.object(Transfer, "part", side_effect=late):
            return _drain(balanced)


@ALL_MODES
def test_peers_hear_that_a_rank_waits_for_its_readers_no_longer(
    ranks: RankPools, mode: str
) -> None:
    peer, own = ranks(2).run(_readers_are_late, mode)
    assert own[1].startswith("ExchangeTimeoutError: rank 0 took no part in moving samples")
    _peer_error(peer, "ExchangeTimeoutError")


# Leaving early


def _one_leaves(rank: int, world_size: int, mode: str, how: str, served: int) -> Any:
    with groups() as made:
        balanced: Any = buffer(data(rank, world_size, slots=40), made, **MODES[mode])
        if rank != CULPRIT:
            return _drain(balanced)
        for _ in range(served):
            checked(next(balanced))
        if how == "cycle":
            balanced.trainer = [balanced]
        started = time.monotonic()
        if how == "shutdown":
            balanced.shutdown()
            balanced.shutdown()
        elif how == "training raises":
            with pytest.raises(ValueError, match="loss is nan"), balanced:
                raise ValueError("loss is nan")
        else:
            del balanced
            gc.collect()
        while _threads() and time.monotonic() < started + 30:
            time.sleep(0.01)
        assert not _threads()
        return time.monotonic() - started


@ALL_MODES
@pytest.mark.parametrize("how", ["shutdown", "drop", "cycle", "training raises"])
@pytest.mark.parametrize("served", [0, 1, 3])
def test_a_rank_that_leaves_tells_its_peers(
    ranks: RankPools, mode: str, how: str, served: int
) -> None:
    peer, _ = ranks(2).run(_one_leaves, mode, how, served)
    assert served <= peer[0] <= served + 3  # all that was promised is served, byte for byte
    _peer_error(peer, "ExchangeStoppedError: the reorder buffer of this rank was shut down")


def _all_break(rank: int, world_size: int, mode: str) -> float:
    with groups() as made:

        def train() -> None:
            for step, batch in enumerate(
                buffer(data(rank, world_size, slots=9), made, **MODES[mode])
            ):
                checked(batch)
                if step == 2:
                    break

        started = time.monotonic()
        train()
        assert not _threads()
    return time.monotonic() - started


@ALL_MODES
def test_all_ranks_may_leave_the_loop(ranks: RankPools, mode: str) -> None:
    ranks(2).run(_all_break, mode)


# Groups, forks, signals


def _destroy_group(rank: int, world_size: int, mode: str) -> list[str]:
    """Destroy the groups while rank 0's worker waits for rank 1."""
    made = groups()
    blocked = threading.Event()

    def source() -> Iterator[dict[str, Any]]:
        if rank == CULPRIT:
            blocked.wait(20)
        yield from data(rank, world_size, slots=3)

    balanced = buffer(source(), made, **MODES[mode])
    KEPT.append((made, balanced))
    errors: list[str] = []

    def consume() -> None:
        try:
            next(balanced)
        except ExchangeError as error:
            errors.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    time.sleep(0.3)
    made.close()
    dist.barrier()
    blocked.set()
    consumer.join(30)
    return errors


@ALL_MODES
def test_destroyed_groups_are_a_clear_error(ranks: RankPools, mode: str) -> None:
    for errors in ranks(2).run(_destroy_group, mode):
        assert len(errors) == 1
        assert "the process group was destroyed" in errors[0]
        assert "shut the exchange down before its groups" in errors[0]


def _fork(rank: int, world_size: int, mode: str) -> int:
    with groups() as made, buffer(data(rank, world_size, slots=4), made, **MODES[mode]) as balanced:
        checked(next(balanced))
        dist.barrier()
        child = os.fork()
        if child == 0:
            try:
                next(balanced)
            except RuntimeError as error:
                balanced.shutdown()  # nothing of it is here
                os._exit(7 if "copied into another process by fork()" in str(error) else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        rest = [checked(batch) for batch in balanced]
        assert len(rest) == 3
        return os.waitstatus_to_exitcode(status)


@ALL_MODES
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_copy_raises_on_use(ranks: RankPools, mode: str) -> None:
    assert ranks(2).run(_fork, mode) == [7, 7]


def _interrupted(rank: int, world_size: int, mode: str, folder: str) -> tuple[float, str]:
    """Interrupt rank 0 while it waits for rank 1, whose source waits for that to have happened."""
    there = Path(folder) / "interrupted"

    def source() -> Iterator[dict[str, Any]]:
        if rank == CULPRIT:
            while not there.exists():
                time.sleep(0.01)
        yield from data(rank, world_size, slots=5)

    with groups() as made:
        balanced = buffer(source(), made, **MODES[mode])
        if rank == CULPRIT:
            return 0.0, _drain(balanced)[1]
        times: list[float] = []

        def interrupt() -> None:
            times.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.5, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            next(balanced)
        took_s = time.monotonic() - times[0]
        there.touch()
        with pytest.raises(KeyboardInterrupt):
            next(balanced)
        balanced.shutdown()
        return took_s, ""


@ALL_MODES
def test_ctrl_c_gets_through_and_peers_are_told(
    ranks: RankPools, mode: str, tmp_path: Path
) -> None:
    (took_s, _), (_, error) = ranks(2).run(_interrupted, mode, str(tmp_path))
    assert took_s < 1.0
    assert error.startswith("PeerFailedError: ")
    assert "rank 0: " in error
    assert "KeyboardInterrupt" in error


def _interrupt_source(rank: int, world_size: int, mode: str) -> str:
    def source() -> Iterator[dict[str, Any]]:
        yield from data(rank, world_size, slots=2)
        if rank == CULPRIT:
            raise KeyboardInterrupt
        yield from data(rank, world_size, slots=2)

    with groups() as made, buffer(source(), made, **MODES[mode]) as balanced:
        while True:
            try:
                next(balanced)
            except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt too
                return f"{type(error).__name__}: {error}"


@ALL_MODES
def test_ctrl_c_in_the_source_is_told_too(ranks: RankPools, mode: str) -> None:
    peer, own = ranks(2).run(_interrupt_source, mode)
    assert own == "KeyboardInterrupt: "
    assert "KeyboardInterrupt" in peer
