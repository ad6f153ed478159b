"""Ranks that die, hang, are interrupted, or leave without a word: on fresh processes.

Starting a process takes seconds, so the same four go through one fault after the other, each in
groups of its own, and the tests look at what the ranks that survive all of them saw.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest

from evenstep.exchange import Patience, PeerLostError, SampleExchange, Transfer
from tests.exchange.samples import (
    exchange_over_world,
    gloo_group,
    offer_of,
    over_network,
    round_robin,
)
from tests.harness import Outcome, spawn

pytestmark = pytest.mark.timeout(400)  # starting processes on a busy machine


class Seen(NamedTuple):
    """What a rank saw of a fault: type, text and ranks of the error, and when it came."""

    kind: str
    text: str
    ranks: tuple[int, ...]
    at: float


def _seen(work: Callable[[], object]) -> Seen:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - what it is, is the question
        ranks = getattr(error, "ranks", ())
        return Seen(type(error).__name__, str(error), ranks, time.monotonic())
    return Seen("", "", (), time.monotonic())


def _offering(rank: int) -> Callable[[], Any]:
    return partial(offer_of, rank, [3])


def _whole_window(exchange: SampleExchange) -> int:
    transfer = exchange.prepare(exchange.agree(_offering(exchange.rank)), round_robin)
    transfer.launch()
    return len(transfer.wait())


class Part(NamedTuple):
    """One scenario, in groups of its own: ranks 0 and 1, and the victim as the third."""

    victim: int
    timeout_s: float


PARTS = {
    "interrupted": Part(2, 60.0),
    "stopped": Part(2, 2.0),
    "killed while moving": Part(3, 60.0),
    "killed while agreeing": Part(2, 60.0),
}


def _suffer(name: str, exchange: SampleExchange) -> None:
    """Do the victim's part; it ends by SIGKILL, so what it sees itself is checked here."""
    if name == "interrupted":
        sent: list[float] = []

        def interrupt() -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.5, interrupt).start()
        seen = _seen(partial(exchange.agree, _offering(2)))
        assert seen.kind == "KeyboardInterrupt"
        assert seen.at - sent[0] < 1.0
        again = _seen(partial(exchange.agree, _offering(2)))
        assert again.kind == "ExchangeError"
        assert "an earlier call ended with KeyboardInterrupt" in again.text
        return
    if name == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        # Continued by a survivor, it takes part at last: nobody's collective is left over.
        exchange.agree(_offering(2))
        return
    if name == "killed while moving":
        exchange.prepare(exchange.agree(_offering(2)), round_robin)
    else:
        time.sleep(0.5)  # the peers are waiting by then
    os.kill(os.getpid(), signal.SIGKILL)


def _survive(name: str, exchange: SampleExchange, victim_pid: int) -> dict[str, Any]:
    """Do the part of rank 0 or 1."""
    rank = exchange.rank
    work: Callable[[], object] = partial(exchange.agree, _offering(rank))
    if name == "killed while moving":
        transfer = exchange.prepare(exchange.agree(_offering(rank)), round_robin)
        work = partial(_move, transfer)
    if name == "interrupted":
        time.sleep(2.0)  # the victim is interrupted meanwhile; its message was sent before
    started = time.monotonic()
    seen = _seen(work)
    again = _seen(partial(exchange.agree, _offering(rank))) if seen.kind else None
    if name == "stopped" and rank == 0:
        time.sleep(1.0)  # until both have seen the timeout
        os.kill(victim_pid, signal.SIGCONT)
    return {"seen": seen, "took_s": seen.at - started, "again": again}


