"""Dynamic context parallelism as a training run does it, on real ranks; then look.

Every figure of a step is computed from the borders and CP sizes of the micro-batches that the ranks
came to hold, over Gloo, on this machine: on up to 64 ranks, of which each reads its share of the
global batch. Samples are padded as dynamic context parallelism demands, to a multiple of twice the
ranks, and the padding counts as load. Also: what slices save over whole samples, and the loss of
the real GPT on groups of 1, 2 and 4 ranks against one process without packing (needs
megatron-core).
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from benchmarks._report import Row, report, row
from benchmarks.balance_packing import DYNAMIC, LOAD, SEEDS, Dynamic
from benchmarks.gbpacking import CONTEXT, on_ranks
from benchmarks.workloads import conversation_tokens, long_lengths
from evenstep.balance import DynamicCpPlan
from evenstep.gbpacking import DynamicCpOptions, build_unpacked_sample, padding_multiple
from evenstep.gbpacking.dynamic_plan import DynamicStepRules
from evenstep.gbpacking.dynamic_step import DynamicStepScheduler
from evenstep.gbpacking.step_lengths import StepLengths
from tests.gbpacking.dynamic_steps import Layout, dynamic_step, unpacked_step

SCHEDULERS = ("evenstep_dynamic_cp", "default_dynamic_cp")


class HeldStep(NamedTuple):
    """One step on one rank: per micro-batch the CP size and the lengths, and seconds to pack."""

    packs: list[tuple[int, list[int]]]
    seconds: float


def figures() -> Iterator[Row]:
    """Yield the rows of each workload, then the loss."""
    trace = conversation_tokens()
    for case in DYNAMIC:
        yield from _rows(case, [_draw(case, seed, trace) for seed in SEEDS])
    yield from _loss()


def _rows(case: Dynamic, draws: Sequence[Sequence[int]]) -> Iterator[Row]:
    name = f"{case.name} {case.num_sequences}, {case.num_ranks} ranks of {case.tokens_per_rank}"
    multiple = padding_multiple(data_parallel_size=case.num_ranks, dynamic_context_parallel=True)
    ours, theirs = (
        on_ranks(case.num_ranks, partial(_pack_draws, case, draws, multiple, scheduler))
        for scheduler in SCHEDULERS
    )
    by_draw = [[steps[draw] for steps in ours] for draw in range(len(draws))]
    bucketed = [[steps[draw] for steps in theirs] for draw in range(len(draws))]
    yield row(
        "dynamic CP by the ranks, free communication: step / ideal",
        name,
        statistics.median(map(_over_ideal, by_draw)),
        target=case.target,
        unit="ratio",
        worst=_rounded(max(map(_over_ideal, by_draw))),
        default_dynamic_cp=_rounded(statistics.median(map(_over_ideal, bucketed))),
        microbatches=[len(ranks[0].packs) for ranks in by_draw],
        padding=_rounded(_padding(draws, multiple)),
        step_s=_rounded(
            statistics.median(max(step.seconds for step in ranks) for ranks in by_draw)
        ),
    )
    yield row(
        "dynamic CP by the ranks: mean CP size, weighted by tokens",
        name,
        statistics.median(map(_mean_cp_size, by_draw)),
        target=case.cp_target,
        unit="ranks",
        worst=_rounded(max(map(_mean_cp_size, by_draw))),
        default_dynamic_cp=_rounded(statistics.median(map(_mean_cp_size, bucketed))),
    )
    steps = [_lengths(lengths, multiple) for lengths in draws]
    rules = _rules(case, SCHEDULERS[0])
    yield row(
        "dynamic CP: bytes between ranks, slices / whole samples",
        name,
        statistics.median(_slices_over_whole(rules.plan(s), s, case.num_ranks) for s in steps),
        target=None,
        unit="ratio",
    )


def _rules(case: Dynamic, scheduler: str) -> DynamicStepRules:
    return DynamicStepRules(
        scheduler=scheduler,
        tokens_per_rank=case.tokens_per_rank,
        num_ranks=case.num_ranks,
        multiple=1,
        min_cp_size=1,
        load=LOAD,
        options=DynamicCpOptions(),
    )


def _pack_draws(
    case: Dynamic,
    draws: Sequence[Sequence[int]],
    multiple: int,
    scheduler: str,
    rank: int,
    num_ranks: int,
) -> list[HeldStep]:
    """Pack one step per draw on this rank; sequence i was read by rank i modulo their number."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    everyone = dist.group.WORLD
    groups = SimpleNamespace(tp=alone, cp=alone, pp=alone, dp=everyone, dp_cp=everyone)
    packer = DynamicStepScheduler(
        _rules(case, scheduler),
        groups,
        keys=("tokens",),  # the plan does not depend on them, and this machine holds all ranks
        multiple=multiple,
        device=torch.device("cpu"),
    )
    steps = []
    for lengths in draws:
        rows = [torch.zeros(length, dtype=torch.int64) for length in lengths[rank::num_ranks]]
        samples = [build_unpacked_sample(tokens, tokens, multiple=multiple) for tokens in rows]
        dist.barrier()
        start = time.perf_counter()
        microbatches = packer.run(iter(samples), len(samples)).microbatches
        seconds = time.perf_counter() - start
        assert microbatches is not None
        packs = [
            (int(held["local_cp_size"]), held["cu_seqlens_padded"].diff().tolist())
            for held in microbatches
        ]
        steps.append(HeldStep(packs, seconds))
    return steps


