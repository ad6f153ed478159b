"""Plan a step: pure, from lengths to packs, the same on every rank."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from evenstep.balance import PackingPlan, Route, SequenceLoad, Synchronize, plan_packing
from evenstep.exchange import Setting
from evenstep.gbpacking.choice import SCHEDULERS
from evenstep.gbpacking.step_lengths import StepLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingOptions:
    """What may be tuned; the defaults suit dense models.

    Attributes:
        load: Load of a sequence. None derives it from the model's hidden size:
            L + L^2 / (12 * hidden_size), see `SequenceLoad.from_hidden_size`.
        synchronize: "microbatch" if ranks wait for each other in every micro-batch (expert
            parallelism, FSDP), "step" if only the gradient reduction at the end of the step makes
            them wait.
        extra_microbatches: How many more micro-batches than the fewest possible may be planned, as
            a share of those, where that makes the step shorter.
        max_sequences: Most sequences of a pack; unlimited if None.
        timeout_s: Seconds to wait for other ranks. It may differ between ranks; that of the first
            step holds.
        device: Where micro-batches are put; None for where the tensor-parallel group
            communicates.
    """

    load: SequenceLoad | None = None
    synchronize: Synchronize = "microbatch"
    extra_microbatches: float = 0.5
    max_sequences: int | None = None
    timeout_s: float = 600.0
    device: torch.device | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """What a plan must keep, read from the configuration and the process groups.

    Attributes:
        scheduler: Name of the scheduler.
        capacity: Most tokens of a pack, over the whole CP group.
        num_ranks: Data-parallel ranks.
        multiple: The number of micro-batches is a multiple of this.
        load: Load of a sequence.
        options: What the user chose.
    """

    scheduler: str
    capacity: int
    num_ranks: int
    multiple: int
    load: SequenceLoad
    options: PackingOptions

    @property
    def settings(self) -> dict[str, Setting]:
        """What every rank must have set alike, to be compared before the first step."""
        return {
            "scheduler": self.scheduler,
            "capacity": self.capacity,
            "data_parallel_size": self.num_ranks,
            "microbatch_multiple": self.multiple,
            "load": repr(self.load),
            "synchronize": self.options.synchronize,
            "extra_microbatches": self.options.extra_microbatches,
            "max_sequences": self.options.max_sequences,
        }

    def plan(self, lengths: StepLengths) -> PackingPlan:
        """Pack the step's samples; sequences are indexed by their global index.

        Raises:
            ValueError: On every rank alike, if the samples cannot be packed.
        """
        return plan_packing(
            lengths.padded,
            capacity=self.capacity,
            num_ranks=self.num_ranks,
            load=self.load,
            microbatch_multiple=self.multiple,
            max_sequences=self.options.max_sequences,
            synchronize=self.options.synchronize,
            extra_microbatches=self.options.extra_microbatches,
            strategy=SCHEDULERS[self.scheduler],
        )


def deliveries(plan: PackingPlan) -> Iterator[tuple[int, Route]]:
    """Yield each sample's global index and where it goes: micro-batch, rank, place in the pack."""
    for microbatch, packs in enumerate(plan.microbatches):
        for rank, pack in enumerate(packs):
            for place, index in enumerate(pack):
                yield index, Route(microbatch, rank, place)
