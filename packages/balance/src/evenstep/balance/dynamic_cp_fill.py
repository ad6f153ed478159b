"""Groups of ranks filled to a level of load, micro-batch by micro-batch, costliest first."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from evenstep.balance.dynamic_cp_problem import DynamicProblem, GroupSize

FULL = 985
"""A group is full from this many thousandths of its level on: what sequences that a smaller group
would hold can still add here is not worth running them on so many ranks."""


@dataclass(slots=True)
class OpenGroup:
    """A context-parallel group that is being filled.

    Attributes:
        size: Its size, with capacity and price.
        level: Load of each rank that it should not exceed.
        sequences: Indices of its sequences.
        tokens: Their tokens.
        load: Their load on each rank.
    """

    size: GroupSize
    level: int = 0
    sequences: list[int] = field(default_factory=list)
    tokens: int = 0
    load: int = 0

    def add(self, problem: DynamicProblem, index: int) -> None:
        """Take one more sequence."""
        length = problem.lengths[index]
        self.sequences.append(index)
        self.tokens += length
        self.load += self.size.load(length)


@dataclass(slots=True)
class OpenMicrobatch:
    """A micro-batch that is being filled: its groups, and its ranks without a group."""

    level: int
    free: int
    groups: list[OpenGroup] = field(default_factory=list)


def group_of(problem: DynamicProblem, size: GroupSize, sequences: Iterable[int]) -> OpenGroup:
    """Return the group of these sequences."""
    group = OpenGroup(size)
    for index in sequences:
        group.add(problem, index)
    return group


def by_falling_load(problem: DynamicProblem, chosen: Mapping[int, int]) -> list[int]:
    """Return the sequences by falling load at their chosen size, ties by index."""
    sizes, lengths = problem.sizes, problem.lengths
    return sorted(chosen, key=lambda i: (-sizes[chosen[i]].load(lengths[i]), i))


def fill_microbatches(
    problem: DynamicProblem,
    level: int,
    chosen: Mapping[int, int],
    order: Iterable[int],
    *,
    max_microbatches: int | None = None,
) -> list[OpenMicrobatch]:
    """Place sequences one by one: best fit in a group that is open, else in a new one.

    A micro-batch's level is the given one, or the load of its first and costliest sequence where
    that is more. A sequence goes into the fullest group, of the smallest size possible, that has
    tokens and load left for it (one number, the longest sequence that fits, says both); else a
    new group of its chosen size opens, in the first micro-batch with enough ranks or in a new one.

    Args:
        problem: What is asked.
        level: Load of each rank, in the problem's units.
        chosen: For each sequence to place, the index of its size.
        order: These sequences by falling load.
        max_microbatches: Stop as soon as there are more.

    Returns:
        Micro-batches in the order of opening; some of their ranks may be without a group.
    """
    lengths, sizes = problem.lengths, problem.sizes
    microbatches: list[OpenMicrobatch] = []
    unfinished: list[OpenMicrobatch] = []
    groups: list[OpenGroup] = []
    width = len(lengths).bit_length()  # an open group is its longest fit << width | its number
    number = (1 << width) - 1
    rooms: list[list[int]] = [[] for _ in sizes]
    used = max(chosen.values(), default=0) + 1  # groups of larger sizes are never opened
    for index in order:
        length = lengths[index]
        own = chosen[index]
        least = length << width
        for k in range(own, used):
            fitting = rooms[k]
            if fitting and fitting[-1] >= least:
                at = fitting.pop(bisect_left(fitting, least)) & number
                break
        else:
            size = sizes[own]
            k, at = own, len(groups)
            load = size.load(length)
            microbatch = _with_free_ranks(unfinished, size.size, load)
            if microbatch is None:
                if len(microbatches) == max_microbatches:
                    return [*microbatches, OpenMicrobatch(level, 0)]
                microbatch = OpenMicrobatch(max(level, load), problem.num_ranks)
                microbatches.append(microbatch)
                unfinished.append(microbatch)
            groups.append(OpenGroup(size, microbatch.level))
            microbatch.groups.append(groups[at])
            microbatch.free -= size.size
            if not microbatch.free:
                unfinished.remove(microbatch)
        group = groups[at]
        size = group.size
        group.sequences.append(index)
        tokens = group.tokens = group.tokens + length
        load = group.load = group.load + size.load(length)
        if k == 0 or load * 1000 < group.level * FULL:
            fits = size.capacity - tokens
            left = group.level - load
            if left < size.load(fits):  # the load binds before the tokens
                fits = size.longest(left)
            if fits > 0:
                insort(rooms[k], fits << width | at)
    return microbatches


def _with_free_ranks(
    microbatches: Iterable[OpenMicrobatch], ranks: int, load: int
) -> OpenMicrobatch | None:
    """Return the first micro-batch with room for a group of so many ranks and such a load."""
    for microbatch in microbatches:
        if microbatch.free >= ranks and microbatch.level >= load:
            return microbatch
    return None