def _over_ideal(ranks: Sequence[HeldStep]) -> float:
    """Return how much longer a step is than if no rank ever waited."""
    loads = [
        [sum(LOAD.of(length) for length in pack) / size for size, pack in step.packs]
        for step in ranks
    ]
    step: float = sum(map(max, zip(*loads, strict=True)))
    return step / (sum(map(sum, loads)) / len(loads))


def _mean_cp_size(ranks: Sequence[HeldStep]) -> float:
    packs = [(size, sum(pack)) for step in ranks for size, pack in step.packs]
    # Each of a group's ranks has its pack's borders: tokens x size over all ranks.
    return sum(tokens for _, tokens in packs) / sum(tokens / size for size, tokens in packs)


def _slices_over_whole(plan: DynamicCpPlan, lengths: StepLengths, num_ranks: int) -> float:
    """Return what slices move, over what whole samples would; sample i is read by rank i modulo."""
    slices = whole = 0.0
    for groups in plan.microbatches:
        for group in groups:
            for index in group.sequences:
                reads = group.start <= index % num_ranks < group.start + group.size
                moved = (group.size - reads) * lengths.padded[index]
                whole += moved
                slices += moved / group.size
    return slices / whole


def _padded(lengths: Sequence[int], multiple: int) -> list[int]:
    return [-(-length // multiple) * multiple for length in lengths]


def _lengths(lengths: Sequence[int], multiple: int) -> StepLengths:
    padded = _padded(lengths, multiple)
    return StepLengths(
        counts=tuple((1,) for _ in padded), padded=tuple(padded), original=tuple(lengths)
    )


def _padding(draws: Sequence[Sequence[int]], multiple: int) -> float:
    """Return the share of tokens that is padding."""
    padded = sum(sum(_padded(lengths, multiple)) for lengths in draws)
    return 1 - sum(map(sum, draws)) / padded


def _loss() -> Iterator[Row]:
    expected = on_ranks(1, _unpacked)[0]
    for scheduler in SCHEDULERS:
        yield row(
            "loss on groups of 1, 2 and 4 ranks against unpacked on 1: relative difference",
            scheduler,
            abs(on_ranks(4, partial(_packed, scheduler))[0] - expected) / expected,
            target=1e-5,
            unit="ratio",
        )


def _packed(scheduler: str, rank: int, num_ranks: int) -> float:
    loss: float = dynamic_step(rank, num_ranks, scheduler, Layout(dp=num_ranks))["loss"].mean
    return loss


def _unpacked(rank: int, num_ranks: int) -> float:
    loss: float = unpacked_step(rank, num_ranks, rotary=False)["loss"][0]
    return loss


def _draw(case: Dynamic, seed: int, trace: Sequence[int]) -> list[int]:
    rng = random.Random(seed)
    if case.name == "conv":
        return rng.sample(trace, case.num_sequences)
    return long_lengths(case.num_sequences, rng)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    CONTEXT.set_forkserver_preload(["torch.distributed", "benchmarks.gbpacking"])
    report(__doc__ or "", figures)
