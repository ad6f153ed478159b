"""Packing and dynamic context parallelism: how far a step is from ideal, and what planning takes.

Each figure is the median over `SEEDS` draws of its workload; `worst` is the largest of them.
Beside ours stand the same figures of Megatron-Core's ways of filling, written here anew from their
public description: arrival order (`dp_balanced`) and buckets by CP size (`default_dynamic_cp`).
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import Row, report, row
from benchmarks.workloads import conversation_tokens, long_lengths
from evenstep.balance import (
    DynamicCpPlan,
    PackingPlan,
    PackingStrategy,
    SequenceLoad,
    Synchronize,
    plan_dynamic_cp,
    plan_packing,
)

SEEDS = range(5)

LOAD = SequenceLoad.from_hidden_size(4096)
"""L + L * L / (12 * 4096)."""


class Fixed(NamedTuple):
    """A packing workload and its targets: of the step, and where only the step synchronises."""

    name: str
    num_sequences: int
    capacity: int
    num_ranks: int
    target: float
    step_target: float | None = None


class Dynamic(NamedTuple):
    """A workload of dynamic context parallelism and its targets."""

    name: str
    num_sequences: int
    num_ranks: int
    tokens_per_rank: int
    target: float
    cp_target: float
    time_target_ms: float | None = None


FIXED = (
    Fixed("conv", 256, 16384, 8, 1.005),
    Fixed("conv", 512, 131072, 8, 1.005),
    Fixed("conv", 1024, 131072, 32, 1.005),
    Fixed("long, shorter only", 256, 16384, 8, 1.015, 1.01),
    Fixed("long", 512, 131072, 8, 1.10, 1.01),
    Fixed("long", 1024, 131072, 32, 1.28, 1.01),
)

DYNAMIC = (
    Dynamic("conv", 256, 8, 8192, 1.01, 1.0),
    Dynamic("conv", 512, 32, 16384, 1.02, 1.0),
    Dynamic("conv", 1024, 64, 8192, 1.02, 1.0, 60),
    Dynamic("long", 1024, 64, 8192, 1.02, 6.0, 60),
)


def figures() -> Iterator[Row]:
    """Yield the packing rows, then those of dynamic context parallelism."""
    trace = conversation_tokens()
    for case in FIXED:
        yield from _fixed(case, trace)
    for dynamic in DYNAMIC:
        yield from _dynamic(dynamic, trace)


def _fixed(case: Fixed, trace: Sequence[int]) -> Iterator[Row]:
    draws = [_draw(case.name, case.num_sequences, seed, trace, case.capacity) for seed in SEEDS]
    name = f"{case.name} {case.num_sequences}, capacity {case.capacity}, {case.num_ranks} ranks"

    def plans(
        synchronize: Synchronize, strategy: PackingStrategy = "balanced"
    ) -> list[PackingPlan]:
        return [
            plan_packing(
                lengths,
                capacity=case.capacity,
                num_ranks=case.num_ranks,
                load=LOAD,
                synchronize=synchronize,
                strategy=strategy,
            )
            for lengths in draws
        ]

    objectives: tuple[tuple[Synchronize, float | None], ...] = (
        ("microbatch", case.target),
        ("step", case.step_target),
    )
    for synchronize, target in objectives:
        if target is not None:
            ours, arrival = plans(synchronize), plans(synchronize, "arrival")
            yield row(
                f"packing, {synchronize} synchronises: step / ideal",
                name,
                statistics.median(_over_ideal(ours)),
                target=target,
                unit="ratio",
                worst=_rounded(max(_over_ideal(ours))),
                lower_bound=_rounded(statistics.median(_bound_over_ideal(ours))),
                worst_gap_to_bound=_rounded(max(plan.gap for plan in ours)),
                met_by_each=all(
                    plan.step_load <= target * plan.ideal_load or plan.gap <= 0.02 for plan in ours
                ),
                microbatches=[plan.num_microbatches for plan in ours],
                fewest_microbatches=[plan.fewest_microbatches for plan in ours],
                fill=_rounded(statistics.median(plan.fill for plan in ours)),
                arrival=_rounded(statistics.median(_over_ideal(arrival))),
                plan_ms=_rounded(_best_ms(partial(plans, synchronize)) / len(draws)),
            )


def _dynamic(case: Dynamic, trace: Sequence[int]) -> Iterator[Row]:
    draws = [_draw(case.name, case.num_sequences, seed, trace, 2**30) for seed in SEEDS]
    name = f"{case.name} {case.num_sequences}, {case.num_ranks} ranks of {case.tokens_per_rank}"

    def plan(lengths: Sequence[int]) -> DynamicCpPlan:
        return plan_dynamic_cp(
            lengths, tokens_per_rank=case.tokens_per_rank, num_ranks=case.num_ranks, load=LOAD
        )

    def bucketed(lengths: Sequence[int]) -> DynamicCpPlan:
        return plan_dynamic_cp(
            lengths,
            tokens_per_rank=case.tokens_per_rank,
            num_ranks=case.num_ranks,
            load=LOAD,
            strategy="bucketed",
        )

    ours, theirs = [plan(lengths) for lengths in draws], [bucketed(lengths) for lengths in draws]
    yield row(
        "dynamic CP, free communication: step / ideal",
        name,
        statistics.median(_over_ideal(ours)),
        target=case.target,
        unit="ratio",
        worst=_rounded(max(_over_ideal(ours))),
        microbatches=[plan.num_microbatches for plan in ours],
        bucketed=_rounded(statistics.median(_over_ideal(theirs))),
    )
    yield row(
        "dynamic CP: mean CP size, weighted by tokens",
        name,
        statistics.median(plan.mean_cp_size for plan in ours),
        target=case.cp_target,
        unit="ranks",
        worst=_rounded(max(plan.mean_cp_size for plan in ours)),
        least_that_fits=_rounded(statistics.median(plan.least_mean_cp_size for plan in ours)),
        bucketed=_rounded(statistics.median(plan.mean_cp_size for plan in theirs)),
    )
    yield row(
        "dynamic CP: planning, processor time",
        name,
        statistics.median(_best_ms(partial(plan, lengths)) for lengths in draws),
        target=case.time_target_ms,
        unit="ms",
        bucketed=_rounded(
            statistics.median(_best_ms(partial(bucketed, lengths), 1) for lengths in draws)
        ),
    )


def _draw(name: str, count: int, seed: int, trace: Sequence[int], longest: int) -> list[int]:
    rng = random.Random(seed)
    if name == "conv":
        return rng.sample(trace, count)
    return long_lengths(count, rng, longest=longest)


def _over_ideal(plans: Sequence[PackingPlan] | Sequence[DynamicCpPlan]) -> list[float]:
    return [plan.step_load / plan.ideal_load for plan in plans]


def _bound_over_ideal(plans: Sequence[PackingPlan]) -> list[float]:
    return [plan.lower_bound / plan.ideal_load for plan in plans]


def _best_ms(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the least milliseconds of processor time of several calls.

    Planning is one thread that never waits, so on an idle machine this is the time that passes; on
    a busy one, it leaves out what other processes take.
    """
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times) * 1e3


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


if __name__ == "__main__":
    report(__doc__ or "", figures)
