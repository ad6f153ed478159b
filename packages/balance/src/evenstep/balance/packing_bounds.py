"""What no packing can beat: the fewest micro-batches, and the shortest step."""

from bisect import bisect_left, bisect_right
from itertools import accumulate

from evenstep.balance.packing_problem import PackingProblem


def fewest_bins(problem: PackingProblem) -> int:
    """Return a number of bins below which no packing exists.

    The bound L2 of Martello and Toth (1990, "Lower bounds and reduction procedures for the bin
    packing problem"): for a threshold t, sequences above capacity - t share with none that is at
    least t, sequences above capacity / 2 share with none of their kind, and what does not fit
    beside them needs further bins. O(n log n).
    """
    capacity = problem.capacity
    lengths = sorted(problem.lengths)
    tokens = [0, *accumulate(lengths)]
    half = bisect_right(lengths, capacity // 2)  # from here on: more than half a bin each
    best = -(-tokens[-1] // capacity)
    for threshold in {0, *lengths[:half]}:
        small = bisect_left(lengths, threshold)
        alone = max(half, bisect_right(lengths, capacity - threshold))
        room = (alone - half) * capacity - (tokens[alone] - tokens[half])
        beside = tokens[half] - tokens[small] - room
        best = max(best, len(lengths) - half + max(0, -(-beside // capacity)))
    return max(best, -(-len(lengths) // problem.max_sequences))


def fewest_microbatches(problem: PackingProblem) -> int:
    """Return a number of micro-batches, of the right multiple, below which no packing exists."""
    return problem.rounded_up(fewest_bins(problem)) // problem.num_ranks


def step_bound(problem: PackingProblem) -> int:
    """Return a load, in the problem's units, below which no step of any packing can be."""
    if problem.synchronize == "microbatch":
        return _microbatch_bound(problem)
    loads = sorted(problem.loads)
    others = loads[: fewest_microbatches(problem) - 1]  # its rank has as many bins more to fill
    return max(-(-sum(loads) // problem.num_ranks), loads[-1] + sum(others))


def _microbatch_bound(problem: PackingProblem) -> int:
    """Return the bound for ranks that wait for each other in every micro-batch.

    Order micro-batches by falling largest load, and take the first k. Together they hold at most
    k x ranks x capacity tokens, so at most the load of the longest sequences of so many tokens
    (the last one fractional); the rest of the load needs the rest / ranks at least. And the k-th
    of them, or one after it, holds a sequence that the k - 1 before it have no room for: the
    longest of those, by tokens, by count, or because each is above half a bin. The bound is the
    largest over k of those sequences' loads plus that rest. O(n log n).
    """
    lengths = sorted(problem.lengths, reverse=True)
    loads = sorted(problem.loads, reverse=True)  # grows with the length: the same order
    tokens = [0, *accumulate(lengths)]
    prefix = [0, *accumulate(loads)]
    above_half = sum(2 * length > problem.capacity for length in lengths)
    best = -(-prefix[-1] // problem.num_ranks)
    longest = bins = 0
    while True:
        fitting = bisect_right(tokens, bins * problem.capacity) - 1
        if above_half > bins:
            fitting = min(fitting, bins)
        fitting = min(fitting, bins * problem.max_sequences)
        if fitting == len(lengths):
            return best
        longest += loads[fitting]
        bins += problem.num_ranks
        room = bins * problem.capacity
        whole = bisect_right(tokens, room) - 1
        held = prefix[whole]
        if whole < len(lengths):
            held -= loads[whole] * (tokens[whole] - room) // lengths[whole]  # rounds up
        best = max(best, longest - (held - prefix[-1]) // problem.num_ranks)  # rounds up
