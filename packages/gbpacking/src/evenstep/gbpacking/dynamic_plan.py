"""Plan a step under dynamic context parallelism: pure, from lengths to groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evenstep.balance import DynamicCpPlan, SequenceLoad, plan_dynamic_cp
from evenstep.exchange import Setting
from evenstep.gbpacking.choice import DYNAMIC_SCHEDULERS
from evenstep.gbpacking.step_lengths import StepLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicCpOptions:
    """What may be tuned under dynamic context parallelism; see `evenstep.balance.plan_dynamic_cp`.

    Attributes:
        load: Load of a sequence. None derives it from the model's hidden size:
            L + L^2 / (12 * hidden_size), see `SequenceLoad.from_hidden_size`.
        communication: Price of context parallelism, as load per token and step. At 0, groups are
            sized by memory and balance alone.
        min_cp_size: Smallest group; None for what the model's configuration says
            (`min_dynamic_context_parallel_size`), or 1.
        cp_sizes: Allowed group sizes, each dividing the next; None for `min_cp_size` and its
            doublings. One group of all ranks is always allowed.
        extra_microbatches: How many more micro-batches than the tokens need may be aimed at, as a
            share of those.
        timeout_s: Seconds to wait for other ranks. It may differ between ranks; that of the first
            step holds.
        device: Where micro-batches are put; None for where the tensor-parallel group
            communicates.
    """

    load: SequenceLoad | None = None
    communication: float = 0.0
    min_cp_size: int | None = None
    cp_sizes: tuple[int, ...] | None = None
    extra_microbatches: float = 0.35
    timeout_s: float = 600.0
    device: torch.device | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicStepRules:
    """What a plan must keep, read from the configuration and the process groups.

    Attributes:
        scheduler: Name of the scheduler.
        tokens_per_rank: Most tokens of a rank.
        num_ranks: Ranks of the domain: data-parallel times context-parallel size.
        multiple: The number of micro-batches is a multiple of this.
        min_cp_size: Smallest group.
        load: Load of a sequence.
        options: What the user chose.
    """

    scheduler: str
    tokens_per_rank: int
    num_ranks: int
    multiple: int
    min_cp_size: int
    load: SequenceLoad
    options: DynamicCpOptions

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence: those that all ranks together hold."""
        return self.tokens_per_rank * self.num_ranks

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Every size that a plan may use, ascending; the planner has checked what they rest on."""
        return group_sizes(self.num_ranks, self.min_cp_size, self.options.cp_sizes)

    @property
    def settings(self) -> dict[str, Setting]:
        """What every rank must have set alike, to be compared before the first step."""
        return {
            "scheduler": self.scheduler,
            "tokens_per_rank": self.tokens_per_rank,
            "dp_cp_size": self.num_ranks,
            "microbatch_multiple": self.multiple,
            "min_cp_size": self.min_cp_size,
            "load": repr(self.load),
            "communication": self.options.communication,
            "cp_sizes": repr(self.options.cp_sizes),
            "extra_microbatches": self.options.extra_microbatches,
        }

    def plan(self, lengths: StepLengths) -> DynamicCpPlan:
        """Plan the step; sequences are indexed by their global index.

        Raises:
            ValueError: On every rank alike, if the samples cannot be packed.
        """
        return plan_dynamic_cp(
            lengths.padded,
            tokens_per_rank=self.tokens_per_rank,
            num_ranks=self.num_ranks,
            load=self.load,
            communication=self.options.communication,
            min_cp_size=self.min_cp_size,
            cp_sizes=self.options.cp_sizes,
            microbatch_multiple=self.multiple,
            extra_microbatches=self.options.extra_microbatches,
            strategy=DYNAMIC_SCHEDULERS[self.scheduler],
        )


def group_sizes(
    num_ranks: int, min_cp_size: int, cp_sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the sizes of the context-parallel groups, ascending, all ranks last."""
    wanted = cp_sizes or [min_cp_size << k for k in range(num_ranks.bit_length())]
    smaller = sorted({size for size in wanted if min_cp_size <= size < num_ranks})
    return (*smaller, num_ranks)
