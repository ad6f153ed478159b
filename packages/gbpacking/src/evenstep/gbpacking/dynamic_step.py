"""The loop of one step under dynamic context parallelism: read, plan, cut, move, pack.

As with a fixed size (`own_step`), but a sample's group may be any ranks of the DP x CP domain, so
slices move over the domain, and a micro-batch holds this rank's slices, not the whole pack.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.distributed import ProcessGroup

from evenstep.balance import CpGroup, DynamicCpPlan
from evenstep.exchange import Agreement, Offer
from evenstep.gbpacking.dynamic_groups import prepare_cp_groups
from evenstep.gbpacking.dynamic_plan import DynamicStepRules
from evenstep.gbpacking.dynamic_slices import cut, planned_slices
from evenstep.gbpacking.pull import LoaderItem
from evenstep.gbpacking.sample import Sample, tensors_of
from evenstep.gbpacking.stage import ModelGroups
from evenstep.gbpacking.step_lengths import StepLengths
from evenstep.gbpacking.step_reading import StepReader
from evenstep.gbpacking.thd import pack_metadata, pack_microbatch
from evenstep.serialize import FlatSample


class DomainGroups(ModelGroups, Protocol):
    """The process groups of a rank, with that of the domain.

    Attributes:
        dp_cp: All data- and context-parallel ranks, those of a context-parallel group in a row.
    """

    dp_cp: ProcessGroup


class DynamicStep(NamedTuple):
    """One step on this rank.

    Attributes:
        microbatches: This rank's slices of each THD micro-batch, with the borders of the whole and
            `local_cp_size`; None if it is not tensor-parallel rank 0.
        plan: The whole step, equal on all ranks.
        lengths: The step's samples, equal on all ranks.
    """

    microbatches: list[Sample] | None
    plan: DynamicCpPlan
    lengths: StepLengths


class DynamicStepScheduler:
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
        self._rules = rules
        self._groups = groups
        self._keys = tuple(keys)
        self._device = device
        self._reader = StepReader(
            groups,
            rules.settings,
            keys=keys,
            capacity=rules.capacity,
            multiple=multiple,
            timeout_s=rules.options.timeout_s,
        )

    def run(self, data_iterator: Iterator[LoaderItem] | None, num_microbatches: int) -> DynamicStep:
        """Pack one step; every rank of the model must call this.

        Args:
            data_iterator: This rank's samples; None on a rank that reads none.
            num_microbatches: Items to pull from it.

        Raises:
            ExchangeError: If a rank failed, on every rank of the model in the same step.
            ValueError: On every rank alike, if the samples cannot be packed.
        """
        agreement, lengths = self._reader.read(data_iterator, num_microbatches)
        plan = self._rules.plan(lengths)
        prepare_cp_groups(self._groups.dp_cp, self._rules.group_sizes)
        if self._groups.tp.rank() > 0:
            return DynamicStep(None, plan, lengths)
        if agreement is None or not self._keys:
            return DynamicStep(self._borders_only(plan, lengths), plan, lengths)
        return DynamicStep(self._moved(agreement, plan, lengths), plan, lengths)

    def _moved(
        self, agreement: Agreement, plan: DynamicCpPlan, lengths: StepLengths
    ) -> list[Sample]:
        """Bring each slice to its rank, and lay those of this rank out."""
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
        transfer = exchange.prepare(
            exchange.agree(offer), lambda _: ((i, one.route) for i, one in enumerate(slices))
        )
        transfer.launch()
        packs: list[list[Sample]] = [[] for _ in plan.microbatches]
        for arrival in transfer.wait():
            packs[arrival.dst_slot].append(tensors_of(arrival.sample))
        microbatches = [
            {
                **pack_microbatch(
                    pack,
                    original=[lengths.original[index] for index in group.sequences],
                    padded=[lengths.padded[index] for index in group.sequences],
                    keys=self._keys,
                    device=self._device,
                ),
                **_cp_size_of(group),
            }
            for pack, group in zip(packs, self._own_groups(plan), strict=True)
        ]
        transfer.release()  # the packs are copies
        return microbatches

    def _borders_only(self, plan: DynamicCpPlan, lengths: StepLengths) -> list[Sample]:
        """Return the packs of a stage that reads no tokens: they follow from the lengths."""
        return [
            {
                **pack_metadata(
                    [lengths.original[index] for index in group.sequences],
                    [lengths.padded[index] for index in group.sequences],
                ),
                **_cp_size_of(group),
            }
            for group in self._own_groups(plan)
        ]

    def _own_groups(self, plan: DynamicCpPlan) -> list[CpGroup]:
        rank = self._groups.dp_cp.rank()
        return [plan.group_of(number, rank) for number in range(plan.num_microbatches)]


def _cp_size_of(group: CpGroup) -> Sample:
    return {"local_cp_size": torch.tensor([group.size], dtype=torch.int32)}
