"""The worker thread by itself: order, look-ahead, failures, stopping, and who holds what."""

import gc
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from evenstep.exchange import ExchangeStoppedError
from evenstep.reorder_buffer import ReorderingBuffer
from evenstep.reorder_buffer.overlap import OverlapWorker, StopRequest
from evenstep.reorder_buffer.residency import Residency
from tests.reorder_buffer.numbered import MODES, checked, cost_of, data, image_counts, microbatch

OVERLAPPING = pytest.mark.parametrize("mode", ["worker", "caller"])
NAME = "evenstep-reorder-buffer"


def _worker(
    produce: Callable[[], Any],
    stop: StopRequest | None = None,
    *,
    ahead: int = 2,
    at_end: Callable[[BaseException | None], None] = lambda _: None,
) -> OverlapWorker[Any]:
    return OverlapWorker(produce, at_end, stop or StopRequest(), ahead=ahead, name=NAME)


def test_results_come_in_order_and_then_none_for_ever() -> None:
    items = iter([1, 2, 3, None])
    worker = _worker(lambda: next(items), ahead=5)
    assert [worker.get() for _ in range(5)] == [1, 2, 3, None, None]
    worker.raise_failure()  # there is none
    assert worker.join()


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_more_is_made_than_may_wait(ahead: int) -> None:
    made: queue.SimpleQueue[int] = queue.SimpleQueue()
    stop = StopRequest()

    def produce() -> int:
        made.put(1)
        return made.qsize()

    worker = _worker(produce, stop, ahead=ahead)
    for done in range(3):
        while made.qsize() < ahead + done:
            time.sleep(0.001)
        time.sleep(0.01)  # time for one too many
        assert made.qsize() == ahead + done
        assert worker.get() is not None
        worker.done()
    stop.make()
    assert worker.join()


@pytest.mark.parametrize(
    "failure", [ValueError("bad"), SystemExit(3), MemoryError(), GeneratorExit()]
)
def test_what_ends_the_thread_is_raised_after_the_results(failure: BaseException) -> None:
    told: list[BaseException | None] = []
    items = iter([1])

    def produce() -> int:
        for item in items:
            return item
        raise failure

    worker = _worker(produce, at_end=told.append)
    assert [worker.get(), worker.get()] == [1, None]
    for _ in range(2):
        with pytest.raises(type(failure)) as caught:
            worker.raise_failure()
        assert caught.value is failure
    assert worker.join()
    assert told == [failure]


def test_stop_reaches_a_worker_that_may_not_go_on() -> None:
    stop = StopRequest()
    told: list[BaseException | None] = []
    worker = _worker(lambda: 1, stop, ahead=1, at_end=told.append)
    stop.make(MemoryError("no room"))
    assert worker.join()
    assert worker.get() in {1, None}
    assert isinstance(told[0], ExchangeStoppedError)
    assert str(told[0]) == "the reorder buffer of this rank failed: MemoryError: no room"


def test_the_first_wish_to_stop_counts() -> None:
    stop = StopRequest()
    assert not stop.made
    assert not stop.overdue()
    stop.make()
    stop.make(ValueError())
    assert stop.made
    assert str(stop.error()) == "the reorder buffer of this rank was shut down"


def test_join_gives_up_on_a_thread_in_user_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("evenstep.reorder_buffer.overlap._JOIN_S", 0.05)
    blocked = threading.Event()
    stop = StopRequest()

    def produce() -> None:
        blocked.wait()

    worker = _worker(produce, stop)
    stop.make()
    with caplog.at_level(logging.WARNING):
        assert not worker.join()
    assert "it waits for the data iterator or the cost function" in caplog.text
    blocked.set()
    monkeypatch.setattr("evenstep.reorder_buffer.overlap._JOIN_S", 10.0)
    assert worker.join()


def test_the_worker_keeps_no_result() -> None:
    class Result:
        pass

    released = threading.Event()
    stop = StopRequest()
    worker = _worker(Result, stop, ahead=1)
    reference = weakref.ref(worker.get(), lambda _: released.set())
    assert released.wait(5)
    assert reference() is None
    stop.make()
    assert worker.join()


