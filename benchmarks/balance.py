"""Figures of evenstep.balance: planning time, distance to the bound, and cost moved.

Planning is pure computation on one thread; its times are processor times of the process, which on a
quiet machine are wall-clock times.

python benchmarks/balance.py [--traces FOLDER]
"""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from importlib.util import find_spec
from math import fsum
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import Row, report, row
from benchmarks._report import median_s as median_s_of
from benchmarks.workloads import (
    conversation_tokens,
    long_lengths,
    receipt_patches,
    receipts_samples,
)
from evenstep.balance import (
    GroupPlan,
    LeastMove,
    Refined,
    Strategy,
    balanced_index_order,
    build_window_route,
    plan_groups,
    plan_phases,
    plan_window,
)

median_s = partial(median_s_of, clock=time.process_time)
SEEDS = range(20)
GRIDS = ((32, 4), (64, 8), (256, 8), (512, 64), (2048, 64))
TOKENS = 2048.0
"""Sequence length of a receipts sample."""


def conv(n: int, seed: int) -> list[float]:
    return [float(t) for t in Random(f"conv {n} {seed}").choices(conversation_tokens(), k=n)]


def long(n: int, seed: int) -> list[float]:
    return [float(t) for t in long_lengths(n, Random(f"long {n} {seed}"))]


def receipts(n: int, seed: int) -> list[float]:
    """Return patches per sample of 0 to 3 images."""
    samples = receipts_samples(n, Random(f"receipts {n} {seed}"), receipt_patches())
    return [float(sum(images)) for images in samples]


def receipts_with_text(n: int, seed: int) -> list[float]:
    """Return patches plus tokens per sample."""
    return [patches + TOKENS for patches in receipts(n, seed)]


LENGTHS: dict[str, Callable[[int, int], list[float]]] = {"conv": conv, "long": long}


def the_definition() -> Iterator[Row]:
    costs = long(16384, 0)
    seconds = median_s(lambda: balanced_index_order(costs, 2048), repeats=9)
    same = balanced_index_order(costs, 2048) == _by_definition(costs, 2048)
    yield row(
        "balanced_index_order", "16384 costs, 2048 groups", seconds * 1e3,
        target=40, unit="ms", same_permutation_as_definition=same,
    )  # fmt: skip


def equal_counts() -> Iterator[Row]:
    for name, draw in LENGTHS.items():
        for n, k in GRIDS:
            ratios, lpt, proven = [], [], []
            for seed in SEEDS:
                costs = draw(n, seed)
                bound = _stated_bound(costs, k)
                plan = plan_groups(costs, k)
                ratios.append(plan.max_load / bound)
                proven.append(plan.lower_bound / bound)
                lpt.append(plan_groups(costs, k, strategy="lpt").max_load / bound)
            yield row(
                "equal counts, refined: largest load / bound", f"{name} ({n}, {k})",
                statistics.mean(ratios), target=1.001, unit="ratio", worst=max(ratios),
                lpt=statistics.mean(lpt), no_division_is_below=statistics.mean(proven),
            )  # fmt: skip
        costs = draw(2048, 0)
        seconds = median_s(lambda costs=costs: plan_groups(costs, 64), repeats=9)  # type: ignore[misc]  # mypy cannot type a default of a lambda
        yield row(
            "equal counts, refined: planning", f"{name} (2048, 64)", seconds * 1e3,
            target=10, unit="ms",
        )  # fmt: skip


def unequal_counts() -> Iterator[Row]:
    for name, draw in LENGTHS.items():
        for n, k in GRIDS:
            ratios = []
            for seed in SEEDS:
                costs = draw(n, seed)
                plan = plan_groups(costs, k, sizes="free")
                ratios.append(plan.max_load / max(fsum(costs) / k, *costs))
            yield row(
                "unequal counts: largest load / bound", f"{name} ({n}, {k})",
                statistics.mean(ratios), target=1.001, unit="ratio", worst=max(ratios),
            )  # fmt: skip
        costs = draw(2048, 0)
        ours = median_s(lambda costs=costs: plan_groups(costs, 64, sizes="free"))  # type: ignore[misc]  # as above
        theirs = median_s(lambda costs=costs: _karmarkar_karp(costs, 64), warmups=0)  # type: ignore[misc]  # as above
        yield row(
            "unequal counts: planning / Karmarkar-Karp", f"{name} (2048, 64)", ours / theirs,
            target=0.1, unit="ratio", ours_ms=ours * 1e3, karmarkar_karp_ms=theirs * 1e3,
        )  # fmt: skip


