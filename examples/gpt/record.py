"""What a run packed and how long it took, gathered from all ranks."""

import dataclasses
import statistics
from collections.abc import Sequence

from evenstep.balance import SequenceLoad

Packs = list[list[int]]
"""Lengths of the sequences in each micro-batch of one rank and step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step on one rank.

    Attributes:
        seconds: Wall-clock time.
        loss: Mean loss over the tokens of the global batch.
        packs: What this rank packed, padding included.
    """

    seconds: float
    loss: float
    packs: Packs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A whole run.

    Attributes:
        name: What it was.
        steps: `[step][data-parallel rank]`.
        capacity: Most tokens of a pack.
        load: Load of a sequence.
    """

    name: str
    steps: Sequence[Sequence[StepRecord]]
    capacity: int
    load: SequenceLoad

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [ranks[0].loss for ranks in self.steps]

    @property
    def microbatches_per_step(self) -> float:
        """Mean number of micro-batches."""
        return sum(len(ranks[0].packs) for ranks in self.steps) / len(self.steps)

    @property
    def fill(self) -> float:
        """Share of the packs' capacity that holds tokens."""
        packs = [pack for ranks in self.steps for one in ranks for pack in one.packs]
        return sum(map(sum, packs)) / (self.capacity * len(packs))

    @property
    def imbalance(self) -> float:
        """Largest over mean load of a rank, over all steps: how much longer than ideal it takes."""
        totals = [
            [sum(self.load.of(length) for pack in one.packs for length in pack) for one in ranks]
            for ranks in self.steps
        ]
        return sum(map(max, totals)) / sum(sum(t) / len(t) for t in totals)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks over the seconds of the slowest one, the median of the steps."""
        return statistics.median(
            sum(length for one in ranks for pack in one.packs for length in pack)
            / max(one.seconds for one in ranks)
            for ranks in self.steps
        )
