"""A step under dynamic context parallelism: slices move over all ranks of the domain.

A sample's group may be any ranks of the DP x CP domain. A micro-batch holds this rank's slices with
the borders of the whole pack, and `local_cp_size`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from evenstep.balance import DynamicCpPlan
from evenstep.exchange import Agreement, Offer, Transfer
from evenstep.gbpacking.dynamic_groups import prepare_cp_groups
from evenstep.gbpacking.dynamic_plan import DynamicStepRules
from evenstep.gbpacking.dynamic_slices import cut, planned_slices
from evenstep.gbpacking.own_step import RankPack, StepScheduler
from evenstep.gbpacking.sample import tensors_of
from evenstep.gbpacking.stage import ModelGroups
from evenstep.gbpacking.step_lengths import StepLengths
from evenstep.serialize import FlatSample


class DomainGroups(ModelGroups, Protocol):
    """The process groups of a rank, with that of the domain.

    Attributes:
        dp_cp: All data- and context-parallel ranks, those of a context-parallel group in a row.
    """

    dp_cp: ProcessGroup


class DynamicStepScheduler(StepScheduler[DynamicCpPlan, DomainGroups]):
    """Packs steps onto context-parallel groups sized for their sequences; see `StepScheduler`."""

    def __init__(
        self,
        rules: DynamicStepRules,
        groups: DomainGroups,
        *,
        keys: Sequence[str],
        multiple: int,
        device: torch.device,
    ) -> None:
        super().__init__(rules, groups, keys=keys, multiple=multiple, device=device)
        self._group_sizes = rules.group_sizes

    def _plan(self, lengths: StepLengths) -> DynamicCpPlan:
        plan = super()._plan(lengths)
        prepare_cp_groups(self._groups.dp_cp, self._group_sizes)
        return plan

    def _packs(self, plan: DynamicCpPlan) -> list[RankPack]:
        rank = self._groups.dp_cp.rank()
        groups = [plan.group_of(number, rank) for number in range(plan.num_microbatches)]
        return [
            RankPack(
                group.sequences, {"local_cp_size": torch.tensor([group.size], dtype=torch.int32)}
            )
            for group in groups
        ]

    def _prepare(self, agreement: Agreement, plan: DynamicCpPlan, lengths: StepLengths) -> Transfer:
        slices = planned_slices(plan, lengths.holders, cp_size=self._groups.cp.size())
        rank = self._groups.dp_cp.rank()

        def offer() -> Offer:
            samples = [tensors_of(sample) for sample in agreement.offer.samples]
            mine: list[FlatSample] = [
                {**cut(samples[one.local_index], one.cp_size, one.cp_rank)}
                for one in slices
                if one.source == rank
            ]
            return Offer(samples=mine, slot_counts=[len(mine)], costs=[0.0] * len(mine))

        exchange = self._reader.exchange("dp_cp")
        return exchange.prepare(
            exchange.agree(offer), lambda _: ((i, one.route) for i, one in enumerate(slices))
        )