def least_move() -> Iterator[Row]:
    draws = {
        "receipts (patches)": receipts,
        "receipts (patches + tokens)": receipts_with_text,
        "conv": conv,
    }
    for name, draw in draws.items():
        for k, target in ((8, 0.33), (32, 0.29), (64, 0.21)):
            cases = [draw(8 * k, seed) for seed in SEEDS]
            lpt = [plan_groups(costs, k, strategy="lpt") for costs in cases]
            plans = [plan_groups(costs, k, strategy="least_move") for costs in cases]
            excess = [_excess_share(c, k, p.max_load) for c, p in zip(cases, lpt, strict=True)]
            yield row(
                "least move: share of cost that changes rank", f"{name}, {k} ranks x 8",
                _mean_moved(plans), target=target, unit="share", lpt=_mean_moved(lpt),
                above_lpt_max_load=sum(
                    p.max_load > q.max_load for p, q in zip(plans, lpt, strict=True)
                ),
                no_plan_moves_less_than=statistics.mean(excess),
            )  # fmt: skip
        cases = [draw(512, seed) for seed in SEEDS]
        plain = [_crossing(c, plan_groups(c, 64, strategy="least_move")) for c in cases]
        near = [
            _crossing(c, plan_groups(c, 64, strategy=LeastMove(ranks_per_node=8))) for c in cases
        ]
        yield row(
            "least move: cost that crosses nodes, with / without ranks_per_node",
            f"{name}, 64 ranks x 8, nodes of 8", fsum(near) / fsum(plain), target=0.5, unit="ratio",
            crossing_share=statistics.mean(near), crossing_share_without=statistics.mean(plain),
        )  # fmt: skip
        cases = [draw(1024, seed) for seed in range(9)]
        seconds = statistics.median(
            median_s(lambda c=c: plan_groups(c, 64, strategy="least_move"))  # type: ignore[misc]  # as above
            for c in cases
        )
        yield row(
            "least move: planning", f"{name}, 64 ranks x 16", seconds * 1e3, target=20, unit="ms"
        )


def windows() -> Iterator[Row]:
    # A process of its own, so that its peak memory is that of the plan.
    for strategy, targets in (("lpt", (250, 200)), ("refined", (None, None))):
        done = subprocess.run(
            [sys.executable, __file__, "--one-window", strategy],
            capture_output=True,
            text=True,
            check=True,
        )
        milliseconds, megabytes = map(float, done.stdout.split())
        case = f"8 slots x 8 samples x 1024 ranks, {strategy}"
        yield row("window: planning", case, milliseconds, target=targets[0], unit="ms")
        yield row(
            "window: peak memory of the process", case, megabytes, target=targets[1], unit="MB"
        )


def across_slots() -> Iterator[Row]:
    strategies: dict[str, str | Strategy] = {
        "lpt": "lpt",
        "refined": "refined",
        "least_move": "least_move",
        "refined, scope=window": Refined(scope="window"),
        "least_move, scope=window": LeastMove(scope="window"),
    }
    draws = {"receipts (patches)": receipts, **LENGTHS}
    for name, draw in draws.items():
        for label, strategy in strategies.items():
            steps, moved = [], []
            for seed in range(5):
                costs = draw(4 * 256, seed)
                slots = [costs[s * 256 : (s + 1) * 256] for s in range(4)]
                plan = plan_window(slots, 32, 32, strategy=strategy)
                steps.append(plan.max_load * 32 / fsum(costs))
                moved.append(plan.moved_share)
            yield row(
                "window: sum over slots of the largest load / mean",
                f"{name}, 4 slots x 32 ranks x 8, {label}", statistics.mean(steps),
                target=None, unit="ratio", moved_share=statistics.mean(moved),
            )  # fmt: skip


