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


class DynamicStepScheduler(StepScheduler[DynamicCpPlan]):
    """Packs the steps of one model onto context-parallel groups sized for their sequences.

    Args:
        rules: What plans must keep.
        groups: The rank's process groups.
        keys: Per-token fields that this pipeline stage reads; empty for one in the middle.
        multiple: What padded lengths must be a multiple of.
        device: Where micro-batches are put.
    """

    def __init__(
        self,
        rules: DynamicStepRules,
        groups: DomainGroups,
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
        self._domain = groups.dp_cp
        self._cp_size = groups.cp.size()

    def _plan(self, lengths: StepLengths) -> DynamicCpPlan:
        plan = self._rules.plan(lengths)
        prepare_cp_groups(self._domain, self._rules.group_sizes)
        return plan

    def _packs(self, plan: DynamicCpPlan) -> list[RankPack]:
        rank = self._domain.rank()
        groups = [plan.group_of(number, rank) for number in range(plan.num_microbatches)]
        return [
            RankPack(
                group.sequences, {"local_cp_size": torch.tensor([group.size], dtype=torch.int32)}
            )
            for group in groups
        ]

    def _prepare(self, agreement: Agreement, plan: DynamicCpPlan, lengths: StepLengths) -> Transfer:
        slices = planned_slices(plan, lengths.holders, cp_size=self._cp_size)
        rank = self._domain.rank()

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