def _alone(source: Any, mode: str, **settings: Any) -> ReorderingBuffer[Any]:
    settings = {"cost_of": cost_of, "n_groups": 2, **MODES[mode], **settings}
    return ReorderingBuffer(
        source,
        dp_rank=0,
        dp_size=1,
        dp_group_gloo=None,
        dp_group_nccl=None,
        image_count_of=image_counts,
        **settings,
    )


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def _wait_for_no_threads() -> None:
    for thread in _threads():
        thread.join(10)
    assert not _threads()


@OVERLAPPING
def test_a_dropped_buffer_is_freed_at_once_and_ends_its_worker(mode: str) -> None:
    balanced = _alone(data(0, 1, slots=9), mode)
    checked(next(balanced))
    assert len(_threads()) == 1
    reference = weakref.ref(balanced)
    del balanced
    assert reference() is None  # nobody else held it
    _wait_for_no_threads()


@OVERLAPPING
def test_leaving_the_loop_early_ends_the_worker(mode: str) -> None:
    def train() -> None:
        for batch in _alone(data(0, 1, slots=9), mode):
            if 5 in checked(batch):
                break

    train()
    _wait_for_no_threads()


@OVERLAPPING
def test_a_buffer_in_a_reference_cycle_is_collected(mode: str) -> None:
    balanced: Any = _alone(data(0, 1, slots=9), mode)
    next(balanced)
    balanced.trainer = [balanced]
    del balanced
    gc.collect()
    _wait_for_no_threads()


@OVERLAPPING
def test_a_cycle_may_be_collected_by_the_worker_itself(mode: str) -> None:
    dropped = threading.Event()

    def source() -> Iterator[dict[str, Any]]:
        yield from data(0, 1, slots=2)  # of which the caller-launched mode needs two to serve one
        assert dropped.wait(10)
        gc.collect()
        yield microbatch([2, 3])

    gc.disable()  # else the collector could run in this thread
    try:
        balanced: Any = _alone(source(), mode)
        next(balanced)
        balanced.trainer = [balanced]
        del balanced
        dropped.set()
        _wait_for_no_threads()
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", MODES)
def test_shutdown_may_come_at_any_time_and_twice(mode: str) -> None:
    for served in range(4):
        with _alone(data(0, 1, slots=3), mode) as balanced:
            for _ in range(served):
                next(balanced)
            balanced.shutdown()
            balanced.shutdown()
            for _ in range(2):
                with pytest.raises(RuntimeError, match="this ReorderingBuffer was shut down"):
                    next(balanced)
    assert not _threads()


@OVERLAPPING
def test_shutdown_from_another_thread_wakes_next(mode: str) -> None:
    entered, release = threading.Event(), threading.Event()

    def source() -> Iterator[dict[str, Any]]:
        entered.set()
        release.wait(10)
        yield microbatch([0, 1])

    balanced = _alone(source(), mode)

    def stop() -> None:
        assert entered.wait(10)
        threading.Timer(0.2, release.set).start()
        balanced.shutdown()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(RuntimeError, match="was shut down"):
        next(balanced)
    thread.join()
    assert not _threads()


@pytest.mark.parametrize("mode", MODES)
def test_errors_repeat_with_their_traceback_and_no_more(mode: str) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield microbatch([0, 1])
        raise OSError("disk gone")

    balanced = _alone(source(), mode)
    checked(next(balanced))
    lengths = []
    for _ in range(3):
        with pytest.raises(OSError, match="disk gone") as caught:
            next(balanced)
        names = [entry.name for entry in caught.traceback]
        assert "source" in names
        lengths.append(len(names))
    assert lengths[1] == lengths[2]
    assert not _threads()


def test_residency_counts_a_window_from_its_offer_until_the_next_is_served() -> None:
    residency = Residency()
    residency.add(10)  # read and packed
    residency.join(6)
    residency.add(-10)
    residency.serve()
    assert (residency.now, residency.peak) == (6, 16)
    residency.join(7)
    residency.serve()
    assert (residency.now, residency.peak) == (7, 16)
