"""Dynamic context parallelism as a search: how many micro-batches, filled to which level."""

import math
from collections.abc import Iterator, Sequence

from evenstep.balance.dynamic_cp_bucketed import bucketed_microbatches
from evenstep.balance.dynamic_cp_fill import (
    OpenGroup,
    OpenMicrobatch,
    fill_microbatches,
    group_of,
)
from evenstep.balance.dynamic_cp_groups import arranged, without_idle
from evenstep.balance.dynamic_cp_problem import DynamicProblem
from evenstep.balance.dynamic_cp_sizes import CP_WEIGHT, Sizing, sized
from evenstep.balance.packing_bounds import step_bound
from evenstep.balance.packing_fill import fill_bins
from evenstep.balance.packing_load import SequenceLoad
from evenstep.balance.packing_problem import PackingProblem
from evenstep.balance.packing_search import balanced_microbatches, fewest_allowed_bins

Groups = list[OpenGroup]
"""The groups of one micro-batch."""

COUNTS = 4
"""So many numbers of micro-batches are aimed at, evenly spaced."""

PASSES = 3
"""So often the level is corrected for each of them."""

SLACK = 120
"""Thousandths of the last micro-batch that may stay empty."""

SMALL = 256
"""Of so few sequences, one more or less in a group decides: buckets are tried as well."""

GOOD = 200
"""Without any context parallelism, a step within one part in this many of the bound is taken."""


def dynamic_microbatches(problem: DynamicProblem, *, extra: float) -> list[Groups]:
    """Return the groups of each micro-batch of the best plan found.

    The best plan has the shortest step, a larger mean CP size counted against it (`CP_WEIGHT`).

    Args:
        problem: What is asked.
        extra: How many more micro-batches than tokens need may be aimed at, as a share of those.

    Raises:
        ValueError: If the sequences do not suffice for the number of micro-batches they need.
    """
    plain = _without_cp(problem)
    if plain and _step(plain) * GOOD <= problem.bound * (GOOD + 1):
        return plain
    best = plain
    best_score = _score(problem, plain) if plain else math.inf
    for closed in _candidates(problem, extra):
        score = _score(problem, closed)
        if score < best_score:
            best, best_score = closed, score
        elif best is not plain:
            break  # fewer micro-batches no longer pay
    if len(problem.lengths) <= SMALL:
        bucketed = bucketed_microbatches(problem)
        if split_to_multiple(problem, bucketed) and _score(problem, bucketed) < best_score:
            return bucketed
    return best or _one_group_each(problem)


def _without_cp(problem: DynamicProblem) -> list[Groups] | None:
    """Return the packing that gives each sequence the smallest size, if all fit in it."""
    smallest = problem.sizes[0]
    ranks = problem.num_ranks // smallest.size
    if any(problem.least) or len(problem.lengths) < ranks * problem.multiple:
        return None
    packing = PackingProblem.checked(
        problem.lengths,
        capacity=smallest.capacity,
        load=SequenceLoad(linear=smallest.linear, quadratic=smallest.quadratic),
        num_ranks=ranks,
        multiple=problem.multiple,
        max_sequences=None,
        synchronize="microbatch",
    )
    try:
        packed = balanced_microbatches(packing, extra=0, bound=step_bound(packing))
    except ValueError:  # too few sequences for bins on all ranks: larger groups are needed
        return None
    return [[group_of(problem, smallest, b) for b in bins] for bins in packed]


