"""What packing returns: micro-batches of bins, checked, with the figures that judge them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from evenstep.balance.packing_bounds import fewest_microbatches
from evenstep.balance.packing_problem import PackingProblem
from evenstep.balance.synchronize import Synchronize

Bin: TypeAlias = tuple[int, ...]
"""Indices of the sequences that are laid end to end, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """Micro-batches of one bin per rank, every sequence in exactly one bin.

    Attributes:
        microbatches: `[micro-batch][rank]`, the bin that the rank computes there, never empty.
        bin_tokens: `[micro-batch][rank]`, tokens of the bin, at most `capacity`.
        bin_loads: `[micro-batch][rank]`, load of the bin.
        capacity: Most tokens of a bin.
        longest: Tokens of the longest sequence.
        synchronize: When ranks wait for each other, as planned for.
        step_load: What the step waits for: the sum over micro-batches of the largest load, or,
            if only the step synchronises, the largest total of a rank.
        ideal_load: Total load / ranks, reached if no rank ever waits.
        lower_bound: No packing of these sequences has a smaller `step_load`.
        fewest_microbatches: No packing of them has fewer micro-batches.
    """

    microbatches: tuple[tuple[Bin, ...], ...]
    bin_tokens: tuple[tuple[int, ...], ...]
    bin_loads: tuple[tuple[float, ...], ...]
    capacity: int
    longest: int
    synchronize: Synchronize
    step_load: float
    ideal_load: float
    lower_bound: float
    fewest_microbatches: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the step, the same on every rank."""
        return len(self.microbatches)

    @property
    def num_ranks(self) -> int:
        """Bins of a micro-batch."""
        return len(self.microbatches[0])

    @property
    def max_loads(self) -> tuple[float, ...]:
        """The largest load of each micro-batch."""
        return tuple(max(loads) for loads in self.bin_loads)

    @property
    def gap(self) -> float:
        """How far the step is above the lower bound, as a share of it: 0 is proven optimal."""
        return self.step_load / self.lower_bound - 1

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(sum, self.bin_tokens))

    @property
    def fill(self) -> float:
        """Share of the bins' capacity that holds tokens."""
        return self.tokens / (self.capacity * self.num_microbatches * self.num_ranks)

    @property
    def padding_tokens(self) -> int:
        """Tokens of padding if every bin is padded to the capacity."""
        return self.capacity * self.num_microbatches * self.num_ranks - self.tokens

    @property
    def unpacked_padding_tokens(self) -> int:
        """Tokens of padding if, instead of packing, each sequence is padded to the longest."""
        sequences = sum(len(bin_) for microbatch in self.microbatches for bin_ in microbatch)
        return self.longest * sequences - self.tokens


def finished_plan(
    problem: PackingProblem,
    microbatches: Sequence[Sequence[Sequence[int]]],
    *,
    lower_bound: int,
) -> PackingPlan:
    """Check micro-batches `[micro-batch][rank][sequence]` and describe them.

    Args:
        problem: What was asked.
        microbatches: Sequence indices.
        lower_bound: Of the step, in the problem's units.
    """
    bins = tuple(tuple(tuple(sorted(b)) for b in ranks) for ranks in microbatches)
    tokens = tuple(tuple(map(problem.tokens_of, ranks)) for ranks in bins)
    loads = [list(map(problem.load_of, ranks)) for ranks in bins]
    flat = [b for ranks in bins for b in ranks]
    assert sorted(i for b in flat for i in b) == list(range(len(problem.lengths)))
    assert all(len(ranks) == problem.num_ranks for ranks in bins)
    assert len(bins) % problem.multiple == 0
    assert all(1 <= len(b) <= problem.max_sequences for b in flat)
    assert max(map(max, tokens)) <= problem.capacity
    step = step_of(problem, bins)
    assert step >= lower_bound
    return PackingPlan(
        microbatches=bins,
        bin_tokens=tokens,
        bin_loads=tuple(tuple(load / problem.scale for load in ranks) for ranks in loads),
        capacity=problem.capacity,
        longest=max(problem.lengths),
        synchronize=problem.synchronize,
        step_load=step / problem.scale,
        ideal_load=sum(problem.loads) / (problem.scale * problem.num_ranks),
        lower_bound=lower_bound / problem.scale,
        fewest_microbatches=fewest_microbatches(problem),
    )


def step_of(problem: PackingProblem, microbatches: Sequence[Sequence[Sequence[int]]]) -> int:
    """Return what the step waits for, in the problem's units."""
    loads = [list(map(problem.load_of, ranks)) for ranks in microbatches]
    if problem.synchronize == "microbatch":
        return sum(map(max, loads))
    return max(map(sum, zip(*loads, strict=True)))
