"""Every figure of the exchange, and what overlap saves: waiting, slowed steps, resident bytes.

Prints the machine, then one line of JSON per figure. The figures of a window's exchange are those
of `benchmarks/exchange.py`. For the others, training steps are simulated: each computes for 1.5
times as long as the exchange of a window takes in line, and then all ranks meet, as for gradients.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import exchange
from benchmarks._report import Row, report, row
from evenstep.exchange import ModuleGroups
from evenstep.reorder_buffer import ReorderingBuffer
from tests.harness import RankPools

CASE = exchange.Case("receipts, W = 1", 1, 8, 256, {})
STEPS = 8
FILLING = 6  # steps until all memory was touched once, and the worker is as far ahead as it may be
ROUNDS = 5
COMPUTE = 1.5  # of the time that an exchange takes

MODES: dict[str, dict[str, Any]] = {
    "in line": {"overlap": False},
    "worker launches": {"overlap": True, "launch": "worker"},
    "caller launches": {"overlap": True, "launch": "caller"},
}


class Steps(NamedTuple):
    """Means of one rank, in seconds (`filling_s` over the first steps), and what was resident."""

    waited_s: float
    computed_s: float
    filling_s: float
    peak_bytes: int


class Loop:
    """One rank's training loop over the same few micro-batches."""

    def __init__(self, rank: int, world_size: int) -> None:
        rng = random.Random(exchange.SEED + rank)
        drawn = [exchange.microbatch(rng, CASE) for _ in range(3)]
        self._batches = [batch for batch, _ in drawn]
        self._counts = {id(batch): counts for batch, counts in drawn}
        self._world_size = world_size
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        self._world = world
        self.window_bytes = max(map(_nbytes, self._batches))

    def run(self, mode: str, compute: Callable[[], None]) -> Steps:
        """Train for some steps in one mode; every rank calls this."""
        waited, computed = [], []
        source = (self._batches[step % 3] for step in range(FILLING + STEPS + 1))
        with (
            ModuleGroups.create(self._world, overlap=True) as made,
            self._buffer(source, made, MODES[mode]) as balanced,
        ):
            for _ in range(FILLING + STEPS):
                started = time.perf_counter()
                next(balanced)
                served = time.perf_counter()
                compute()
                waited.append(served - started)
                computed.append(time.perf_counter() - served)
                dist.barrier()
            peak = balanced.peak_resident_bytes
        mean = statistics.fmean
        return Steps(mean(waited[FILLING:]), mean(computed[FILLING:]), mean(waited[:FILLING]), peak)

    def _buffer(
        self, source: Iterator[exchange.MicroBatch], made: ModuleGroups, settings: dict[str, Any]
    ) -> ReorderingBuffer[Any]:
        return ReorderingBuffer(
            source,
            dp_rank=made.rank,
            dp_size=made.world_size,
            n_groups=made.world_size,
            cost_of=exchange.COST,
            dp_group_gloo=made.control,
            dp_group_nccl=made.payload,
            image_count_of=lambda batch: self._counts[id(batch)],
            **settings,
        )


def _nbytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return int(value.numel() * value.element_size())


def _pure_python(loops: int) -> None:
    """Hold the interpreter, as Python code between kernel launches does."""
    total = 0
    for i in range(loops):
        total += i & 7


def _loops_for(seconds: float) -> int:
    """Return how many loops take so long on this rank alone."""
    best = min(_timed(partial(_pure_python, 100_000)) for _ in range(5))
    return max(1, round(100_000 * seconds / best))


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _measure(rank: int, world_size: int, pure_python: bool) -> dict[str, object]:
    """Return the steps of each mode, round by round; `alone` is the compute without a buffer."""
    loop = Loop(rank, world_size)
    exchange_s = max(loop.run("in line", lambda: None).waited_s for _ in range(2))
    agreed: list[float] = [0.0] * world_size
    dist.all_gather_object(agreed, exchange_s)
    compute_s = COMPUTE * max(agreed)
    compute = partial(time.sleep, compute_s)
    if pure_python:
        compute = partial(_pure_python, _loops_for(compute_s))
    steps: dict[str, list[Steps]] = {mode: [] for mode in MODES}
    alone: list[float] = []
    for _ in range(ROUNDS):
        dist.barrier()
        alone.append(statistics.median(_timed(compute) for _ in range(3)))
        for mode, found in steps.items():
            found.append(loop.run(mode, compute))
    return {"steps": steps, "alone": alone, "window_bytes": loop.window_bytes}


def _slowest(results: list[Any], mode: str, pick: Callable[[Steps], float]) -> list[float]:
    """Return a figure of the slowest rank in each round."""
    rounds = zip(*(result["steps"][mode] for result in results), strict=True)
    return [max(map(pick, ranks)) for ranks in rounds]


def waiting(results: list[Any], case: str) -> Iterator[Row]:
    inline = _slowest(results, "in line", lambda steps: steps.waited_s)
    for mode in [*MODES][1:]:
        waited = _slowest(results, mode, lambda steps: steps.waited_s)
        filling = _slowest(results, mode, lambda steps: steps.filling_s)
        ratios = sorted(a / b for a, b in zip(waited, inline, strict=True))
        yield row(
            "waiting in next(), overlap / in line",
            f"{case}, {mode}",
            statistics.median(ratios),
            target=0.05,
            unit="ratio",
            best=round(ratios[0], 4),
            waited_ms=round(1e3 * statistics.median(waited), 2),
            inline_ms=round(1e3 * statistics.median(inline), 2),
            first_steps_waited_ms=round(1e3 * statistics.median(filling), 2),
        )


def slowdown(results: list[Any], case: str) -> Iterator[Row]:
    alone = [max(times) for times in zip(*(result["alone"] for result in results), strict=True)]
    for mode in MODES:
        computed = _slowest(results, mode, lambda steps: steps.computed_s)
        ratios = sorted(a / b for a, b in zip(computed, alone, strict=True))
        yield row(
            "pure-Python step beside an exchange / alone",
            f"{case}, {mode}",
            statistics.median(ratios),
            target=None,
            unit="ratio",
            best=round(ratios[0], 3),
            alone_ms=round(1e3 * statistics.median(alone), 1),
            cores=os.cpu_count(),
        )


def resident(results: list[Any], case: str) -> Iterator[Row]:
    largest = max(result["window_bytes"] for result in results)
    for mode in MODES:
        peak = max(steps.peak_bytes for result in results for steps in result["steps"][mode])
        yield row(
            "peak resident bytes / largest window read",
            f"{case}, {mode}",
            peak / largest,
            target=None,
            unit="windows",
            window_megabytes=round(largest / 1e6, 1),
        )


def figures() -> Iterator[Row]:
    pools = RankPools()
    try:
        asleep = pools(4).run(_measure, False, deadline_s=600.0)
        yield from waiting(asleep, f"{CASE.name}, 4 ranks")
        yield from resident(asleep, f"{CASE.name}, 4 ranks")
        # On one rank, two cores are enough for both threads: what is left is the interpreter.
        for world_size in (1, 2):
            busy = pools(world_size).run(_measure, True, deadline_s=600.0)
            yield from slowdown(busy, f"{CASE.name}, {world_size} ranks")
    finally:
        pools.close()


if __name__ == "__main__":
    report(__doc__ or "", exchange.figures, figures)