def _tour(rank: int, world_size: int) -> dict[str, Any]:
    import torch.distributed as dist

    pids = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    exchanges = {}
    for name, part in PARTS.items():
        members = [0, 1, part.victim]
        control, payload = gloo_group(members), gloo_group(members)
        if rank in members:
            exchanges[name] = SampleExchange(
                rank=members.index(rank),
                world_size=3,
                control_group=control,
                payload_group=payload,
                patience=Patience(timeout_s=part.timeout_s),
            )
            # In shared memory, a window is whole on all ranks once they have committed to it.
            with over_network() if part.victim == 3 else nullcontext():
                assert _whole_window(exchanges[name]) == 3
    results = {}
    for name, exchange in exchanges.items():
        exchange.agree(_offering(exchange.rank))  # all three begin this part together
        if rank < 2:
            results[name] = _survive(name, exchange, pids[PARTS[name].victim])
        else:
            _suffer(name, exchange)
    return results


def _move(transfer: Transfer) -> object:
    transfer.launch()
    return transfer.wait()


@pytest.fixture(scope="module")
def tour() -> list[Outcome]:
    return spawn(_tour, 4, deadline_s=120.0, cleanup=False)


def _survivors(tour: list[Outcome], name: str) -> list[dict[str, Any]]:
    for outcome in tour[:2]:
        assert not outcome.error
        assert (outcome.exit_code, outcome.timed_out) == (0, False)
    return [outcome.result[name] for outcome in tour[:2]]


def test_a_killed_rank_is_noticed_by_all_at_once(tour: list[Outcome]) -> None:
    for survivor in _survivors(tour, "killed while agreeing"):
        assert survivor["seen"].kind == "PeerLostError"
        assert "while agreeing on a window" in survivor["seen"].text
        assert survivor["seen"].ranks in {(2,), ()}
        assert survivor["took_s"] < 0.5 + 2.0
        assert survivor["again"][:2] == survivor["seen"][:2]
    assert tour[2].exit_code == -signal.SIGKILL


def test_no_window_is_served_in_part(tour: list[Outcome]) -> None:
    for survivor in _survivors(tour, "killed while moving"):
        assert survivor["seen"].kind == "PeerLostError"
        assert "while moving samples" in survivor["seen"].text
        assert survivor["took_s"] < 2.0
        assert survivor["again"].kind == "PeerLostError"
    assert tour[3].exit_code == -signal.SIGKILL


def test_a_stopped_rank_is_an_error_at_the_timeout(tour: list[Outcome]) -> None:
    for survivor in _survivors(tour, "stopped"):
        assert survivor["seen"].kind == "ExchangeTimeoutError"
        assert survivor["seen"].ranks == (2,)
        assert survivor["seen"].text.startswith("rank 2 took no part in agreeing on a window with")
        assert survivor["took_s"] > 1.5


def test_ctrl_c_gets_through_within_a_second(tour: list[Outcome]) -> None:
    for survivor in _survivors(tour, "interrupted"):
        assert survivor["seen"].kind == ""  # what the victim had sent before still arrived
    assert not tour[2].error  # it has checked what it saw
    assert tour[2].exit_code == -signal.SIGKILL


def _leave_without_cleanup(rank: int, world_size: int) -> int:
    exchange = exchange_over_world(rank, world_size)
    return sum(_whole_window(exchange) for _ in range(3))


RUNS = int(os.environ.get("EVENSTEP_EXIT_RUNS", "1"))  # 12 to be thorough: they take minutes


@pytest.mark.parametrize("run", range(RUNS))
def test_processes_may_exit_without_cleanup(run: int) -> None:
    """Processes end with their groups alive, in whatever order: none aborts."""
    for outcome in spawn(_leave_without_cleanup, 3, deadline_s=60.0 + run, cleanup=False):
        assert (outcome.exit_code, outcome.error, outcome.result) == (0, "", 9)


def test_the_text_of_a_lost_peer() -> None:
    error = PeerLostError([3, 5], doing="moving samples", cause="reset by peer")
    assert str(error) == (
        "lost the connection to ranks 3, 5 while moving samples; look for the first error in the "
        "logs there, and restart the job from its checkpoint (transport: reset by peer)"
    )
    assert error.ranks == (3, 5)
