"""Processes that end while a buffer is alive: exit code, bounded time, and what the peers hear."""

import sys
import threading
import time
from typing import Any

import pytest

from tests.harness import spawn
from tests.reorder_buffer.numbered import MODES, buffer, checked, data, groups

KEPT: list[object] = []  # what lives until the interpreter has gone


def _train(rank: int, world_size: int, mode: str) -> Any:
    """Rank 1 ends after two micro-batches without any cleanup; rank 0 goes on until it hears."""
    made = groups()
    balanced = buffer(data(rank, world_size, slots=500), made, **MODES[mode])
    KEPT.extend([made, balanced])
    for served, batch in enumerate(balanced, start=1):
        checked(batch)
        if rank == 1 and served == 2:
            return served
    return None


@pytest.mark.parametrize("mode", MODES)
def test_an_exit_without_cleanup_is_clean_and_peers_hear_of_it(mode: str) -> None:
    peer, leaver = spawn(_train, 2, mode, cleanup=False, deadline_s=60)
    assert (leaver.exit_code, leaver.result, leaver.timed_out) == (0, 2, False)
    assert (peer.exit_code, peer.timed_out) == (1, False)  # of the exception, not of a signal
    assert "PeerFailedError: failed while agreeing on a window on rank 1: " in peer.error
    assert "the reorder buffer of this rank was shut down" in peer.error


def _leave_a_busy_peer(rank: int, world_size: int) -> float:
    """Rank 1 ends while rank 0 is in a long step, and while its own source keeps its worker."""
    made = groups()
    never = threading.Event()

    def source() -> Any:
        yield from data(rank, world_size, slots=3)
        if rank == 1:
            never.wait()
        yield from data(rank, world_size, slots=3)

    balanced = buffer(source(), made, **MODES["worker"])
    KEPT.extend([made, balanced])
    checked(next(balanced))
    if rank == 1:
        sys.exit(0)
    started = time.monotonic()
    time.sleep(3)
    try:
        while True:
            checked(next(balanced))
    except RuntimeError as error:
        KEPT.append(str(error))
    return time.monotonic() - started


def test_an_exit_is_bounded_though_the_source_blocks_and_the_peer_is_busy() -> None:
    peer, leaver = spawn(_leave_a_busy_peer, 2, cleanup=False, deadline_s=60)
    assert (leaver.exit_code, leaver.timed_out) == (0, False)
    assert (peer.exit_code, peer.timed_out, peer.error) == (0, False, "")
