"""Few bins of few tokens and little load: best-fit decreasing, and splitting to a count."""

from bisect import bisect_left, insort
from math import isqrt

from evenstep.balance.packing_problem import PackingProblem

Sequences = list[int]
"""Indices of the sequences of one bin."""


def fill_bins(
    problem: PackingProblem, level: int | None = None, *, max_bins: int | None = None
) -> list[Sequences]:
    """Pack sequences into few bins: longest first, each into the fullest bin that holds it.

    With a level, bins also have a limit of load. Bins open in groups of one per rank; a group's
    limit is the level, or the load of its first and longest sequence where that is more. As the
    load grows with the length, tokens and load left in a bin come down to one number, the longest
    sequence that still fits, and one sorted list serves both limits: O(n log n) comparisons.

    Without a level, this is best-fit decreasing: at most 11/9 of the fewest bins plus 6/9
    (Dosa et al. 2013, "Tight absolute bound for first fit decreasing bin-packing"; the same
    worst case holds for best fit), if `max_sequences` does not bind.

    Args:
        problem: Lengths, loads and limits.
        level: Load, in the problem's units, that bins should not exceed.
        max_bins: Stop as soon as there are more bins than this.

    Returns:
        Bins in the order of opening; ties go to the lower index.
    """
    lengths, loads, capacity = problem.lengths, problem.loads, problem.capacity
    linear, quadratic, most = problem.linear, problem.quadratic, problem.max_sequences
    bins: list[Sequences] = []
    token_room: list[int] = []
    load_room: list[int] = []
    width = len(lengths).bit_length()  # an open bin is its longest fit << width | its number
    number = (1 << width) - 1
    rooms: list[int] = []
    limit = 0
    for index in problem.longest_first:
        length = lengths[index]
        at = bisect_left(rooms, length << width)
        if at < len(rooms):
            target = rooms.pop(at) & number
        else:
            target = len(bins)
            if target == max_bins:
                return [*bins, [index]]
            if level is not None and target % problem.num_ranks == 0:
                limit = max(level, loads[index])
            bins.append([])
            token_room.append(capacity)
            load_room.append(limit)
        bins[target].append(index)
        fits = token_room[target] = token_room[target] - length
        if level is not None:
            left = load_room[target] = load_room[target] - loads[index]
            if left < (linear + quadratic * fits) * fits:  # the load binds before the tokens
                fits = longest_of_load(left, linear, quadratic)
        if fits > 0 and len(bins[target]) < most:
            insort(rooms, fits << width | target)
    return bins


def longest_of_load(load: int, linear: int, quadratic: int) -> int:
    """Return the largest L with `linear * L + quadratic * L * L <= load`, all integers >= 0."""
    if quadratic:
        return (isqrt(linear * linear + 4 * quadratic * load) - linear) // (2 * quadratic)
    return load // linear


def split_costliest(problem: PackingProblem, bins: list[Sequences], count: int) -> list[Sequences]:
    """Return `count` bins: the costliest of several sequences is halved until there are as many.

    Args:
        problem: Loads of the sequences.
        bins: At most `count` bins; they are left as they are.
        count: At most the number of sequences.
    """
    split = [list(b) for b in bins]
    loads = [problem.load_of(b) for b in split]
    while len(split) < count:
        costliest = max(
            (b for b in range(len(split)) if len(split[b]) > 1), key=lambda b: (loads[b], -b)
        )
        halves: tuple[Sequences, Sequences] = ([], [])
        sums = [0, 0]
        for index in sorted(split[costliest], key=lambda i: (-problem.loads[i], i)):
            lighter = int(sums[1] < sums[0])
            halves[lighter].append(index)
            sums[lighter] += problem.loads[index]
        split[costliest], loads[costliest] = halves[0], sums[0]
        split.append(halves[1])
        loads.append(sums[1])
    return split
