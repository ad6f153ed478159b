"""Ranks that end the step together, whatever each of their micro-batches weighs."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from evenstep.balance.packing_fill import Sequences, split_costliest
from evenstep.balance.packing_problem import PackingProblem


def rank_bins(problem: PackingProblem, count: int) -> list[list[Sequences]] | None:
    """Give each sequence, costliest first, to the rank of least load that has room for it.

    Each rank packs into `count` bins, best fit. Once only as many sequences are left as there are
    bins without one, ranks that have enough get no more.

    Args:
        problem: What is asked.
        count: Bins per rank: the number of micro-batches.

    Returns:
        `[rank][bin]`, or None where a sequence found no room.
    """
    ranks: list[list[Sequences]] = [[] for _ in range(problem.num_ranks)]
    rooms: list[list[int]] = [[] for _ in ranks]
    sizes = [0] * len(ranks)
    lightest = [(0, rank) for rank in range(len(ranks))]
    heapify(lightest)
    missing = count * len(ranks)  # sequences that ranks still lack to fill each bin with one
    for done, index in enumerate(problem.longest_first):
        last_call = len(problem.lengths) - done <= missing
        passed: list[tuple[int, int]] = []
        target: int | None = None
        while target is None:
            if not lightest:
                return None
            load, rank = heappop(lightest)
            if not (last_call and sizes[rank] >= count):
                target = _bin_with_room(problem, ranks[rank], rooms[rank], index, count)
            if target is None:
                passed.append((load, rank))
        ranks[rank][target].append(index)
        rooms[rank][target] -= problem.lengths[index]
        missing -= sizes[rank] < count
        sizes[rank] += 1
        for entry in (*passed, (load + problem.loads[index], rank)):
            heappush(lightest, entry)
    return [split_costliest(problem, bins, count) for bins in ranks]


def _bin_with_room(
    problem: PackingProblem, bins: list[Sequences], rooms: list[int], index: int, count: int
) -> int | None:
    """Return the fullest bin that holds the sequence, a new one, or None."""
    fitting = [
        b
        for b, room in enumerate(rooms)
        if room >= problem.lengths[index] and len(bins[b]) < problem.max_sequences
    ]
    if fitting:
        return min(fitting, key=lambda b: (rooms[b], b))
    if len(bins) == count:
        return None
    bins.append([])
    rooms.append(problem.capacity)
    return len(bins) - 1


def spread_over_ranks(
    problem: PackingProblem, microbatches: Sequence[Sequence[Sequences]]
) -> list[list[Sequences]]:
    """Turn micro-batches `[micro-batch][bin]` into ranks `[rank][bin]` of even totals.

    Micro-batch by micro-batch, the costliest bin goes to the rank of the least total so far.
    """
    ranks: list[list[Sequences]] = [[] for _ in range(problem.num_ranks)]
    totals = [0] * len(ranks)
    for bins in microbatches:
        lightest = sorted(range(len(ranks)), key=lambda r: (totals[r], r))
        costliest = sorted(bins, key=lambda b: (-problem.load_of(b), min(b)))
        for rank, sequences in zip(lightest, costliest, strict=True):
            ranks[rank].append(sequences)
            totals[rank] += problem.load_of(sequences)
    return ranks


def microbatches_of(
    problem: PackingProblem, ranks: Sequence[Sequence[Sequences]]
) -> list[list[Sequences]]:
    """Turn ranks `[rank][bin]` into micro-batches: each rank's costliest bins come first."""
    ordered = [sorted(bins, key=lambda b: (-problem.load_of(b), min(b))) for bins in ranks]
    return [list(bins) for bins in zip(*ordered, strict=True)]
