"""Evening out loads by exchanges of single sequences, the capacity kept."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenstep.balance.packing_fill import Sequences
from evenstep.balance.packing_problem import PackingProblem

PRECISION = 2000
"""Lanes are even once the heaviest exceeds the mean by at most one part in this many."""

PARTNERS = 8
"""The heaviest lane tries to exchange with this many of the lightest ones."""

EXCHANGES_PER_LANE = 8
"""At most this many exchanges times the number of lanes are made."""


@dataclass(slots=True)
class _Bin:
    sequences: Sequences  # by rising load, ties by index
    tokens: int
    load: int


class _Exchange(NamedTuple):
    source: _Bin
    target: _Bin
    given: int
    taken: int | None
    load: int  # how much the source loses and the target gains


def even_out(
    problem: PackingProblem, lanes: Sequence[Sequence[Sequences]]
) -> list[list[Sequences]]:
    """Lower the load of the heaviest lane, again and again, by the best exchange with a light one.

    An exchange gives one sequence away, for none or one in return, and comes as close as it can
    to halving the difference of the two lanes. It never breaks the capacity or the maximum of
    sequences, and never empties a bin. Stops when the heaviest lane is within one part in
    `PRECISION` of the mean, when no exchange with the `PARTNERS` lightest lanes lowers it, or
    after `EXCHANGES_PER_LANE` exchanges per lane.

    Args:
        problem: Loads and limits.
        lanes: `[lane][bin]`, what is to be even: lanes of one bin each are the bins of one
            micro-batch, lanes of several are the ranks of a step.

    Returns:
        The lanes, each with as many bins as before.
    """
    key = _rising(problem)
    work = [
        [_Bin(sorted(b, key=key), problem.tokens_of(b), problem.load_of(b)) for b in lane]
        for lane in lanes
    ]
    loads = [sum(b.load for b in lane) for lane in work]
    even = -(-sum(loads) * (PRECISION + 1) // (len(loads) * PRECISION))
    for _ in range(EXCHANGES_PER_LANE * len(lanes)):
        heavy = max(range(len(loads)), key=lambda lane: (loads[lane], -lane))
        if loads[heavy] <= even:
            break
        light, best = _best_exchange(problem, work, loads, heavy, even)
        if best is None:
            break
        _apply(problem, best, key)
        loads[heavy] -= best.load
        loads[light] += best.load
    return [[b.sequences for b in lane] for lane in work]


def _best_exchange(
    problem: PackingProblem,
    lanes: Sequence[Sequence[_Bin]],
    loads: Sequence[int],
    heavy: int,
    even: int,
) -> tuple[int, _Exchange | None]:
    """Return the partner and the exchange after which the heavier of the two is lightest.

    The first that makes both even is as good as any.
    """
    partners = sorted((loads[lane], lane) for lane in range(len(lanes)) if lane != heavy)
    best: _Exchange | None = None
    best_lane, best_load = heavy, loads[heavy]
    for load, light in partners[:PARTNERS]:
        if (loads[heavy] + load) // 2 >= best_load:
            break  # not even a perfect exchange would be better
        for source in lanes[heavy]:
            for target in lanes[light]:
                found = _closest(problem, source, target, (loads[heavy] - load) // 2)
                if found is not None:
                    heavier = max(loads[heavy] - found.load, load + found.load)
                    if heavier < best_load:
                        best, best_lane, best_load = found, light, heavier
                        if heavier <= even:
                            return best_lane, best
    return best_lane, best


def _closest(problem: PackingProblem, source: _Bin, target: _Bin, wanted: int) -> _Exchange | None:
    """Return the allowed exchange that moves a load as close as possible to `wanted`."""
    lengths, loads = problem.lengths, problem.loads
    room = problem.capacity - target.tokens
    room_back = problem.capacity - source.tokens
    may_give = len(source.sequences) > 1 and len(target.sequences) < problem.max_sequences
    returns = [loads[i] for i in target.sequences]
    best: _Exchange | None = None
    best_miss = wanted  # moving nothing misses by as much
    for given in source.sequences:
        miss = abs(loads[given] - wanted)
        if may_give and miss < best_miss and lengths[given] <= room:
            best, best_miss = _Exchange(source, target, given, None, loads[given]), miss
        at = bisect_left(returns, loads[given] - wanted)
        for taken in target.sequences[max(0, at - 1) : at + 1]:
            moved = loads[given] - loads[taken]
            miss = abs(moved - wanted)
            if miss < best_miss and -room_back <= lengths[given] - lengths[taken] <= room:
                best, best_miss = _Exchange(source, target, given, taken, moved), miss
    return best


def _apply(
    problem: PackingProblem, exchange: _Exchange, key: Callable[[int], tuple[int, int]]
) -> None:
    source, target, given, taken, load = exchange
    moved = problem.lengths[given]
    source.sequences.remove(given)
    insort(target.sequences, given, key=key)
    if taken is not None:
        moved -= problem.lengths[taken]
        target.sequences.remove(taken)
        insort(source.sequences, taken, key=key)
    for changed, sign in ((source, -1), (target, 1)):
        changed.tokens += sign * moved
        changed.load += sign * load


def _rising(problem: PackingProblem) -> Callable[[int], tuple[int, int]]:
    return lambda index: (problem.loads[index], index)
