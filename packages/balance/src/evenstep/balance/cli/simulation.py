"""Simulated steps: what ranks wait for as the samples are read, and after each strategy."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from evenstep.balance.cli.figures import Loads, Spread, ratio, step_time
from evenstep.balance.synchronize import Synchronize

Slots: TypeAlias = Sequence[Sequence[float]]
"""`[micro-batch][sample]`: costs, each rank's samples next to each other."""

Groups: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""`[micro-batch][rank]`: the samples, by index over all micro-batches of the step."""


class Contender(NamedTuple):
    """A way to plan a step."""

    plan: Callable[[Slots], Groups]
    lower_bound: Callable[[Slots], float]
    """No plan with the same freedom has a shorter step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The training step that is simulated.

    Attributes:
        dp_size: Data-parallel ranks.
        micro_batch: Samples of a rank in a micro-batch.
        window: Micro-batches of a step.
        synchronize: When ranks wait for each other.
    """

    dp_size: int
    micro_batch: int
    window: int
    synchronize: Synchronize

    @property
    def samples_per_slot(self) -> int:
        """Samples of all ranks in one micro-batch."""
        return self.dp_size * self.micro_batch

    @property
    def samples_per_step(self) -> int:
        """Samples of all ranks in all micro-batches."""
        return self.samples_per_slot * self.window

    def describe(self) -> str:
        """Return the size of a step in words."""
        ranks = "1 rank" if self.dp_size == 1 else f"{self.dp_size} ranks"
        samples = "1 sample" if self.micro_batch == 1 else f"{self.micro_batch} samples"
        batches = "1 micro-batch" if self.window == 1 else f"{self.window} micro-batches"
        return f"{ranks} x {samples} x {batches}"

    def slots(self, costs: Sequence[float]) -> Slots:
        """Divide the costs of a step into its micro-batches."""
        size = self.samples_per_slot
        return [costs[first : first + size] for first in range(0, len(costs), size)]

    def as_read(self) -> Groups:
        """Return the groups without balancing: each rank keeps what it read."""
        size = self.micro_batch
        blocks = [range(i, i + size) for i in range(0, self.samples_per_step, size)]
        return [blocks[i : i + self.dp_size] for i in range(0, len(blocks), self.dp_size)]

    def home_rank(self, sample: int) -> int:
        """Return the rank that reads the sample."""
        return sample % self.samples_per_slot // self.micro_batch


class Step(NamedTuple):
    """One simulated step."""

    time: float
    """What it waits for, in units of cost."""
    ideal: float
    """The same if no rank ever waited."""
    lower_bound: float
    moved_share: float
    """Part of the cost that changes rank."""
    planning_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a strategy achieves over all steps.

    Attributes:
        strategy: Its name.
        largest_over_mean: Largest over mean load of a rank, where ranks wait for each other.
        gap: How far the steps are above the lower bound, as a share of it.
        moved_share: Part of the cost that changes rank.
        time_saved: Part of the time of all steps, as read, that is saved.
        planning_s: Seconds to plan one step.
    """

    strategy: str
    largest_over_mean: Spread
    gap: Spread
    moved_share: float
    time_saved: float
    planning_s: Spread


def loads_of(slots: Slots, groups: Groups) -> Loads:
    """Return the load of every rank in every micro-batch."""
    costs = [cost for slot in slots for cost in slot]
    return [[math.fsum(costs[i] for i in group) for group in ranks] for ranks in groups]


def simulate_step(setting: Setting, slots: Slots, contender: Contender) -> Step:
    """Plan one step and judge the plan."""
    start = time.perf_counter()
    groups = contender.plan(slots)
    planning_s = time.perf_counter() - start
    loads = loads_of(slots, groups)
    costs = [cost for slot in slots for cost in slot]
    total = math.fsum(costs)
    moved = math.fsum(
        costs[sample]
        for ranks in groups
        for rank, group in enumerate(ranks)
        for sample in group
        if setting.home_rank(sample) != rank
    )
    return Step(
        time=step_time(loads, setting.synchronize),
        ideal=total / setting.dp_size,
        lower_bound=contender.lower_bound(slots),
        moved_share=moved / total if total else 0.0,
        planning_s=planning_s,
    )


def summarize(strategy: str, steps: Sequence[Step], as_read: Iterable[Step]) -> Outcome:
    """Return what the steps of one strategy come to.

    Args:
        strategy: The strategy's name.
        steps: Its steps.
        as_read: The same steps without balancing.
    """
    before = math.fsum(step.time for step in as_read)
    after = math.fsum(step.time for step in steps)
    return Outcome(
        strategy=strategy,
        largest_over_mean=Spread.of([ratio(step.time, step.ideal) for step in steps]),
        gap=Spread.of([ratio(step.time, step.lower_bound) - 1 for step in steps]),
        moved_share=math.fsum(step.moved_share for step in steps) / len(steps),
        time_saved=1 - ratio(after, before),
        planning_s=Spread.of([step.planning_s for step in steps]),
    )
