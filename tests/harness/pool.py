"""Ranks that live on between tests, because importing torch costs each process seconds."""

import contextlib
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.harness.processes import (
    START_S,
    RankFunction,
    Seat,
    join_group,
    rendezvous_file,
    start_process,
)

GRACE_S = 2.0  # how long peers of a failed rank may take to report before they are killed
GROUP_TIMEOUT_S = 300.0


class RankError(AssertionError):
    """A rank of the pool raised, died or did not answer in time."""


class RankPools:
    """Pools by world size, started at first use; call with a world size to get one."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> "RankPool":
        """Return the pool of `world_size` ranks; a broken one is replaced."""
        pool = self._pools.get(world_size)
        if pool is None or pool.broken:
            pool = self._pools[world_size] = RankPool(world_size)
        return pool

    def close(self) -> None:
        """End all ranks, side by side."""
        for pool in self._pools.values():
            pool.dismiss()
        for pool in self._pools.values():
            pool.close()


class RankPool:
    """`world_size` processes that share a Gloo default group and run one function at a time."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.broken = False
        self._cleanup = contextlib.ExitStack()
        rendezvous = self._cleanup.enter_context(rendezvous_file())
        self._ranks: list[tuple[BaseProcess, Connection]] = [
            start_process(
                _serve,
                Seat(rank, world_size, rendezvous, GROUP_TIMEOUT_S),
                name=f"pool rank {rank}",
            )
            for rank in range(world_size)
        ]
        self._gather(deadline_s=START_S)

    def run(self, fn: RankFunction, *args: object, deadline_s: float = 300.0) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank.

        Returns:
            The results in rank order.

        Raises:
            RankError: If a rank raises, dies or is late, with its rank and traceback. The pool is
                killed then: peers may be left inside a collective.
        """
        for _, pipe in self._ranks:
            pipe.send((fn, args))
        return self._gather(deadline_s)

    def dismiss(self) -> None:
        """Ask the ranks to leave."""
        for _, pipe in self._ranks:
            with contextlib.suppress(OSError):
                pipe.send(None)

    def close(self) -> None:
        """Ask the ranks to leave, and kill those that do not."""
        self.dismiss()
        deadline = time.monotonic() + GRACE_S * 5
        for process, _ in self._ranks:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        self._kill()

    def _gather(self, deadline_s: float) -> list[Any]:
        replies: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + deadline_s
        while missing := {*range(self.world_size)} - {*replies, *failures}:
            rank = self._next_to_answer(missing, deadline)
            if rank is None:
                failures |= dict.fromkeys(missing, "no answer in time")
                continue
            ok, value = self._answer(rank)
            if ok:
                replies[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self._kill()
            raise RankError("\n".join(f"rank {rank}: {failures[rank]}" for rank in failures))
        return [replies[rank] for rank in range(self.world_size)]

    def _next_to_answer(self, missing: set[int], deadline: float) -> int | None:
        waiting: dict[Any, int] = {}
        for rank in missing:
            process, pipe = self._ranks[rank]
            waiting |= {pipe: rank, process.sentinel: rank}
        ready = wait([*waiting], timeout=max(0.0, deadline - time.monotonic()))
        return waiting[ready[0]] if ready else None

    def _answer(self, rank: int) -> tuple[bool, Any]:
        process, pipe = self._ranks[rank]
        with contextlib.suppress(EOFError):
            if pipe.poll():
                ok, value = pipe.recv()
                return ok, value
        process.join()
        return False, f"process ended with exit code {process.exitcode}"

    def _kill(self) -> None:
        self.broken = True
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._cleanup.close()


def _requests(pipe: Connection) -> Iterator[tuple[RankFunction, tuple[object, ...]]]:
    while (request := pipe.recv()) is not None:
        yield request


def _serve(pipe: Connection, seat: Seat) -> None:
    join_group(seat)
    import torch.distributed as dist

    pipe.send((True, None))
    for fn, args in _requests(pipe):
        _destroy_groups()  # only now: all ranks have answered, so none is inside a collective
        try:
            reply = (True, fn(seat.rank, seat.world_size, *args))
        except BaseException:  # noqa: BLE001 - reported to the parent, whatever it is
            reply = (False, traceback.format_exc())
        pipe.send(reply)
    dist.destroy_process_group()


def _destroy_groups() -> None:
    """Destroy all groups but the default one: the thread of each wakes a hundred times a second."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    for group in [*_world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