def phases() -> Iterator[Row]:
    for k in (8, 32):
        gains, gaps = [], []
        for seed in range(5):
            encoder, language = receipts(8 * k, seed), conv(8 * k, seed)
            scale = fsum(encoder) / fsum(language)  # both phases take equally long in total
            both = [encoder, [tokens * scale for tokens in language]]
            summed = plan_groups([fsum(costs) for costs in zip(*both, strict=True)], k)
            weighted = fsum(
                max(fsum(costs[i] for i in group) for group in summed.groups) for costs in both
            )
            plan = plan_phases(both, k)
            gains.append(plan.max_load / weighted)
            gaps.append(plan.gap)
        yield row(
            "two phases: sum of largest loads / that of the weighted sum",
            f"receipts patches and conv tokens, {k} ranks x 8", statistics.mean(gains),
            target=None, unit="ratio", gap_to_bound=statistics.mean(gaps),
        )  # fmt: skip


def importing() -> Iterator[Row]:
    bare, loaded = (_start_ms(code) for code in ("pass", "import evenstep.balance"))
    yield row(
        "import evenstep.balance, over a bare interpreter", "median of 15 starts",
        loaded - bare, target=30, unit="ms", bare_ms=bare,
    )  # fmt: skip


def _start_ms(code: str) -> float:
    """Return the median processor time of interpreters that run `code`."""
    spent = []
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(spent[1:]) * 1e3  # the first start warms the disk cache


def packing() -> Iterator[Row]:
    if find_spec("benchmarks.balance_packing") is not None:
        from benchmarks.balance_packing import figures  # noqa: PLC0415 - absent in some checkouts

        yield from figures()


def one_window(strategy: str) -> None:
    """Plan the largest window; print milliseconds, and the peak memory in MB."""
    slots = [conv(8192, seed) for seed in range(8)]
    seconds = median_s(lambda: build_window_route(slots, 1024, 1024, strategy=strategy))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(seconds * 1e3, peak_kib * 1024 / 1e6)


def _stated_bound(costs: Sequence[float], k: int) -> float:
    """Return max(mean, largest + sum of the smallest that fill its group)."""
    rising = sorted(costs)
    return max(fsum(costs) / k, rising[-1] + fsum(rising[: len(costs) // k - 1]))


def _by_definition(costs: Sequence[float], k: int) -> list[int]:
    size = len(costs) // k
    groups: list[list[int]] = [[] for _ in range(k)]
    totals = [0.0] * k
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        g = min((g for g in range(k) if len(groups[g]) < size), key=totals.__getitem__)
        groups[g].append(i)
        totals[g] += costs[i]
    return [i for group in groups for i in group]


def _karmarkar_karp(costs: Sequence[float], k: int) -> list[list[int]]:
    """Divide by the largest differencing method, as RL frameworks do, counts left free."""
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, cost in enumerate(costs):
        parts: list[tuple[float, list[int]]] = [(cost, [i]), *((0.0, []) for _ in range(k - 1))]
        heap.append((-cost, i, parts))
    heapify(heap)
    serial = len(costs)
    while len(heap) > 1:
        _, _, one = heappop(heap)
        _, _, other = heappop(heap)
        merged = sorted(
            ((a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)),
            key=lambda part: part[0],
            reverse=True,
        )
        heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [samples for _, samples in heap[0][2]]


def _mean_moved(plans: Sequence[GroupPlan]) -> float:
    return statistics.mean(plan.moved_share or 0.0 for plan in plans)


def _excess_share(costs: Sequence[float], k: int, limit: float) -> float:
    """Return the share of the cost that is above the limit at home and has to go."""
    size = len(costs) // k
    loads = [fsum(costs[g * size : (g + 1) * size]) for g in range(k)]
    return fsum(max(0.0, load - limit) for load in loads) / fsum(costs)


def _crossing(costs: Sequence[float], plan: GroupPlan) -> float:
    """Return the share of the cost that leaves its node of 8 groups."""
    size = 8 * len(plan.groups[0])
    return fsum(
        costs[i] for g, group in enumerate(plan.groups) for i in group if i // size != g // 8
    ) / fsum(costs)


if __name__ == "__main__":
    if "--one-window" in sys.argv:
        one_window(sys.argv[-1])
    else:
        report(
            (__doc__ or "").splitlines()[0], the_definition, equal_counts, unequal_counts,
            least_move, windows, across_slots, phases, importing, packing,
        )  # fmt: skip
