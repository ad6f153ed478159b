"""Packing as a training run does it: real ranks read, agree, plan, move and pack; then look.

Every figure of a step is computed from the borders (`cu_seqlens_padded`) of the micro-batches that
the ranks came to hold, over Gloo, on this machine. Also: the loss of the real GPT, packed on two
ranks, against one process without packing (needs megatron-core).
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from benchmarks._report import Row, report, row
from benchmarks.balance_packing import FIXED, LOAD, SEEDS, Fixed
from benchmarks.workloads import conversation_tokens, long_lengths
from evenstep.balance import Synchronize
from evenstep.gbpacking import PackingOptions, build_unpacked_sample
from evenstep.gbpacking.fixed_step import FixedStepScheduler
from evenstep.gbpacking.sample import TOKEN_KEYS
from evenstep.gbpacking.step_plan import StepRules
from tests.gbpacking.gpt_steps import NUM_MICROBATCHES, Layout, packed_steps, unpacked_steps
from tests.harness.processes import Seat, join_group, rendezvous_file

Result = TypeVar("Result")

CONTEXT = get_context("forkserver")  # imports torch once, however many ranks there are


class RankStep(NamedTuple):
    """One step on one rank: the lengths in each of its packs, and how long packing took."""

    packs: list[list[int]]
    seconds: float


def figures() -> Iterator[Row]:
    """Yield the packing rows, by number of ranks, then the loss."""
    trace = conversation_tokens()
    for case in FIXED:
        draws = [_draw(case, seed, trace) for seed in SEEDS]
        yield _row(case, draws, "microbatch", case.target)
        if case.step_target is not None:
            yield _row(case, draws, "step", case.step_target)
    yield from _loss()


def _row(
    case: Fixed, draws: Sequence[Sequence[int]], synchronize: Synchronize, target: float
) -> Row:
    by_scheduler = {
        scheduler: on_ranks(
            case.num_ranks, partial(_pack_draws, case, draws, scheduler, synchronize)
        )
        for scheduler in ("evenstep_balanced", "dp_balanced")
    }
    ours, arrival = (
        [_over_ideal([steps[draw] for steps in ranks], synchronize) for draw in range(len(draws))]
        for ranks in by_scheduler.values()
    )
    steps = by_scheduler["evenstep_balanced"]
    return row(
        f"packed by the ranks, {synchronize} synchronises: step / ideal",
        f"{case.name} {case.num_sequences}, capacity {case.capacity}, {case.num_ranks} ranks",
        statistics.median(ours),
        target=target,
        unit="ratio",
        worst=float(f"{max(ours):.5g}"),
        dp_balanced=float(f"{statistics.median(arrival):.5g}"),
        microbatches=[len(step.packs) for step in steps[0]],
        step_s=float(f"{statistics.median(max(s[d].seconds for s in steps) for d in SEEDS):.3g}"),
    )


def _pack_draws(
    case: Fixed,
    draws: Sequence[Sequence[int]],
    scheduler: str,
    synchronize: Synchronize,
    rank: int,
    num_ranks: int,
) -> list[RankStep]:
    """Pack one step per draw on this rank; sequence i was read by rank i modulo their number."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    rules = StepRules(
        scheduler=scheduler,
        capacity=case.capacity,
        num_ranks=num_ranks,
        multiple=1,
        load=LOAD,
        options=PackingOptions(synchronize=synchronize),
    )
    groups = SimpleNamespace(tp=alone, cp=alone, pp=alone, dp=dist.group.WORLD)
    packer = FixedStepScheduler(
        rules, groups, keys=TOKEN_KEYS, multiple=1, device=torch.device("cpu")
    )
    steps = []
    for lengths in draws:
        rows = [torch.zeros(length, dtype=torch.int64) for length in lengths[rank::num_ranks]]
        samples = [build_unpacked_sample(tokens, tokens) for tokens in rows]
        dist.barrier()
        start = time.perf_counter()
        microbatches = packer.run(iter(samples), len(samples)).microbatches
        seconds = time.perf_counter() - start
        assert microbatches is not None
        packs = [microbatch["cu_seqlens_padded"].diff().tolist() for microbatch in microbatches]
        steps.append(RankStep(packs, seconds))
    return steps


def _over_ideal(ranks: Sequence[RankStep], synchronize: Synchronize) -> float:
    """Return how much longer a step is than if no rank ever waited."""
    loads = [[math.fsum(map(LOAD.of, pack)) for pack in step.packs] for step in ranks]
    ideal = math.fsum(map(math.fsum, loads)) / len(loads)
    if synchronize == "step":
        return max(map(math.fsum, loads)) / ideal
    return math.fsum(max(microbatch) for microbatch in zip(*loads, strict=True)) / ideal


def _loss() -> Iterator[Row]:
    num_samples = 2 * NUM_MICROBATCHES
    expected = on_ranks(1, partial(_unpacked, num_samples))[0]
    for scheduler in ("evenstep_balanced", "dp_balanced"):
        found = on_ranks(2, partial(_packed, scheduler))[0]
        yield row(
            "loss, packed on 2 ranks against unpacked on 1: relative difference",
            scheduler,
            max(abs(a - b) / b for a, b in zip(found, expected, strict=True)),
            target=1e-5,
            unit="ratio",
        )


def _packed(scheduler: str, rank: int, num_ranks: int) -> list[float]:
    losses: list[float] = packed_steps(rank, num_ranks, scheduler, Layout(dp=num_ranks))["losses"]
    return losses


def _unpacked(num_samples: int, rank: int, num_ranks: int) -> list[float]:
    losses: list[float] = unpacked_steps(rank, num_ranks, num_samples)["losses"]
    return losses


def _draw(case: Fixed, seed: int, trace: Sequence[int]) -> list[int]:
    rng = random.Random(seed)
    if case.name == "conv":
        return rng.sample(trace, case.num_sequences)
    return long_lengths(case.num_sequences, rng, longest=case.capacity)


def on_ranks(num_ranks: int, work: Callable[[int, int], Result]) -> list[Result]:
    """Call `work(rank, num_ranks)` on that many ranks over Gloo; return their results in order."""
    with (
        rendezvous_file() as rendezvous,
        ProcessPoolExecutor(num_ranks, mp_context=CONTEXT) as pool,
    ):
        seats = [Seat(rank, num_ranks, rendezvous, 600.0) for rank in range(num_ranks)]
        return list(pool.map(partial(_take_seat, work), seats))


def _take_seat(work: Callable[[int, int], Result], seat: Seat) -> Result:
    join_group(seat)
    try:
        return work(seat.rank, seat.world_size)
    finally:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "evenstep.gbpacking"])
    report(__doc__ or "", figures)
