"""What dynamic context parallelism returns: micro-batches of groups, checked and described."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenstep.balance.dynamic_cp_fill import OpenGroup
from evenstep.balance.dynamic_cp_problem import DynamicProblem


class CpGroup(NamedTuple):
    """A context-parallel group of one micro-batch.

    Attributes:
        start: Its first rank, a multiple of `size`.
        size: How many consecutive ranks it has.
        sequences: Indices of its sequences, ascending; never empty.
        tokens: Tokens of the group, at most tokens per rank x `size`.
        load: Load of each of its ranks, communication included.
    """

    start: int
    size: int
    sequences: tuple[int, ...]
    tokens: int
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicCpPlan:
    """Micro-batches, each a partition of all ranks into groups; every sequence in one group.

    Attributes:
        microbatches: `[micro-batch]`, its groups by rank.
        num_ranks: Ranks of the domain (DP x CP).
        tokens_per_rank: Most tokens of a rank.
        step_load: Sum over micro-batches of the largest load of a rank.
        ideal_load: Total load without communication / ranks.
        lower_bound: No plan of these sequences has a smaller `step_load`.
        mean_cp_size: CP size, weighted by tokens.
        least_mean_cp_size: The same if each sequence had the smallest group with room for it.
    """

    microbatches: tuple[tuple[CpGroup, ...], ...]
    num_ranks: int
    tokens_per_rank: int
    step_load: float
    ideal_load: float
    lower_bound: float
    mean_cp_size: float
    least_mean_cp_size: float

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the step, the same on every rank."""
        return len(self.microbatches)

    @property
    def max_loads(self) -> tuple[float, ...]:
        """The largest load of a rank in each micro-batch."""
        return tuple(max(group.load for group in groups) for groups in self.microbatches)

    @property
    def gap(self) -> float:
        """How far the step is above the lower bound, as a share of it."""
        return self.step_load / self.lower_bound - 1

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(group.tokens for groups in self.microbatches for group in groups)

    @property
    def fill(self) -> float:
        """Share of the ranks' capacity that holds tokens."""
        return self.tokens / (self.tokens_per_rank * self.num_ranks * self.num_microbatches)

    @property
    def padding_tokens(self) -> int:
        """Tokens of padding if every rank is padded to its capacity."""
        return self.tokens_per_rank * self.num_ranks * self.num_microbatches - self.tokens

    def group_of(self, microbatch: int, rank: int) -> CpGroup:
        """Return the group that `rank` belongs to in a micro-batch."""
        return next(
            group
            for group in self.microbatches[microbatch]
            if group.start <= rank < group.start + group.size
        )


def finished_dynamic_plan(
    problem: DynamicProblem, microbatches: Sequence[Sequence[OpenGroup]]
) -> DynamicCpPlan:
    """Check groups, give them their ranks, and describe the plan.

    Placed by falling size, every group starts at a multiple of its size, as each size divides
    those before it.
    """
    placed = tuple(_placed(problem, groups) for groups in microbatches)
    flat = [group for groups in placed for group in groups]
    assert sorted(i for group in flat for i in group.sequences) == list(range(len(problem.lengths)))
    assert len(placed) % problem.multiple == 0
    step = sum(max(group.load for group in groups) for groups in microbatches)
    assert step >= problem.bound
    total = sum(problem.lengths)
    return DynamicCpPlan(
        microbatches=placed,
        num_ranks=problem.num_ranks,
        tokens_per_rank=problem.sizes[0].capacity // problem.sizes[0].size,
        step_load=step / problem.scale,
        ideal_load=problem.work / (problem.scale * problem.num_ranks),
        lower_bound=problem.bound / problem.scale,
        mean_cp_size=sum(group.size * group.tokens for group in flat) / total,
        least_mean_cp_size=problem.rank_tokens / total,
    )


def _placed(problem: DynamicProblem, groups: Sequence[OpenGroup]) -> tuple[CpGroup, ...]:
    placed: list[CpGroup] = []
    start = 0
    for group in sorted(groups, key=lambda g: (-g.size.size, -g.load, min(g.sequences))):
        tokens = sum(problem.lengths[i] for i in group.sequences)
        assert group.tokens == tokens <= group.size.capacity
        assert start % group.size.size == 0
        sequences = tuple(sorted(group.sequences))
        placed.append(
            CpGroup(start, group.size.size, sequences, tokens, group.load / problem.scale)
        )
        start += group.size.size
    assert start == problem.num_ranks
    return tuple(placed)
