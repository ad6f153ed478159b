"""What each step of a run cost, gathered from all ranks."""

import dataclasses
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vlm.ranks import Ranks


class StepRecord(NamedTuple):
    """One step of one rank."""

    step_s: float
    wait_s: float
    """Part of `step_s` spent in `next()`: reading, and what of the exchange is not overlapped."""
    load_gflop: float
    """Work that this rank computed."""
    samples: int
    moved_samples: int
    """Samples that another rank had read."""
    loss_sum: float
    loss_tokens: float


@dataclasses.dataclass(frozen=True, slots=True)
class RunRecord:
    """All steps of all ranks of one run."""

    fields: Tensor
    """float64 [steps, ranks, fields], the fields of StepRecord in their order."""

    @property
    def step_s(self) -> Tensor:
        """Seconds of each step: its slowest rank's, [steps]."""
        return self._field("step_s").amax(dim=1)

    @property
    def wait_s(self) -> float:
        """Seconds that a step waits for its micro-batch, mean over steps and ranks."""
        return self._field("wait_s").mean().item()

    @property
    def loads(self) -> Tensor:
        """Work of each step and rank in GFLOP, [steps, ranks]."""
        return self._field("load_gflop")

    @property
    def imbalance(self) -> float:
        """Largest load of each step over the mean load of its ranks, both summed over steps."""
        return (self.loads.amax(dim=1).sum() / self.loads.mean(dim=1).sum()).item()

    @property
    def moved_share(self) -> float:
        """Share of the samples that were computed on another rank than the one that read them."""
        return (self._field("moved_samples").sum() / self._field("samples").sum()).item()

    @property
    def losses(self) -> Tensor:
        """Mean loss per token of each global batch, [steps]."""
        return self._field("loss_sum").sum(dim=1) / self._field("loss_tokens").sum(dim=1)

    def _field(self, name: str) -> Tensor:
        return self.fields[..., StepRecord._fields.index(name)]


def gather_run(steps: list[StepRecord], ranks: Ranks) -> RunRecord:
    """Bring the steps of all ranks to every rank; all ranks call it."""
    mine = torch.tensor(steps, dtype=torch.float64, device=ranks.device)
    everyone = [torch.empty_like(mine) for _ in range(ranks.num_ranks)]
    dist.all_gather(everyone, mine)
    return RunRecord(torch.stack(everyone, dim=1).cpu())
