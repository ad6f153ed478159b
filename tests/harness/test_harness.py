"""The harness itself: results, failures, a crash, a hang, exit codes."""

import os
import signal
import time

import pytest

from tests.harness import RankError, RankPools, spawn


def _sum_of_ranks(rank: int, world_size: int, extra: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(rank + extra)
    dist.all_reduce(total)
    return rank, world_size, int(total)


def _raise_on_one(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    if rank == world_size - 1:
        message = "the last rank gives up"
        raise ValueError(message)
    dist.barrier()


def _exit_on_one(rank: int, _world_size: int) -> str:
    import torch.distributed as dist

    if rank == 0:
        os._exit(7)
    dist.barrier()
    return "unreachable"


def _kill_one(rank: int, _world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _hang_on_one(rank: int, _world_size: int) -> int:
    if rank == 1:
        time.sleep(3600)
    return rank


def _make_a_group(_rank: int, _world_size: int) -> int:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    before = len(_world.pg_map)
    dist.new_group()
    return before


def test_pool_destroys_the_groups_of_one_function_before_the_next(ranks: RankPools) -> None:
    for _ in range(3):
        assert ranks(2).run(_make_a_group) == [1, 1]  # the default group


def test_pool_returns_results_in_rank_order_and_is_reused(ranks: RankPools) -> None:
    pool = ranks(2)
    assert pool.run(_sum_of_ranks, 10) == [(0, 2, 21), (1, 2, 21)]
    assert ranks(2) is pool
    assert pool.run(_sum_of_ranks, 0) == [(0, 2, 1), (1, 2, 1)]


def test_pool_names_the_rank_that_raised_and_recovers() -> None:
    pools = RankPools()
    try:
        with pytest.raises(RankError, match=r"(?s)rank 1: .*the last rank gives up"):
            pools(2).run(_raise_on_one)
        assert pools(2).run(_sum_of_ranks, 0) == [(0, 2, 1), (1, 2, 1)]
        with pytest.raises(RankError, match="rank 0: process ended with exit code 7"):
            pools(2).run(_exit_on_one)
        with pytest.raises(RankError, match="rank 1: no answer in time"):
            pools(2).run(_hang_on_one, deadline_s=1.0)
    finally:
        pools.close()


def test_spawn_reports_a_crash_and_leaves_the_peer_alone() -> None:
    lives, dies = spawn(_kill_one, 2, cleanup=False)
    assert (lives.exit_code, lives.result, lives.error, lives.timed_out) == (0, 0, "", False)
    assert (dies.exit_code, dies.result, dies.timed_out) == (-signal.SIGKILL, None, False)


def test_spawn_kills_a_hang_at_the_deadline() -> None:
    lives, hangs = spawn(_hang_on_one, 2, deadline_s=2.0, cleanup=False)
    assert (lives.exit_code, lives.result) == (0, 0)
    assert (hangs.exit_code, hangs.timed_out) == (-signal.SIGKILL, True)


def test_spawn_gives_the_traceback_of_an_exception() -> None:
    peer, raises = spawn(_raise_on_one, 2, group_timeout_s=5.0)
    assert raises.exit_code == 1
    assert "ValueError: the last rank gives up" in raises.error
    assert peer.exit_code == 1  # its barrier cannot complete
