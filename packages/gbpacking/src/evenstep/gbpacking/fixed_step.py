"""A step at a fixed context-parallel size: whole samples move over the data-parallel ranks."""

from evenstep.balance import PackingPlan
from evenstep.exchange import Agreement, Transfer
from evenstep.gbpacking.own_step import RankPack, StepScheduler
from evenstep.gbpacking.stage import ModelGroups
from evenstep.gbpacking.step_lengths import StepLengths
from evenstep.gbpacking.step_plan import deliveries


class FixedStepScheduler(StepScheduler[PackingPlan, ModelGroups]):
    """Packs the steps of one model whose context-parallel size is fixed; see `StepScheduler`."""

    def _packs(self, plan: PackingPlan) -> list[RankPack]:
        return [RankPack(packs[self._groups.dp.rank()], {}) for packs in plan.microbatches]

    def _prepare(self, agreement: Agreement, plan: PackingPlan, lengths: StepLengths) -> Transfer:
        del lengths  # the plan says it all
        return self._reader.exchange("dp").prepare(agreement, lambda _: deliveries(plan))
