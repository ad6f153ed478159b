"""Fewer bins than best-fit decreasing finds, by search: for inputs that would be refused else."""

from evenstep.balance.packing_fill import Sequences
from evenstep.balance.packing_problem import PackingProblem

MAX_PLACEMENTS = 20_000
"""The search gives up after this many placements (some tens of milliseconds)."""


def search_bins(problem: PackingProblem, count: int) -> list[Sequences] | None:
    """Search for a packing into at most `count` bins: longest first, depth first.

    Of the bins with the same room and number of sequences, one is tried, the fullest first.

    Returns:
        The bins that hold a sequence, or None if none was found within `MAX_PLACEMENTS`.
    """
    order = problem.longest_first
    rooms = [problem.capacity] * count
    bins: list[Sequences] = [[] for _ in rooms]
    path: list[int] = []  # the bins of order[:len(path)]
    options = [_distinct_bins(problem, rooms, bins, order[0])]
    placements = 0
    while placements < MAX_PLACEMENTS:
        if options[-1]:
            target = options[-1].pop()
            rooms[target] -= problem.lengths[order[len(path)]]
            bins[target].append(order[len(path)])
            path.append(target)
            placements += 1
            if len(path) == len(order):
                return [b for b in bins if b]
            options.append(_distinct_bins(problem, rooms, bins, order[len(path)]))
        elif path:
            options.pop()
            target = path.pop()
            rooms[target] += problem.lengths[bins[target].pop()]
        else:
            break
    return None


def _distinct_bins(
    problem: PackingProblem, rooms: list[int], bins: list[Sequences], index: int
) -> list[int]:
    """Return the bins that hold the sequence, the fullest last, one per room and count."""
    distinct = {
        (room, len(bins[b])): b
        for b, room in enumerate(rooms)
        if room >= problem.lengths[index] and len(bins[b]) < problem.max_sequences
    }
    return [distinct[key] for key in sorted(distinct, reverse=True)]