def _candidates(problem: DynamicProblem, extra: float) -> Iterator[list[Groups]]:
    """Yield plans that aim at different numbers of micro-batches, most first."""
    multiple = problem.multiple
    fewest = -(-sum(problem.lengths) // problem.sizes[-1].capacity)
    least = -(-fewest // multiple)
    most = -(-math.floor(fewest * (1 + extra)) // multiple)
    sizing = sized(problem, max_microbatches=most * multiple)
    total = -(-sizing.work // problem.num_ranks)
    counts = {least + (most - least) * k // (COUNTS - 1) for k in range(COUNTS)}
    for count in sorted(counts, reverse=True):
        filled = _filled_to(problem, sizing, count * multiple, total)
        closed = [without_idle(problem, m.groups) for m in filled[:-1]]
        closed.append(arranged(problem, [i for g in filled[-1].groups for i in g.sequences]))
        if split_to_multiple(problem, closed):
            yield closed
        total = sum(m.level for m in filled[:-1])  # with the waste: the next guess is better
        total += filled[-1].level * _used(problem, filled[-1]) // 1000


def _filled_to(
    problem: DynamicProblem, sizing: Sizing, count: int, total: int
) -> list[OpenMicrobatch]:
    """Fill to the level at which `count` micro-batches are full, the last of them nearly.

    A pass at a level that is slightly off tells by how many micro-batches, and so how to correct
    it: first by the share of those that end at the level, not at that of a costly sequence, then
    by what the last correction did.
    """
    level = _water_level(sizing.leaders, count, total)
    best: list[OpenMicrobatch] = []
    best_miss = last_level = last_miss = 0
    for _ in range(PASSES):
        filled = fill_microbatches(problem, level, sizing.chosen, sizing.order)
        used = (len(filled) - 1) * 1000 + _used(problem, filled[-1])
        miss = used - (count * 1000 - SLACK // 2)  # thousandths of a micro-batch too many
        if not best or (len(filled) > count, abs(miss)) < (len(best) > count, abs(best_miss)):
            best, best_miss = filled, miss
        if abs(miss) <= SLACK // 2:
            break
        if (level - last_level) * (last_miss - miss) > 0 and last_level:
            step = (level - last_level) * miss // (last_miss - miss)
        else:
            step = level * miss // (1000 * max(1, sum(m.level == level for m in filled)))
        last_level, last_miss = level, miss
        level = max(level // 2, min(level * 2, level + step))
        if level < 1:
            break
    return best


def _used(problem: DynamicProblem, microbatch: OpenMicrobatch) -> int:
    """Return how full a micro-batch is, in thousandths of its level."""
    work = sum(group.load * group.size.size for group in microbatch.groups)
    return work * 1000 // (microbatch.level * problem.num_ranks)


def _water_level(leaders: Sequence[int], count: int, total: int) -> int:
    """Return the level that, beside micro-batches of costlier leaders, uses up the total."""
    for high, leader in enumerate(leaders[: count - 1]):
        level = total // (count - high)
        if leader <= level:
            return level
        total -= leader
    return max(1, total // max(1, count - len(leaders)))


def split_to_multiple(problem: DynamicProblem, microbatches: list[Groups]) -> bool:
    """Split the costliest micro-batches of several sequences; return whether that sufficed."""
    while len(microbatches) % problem.multiple:
        several = [
            (-_step([groups]), at)
            for at, groups in enumerate(microbatches)
            if sum(len(group.sequences) for group in groups) > 1
        ]
        if not several:
            return False
        at = min(several)[1]
        sequences = [i for group in microbatches[at] for i in group.sequences]
        sequences.sort(key=lambda i: (-problem.lengths[i], i))
        microbatches[at : at + 1] = [arranged(problem, sequences[k::2]) for k in range(2)]
    return True


def _one_group_each(problem: DynamicProblem) -> list[Groups]:
    """Return micro-batches filled regardless of groups: one of all ranks holds what others hold.

    Raises:
        ValueError: If the sequences do not suffice for the number of micro-batches they need.
    """
    packing = PackingProblem.checked(
        problem.lengths,
        capacity=problem.sizes[-1].capacity,
        load=SequenceLoad(),
        num_ranks=1,
        multiple=problem.multiple,
        max_sequences=None,
        synchronize="step",
    )
    try:
        bins = fewest_allowed_bins(packing)
    except ValueError:
        needed = len(fill_bins(packing))
        raise ValueError(
            f"{len(problem.lengths)} sequences need {needed} micro-batches of {packing.capacity} "
            f"tokens, which a multiple of {problem.multiple} rounds up to "
            f"{packing.rounded_up(needed)}, and none may be empty; pass more sequences, raise "
            "tokens_per_rank, or lower microbatch_multiple"
        ) from None
    return [arranged(problem, sequences) for sequences in bins]


def _step(microbatches: Sequence[Groups]) -> int:
    return sum(max(group.load for group in groups) for groups in microbatches)


def _score(problem: DynamicProblem, microbatches: Sequence[Groups]) -> int:
    """Return the step, weighed with the ranks that tokens run on."""
    rank_tokens = sum(g.tokens * g.size.size for groups in microbatches for g in groups)
    return _step(microbatches) * ((CP_WEIGHT - 1) * problem.rank_tokens + rank_tokens)
