"""A step at a fixed context-parallel size: whole samples move over the data-parallel ranks."""

from collections.abc import Sequence

import torch

from evenstep.balance import PackingPlan
from evenstep.exchange import Agreement, Transfer
from evenstep.gbpacking.own_step import RankPack, StepScheduler
from evenstep.gbpacking.stage import ModelGroups
from evenstep.gbpacking.step_lengths import StepLengths
from evenstep.gbpacking.step_plan import StepRules, deliveries


class FixedStepScheduler(StepScheduler[PackingPlan]):
    """Packs the steps of one model whose context-parallel size is fixed.

    Args:
        rules: What plans must keep.
        groups: The rank's process groups.
        keys: Per-token fields that this pipeline stage reads; empty for one in the middle.
        multiple: What padded lengths must be a multiple of.
        device: Where micro-batches are put.
    """

    def __init__(
        self,
        rules: StepRules,
        groups: ModelGroups,
        *,
        keys: Sequence[str],
        multiple: int,
        device: torch.device,
    ) -> None:
        super().__init__(
            groups,
            rules.settings,
            keys=keys,
            capacity=rules.capacity,
            multiple=multiple,
            timeout_s=rules.options.timeout_s,
            device=device,
        )
        self._rules = rules
        self._rank = groups.dp.rank()

    def _plan(self, lengths: StepLengths) -> PackingPlan:
        return self._rules.plan(lengths)

    def _packs(self, plan: PackingPlan) -> list[RankPack]:
        return [RankPack(packs[self._rank], {}) for packs in plan.microbatches]

    def _prepare(self, agreement: Agreement, plan: PackingPlan, lengths: StepLengths) -> Transfer:
        del lengths
        return self._reader.exchange("dp").prepare(agreement, lambda _: deliveries(plan))
