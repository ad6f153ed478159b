"""Which sequences get more ranks than their tokens need: those too costly for their neighbours."""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from evenstep.balance.dynamic_cp_problem import DynamicProblem

CP_WEIGHT = 8
"""A mean CP size larger by x % must shorten the step by x / CP_WEIGHT %. Context parallelism is
never free, even where the caller gives no price for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The size that each sequence asks for.

    Attributes:
        chosen: Index of the size of each sequence.
        order: The sequences by falling load of a rank at that size, ties by index.
        leaders: The load of the costliest sequence of each micro-batch, if micro-batches take
            the sequences in this order; falling, ends at the mean load of a micro-batch.
        work: Load of all sequences at these sizes, summed over ranks.
    """

    chosen: dict[int, int]
    order: tuple[int, ...]
    leaders: tuple[int, ...]
    work: int


def sized(problem: DynamicProblem, *, max_microbatches: int) -> Sizing:
    """Start from the smallest sizes, and double that of sequences that would leave ranks waiting.

    In order of falling load, as many sequences as use all ranks make a micro-batch that lasts as
    long as its first. Where the others cannot reach that, not even with one more sequence in the
    tokens they have left (the tail of long sequences is thin), the first takes the next size, if
    the load that would be missing outweighs its tokens on more ranks.

    Args:
        problem: What is asked.
        max_microbatches: The most that are aimed at: what costs less than the mean load of so
            many is left as it is.
    """
    sizes, lengths = problem.sizes, problem.lengths
    chosen = dict(enumerate(problem.least))
    queue = [(-sizes[k].load(lengths[index]), index) for index, k in chosen.items()]
    heapify(queue)
    leaders: list[int] = []
    while queue and -queue[0][0] * max_microbatches > problem.bound:
        block: list[tuple[int, int]] = []
        ranks = missing = 0
        while queue and ranks < problem.num_ranks:
            load, index = heappop(queue)
            block.append((load, index))
            size = sizes[chosen[index]]
            ranks += size.size
            reached = size.load(size.capacity - lengths[index]) - load
            missing += max(0, -block[0][0] - reached) * size.size
        load, first = block[0]
        if ranks < problem.num_ranks or not _worth_doubling(problem, first, chosen[first], missing):
            leaders.append(-load)
            continue
        chosen[first] += 1
        block[0] = (-sizes[chosen[first]].load(lengths[first]), first)
        for entry in block:
            heappush(queue, entry)
    loads = [sizes[k].load(lengths[index]) for index, k in chosen.items()]
    return Sizing(
        chosen=chosen,
        order=tuple(sorted(chosen, key=lambda index: (-loads[index], index))),
        leaders=tuple(leaders),
        work=sum(loads[index] * sizes[k].size for index, k in chosen.items()),
    )


def _worth_doubling(problem: DynamicProblem, index: int, k: int, missing: int) -> bool:
    """Whether a sequence should take the next size, as its neighbours miss so much load."""
    if k + 1 == len(problem.sizes):
        return False
    size, larger = problem.sizes[k], problem.sizes[k + 1]
    length = problem.lengths[index]
    if larger.load(length) >= size.load(length):
        return False  # communication eats up what more ranks save
    communication = larger.load(length) * larger.size - size.load(length) * size.size
    gained = missing * 3 // 4 - communication  # fewer ranks than these wait in the end
    rank_tokens = length * (larger.size - size.size)
    return gained * CP_WEIGHT * problem.rank_tokens > rank_tokens * problem.work
