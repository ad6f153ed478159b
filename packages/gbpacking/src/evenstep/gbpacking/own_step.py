"""Our scheduler's loop for one step: read, plan, move, pack.

Moving concerns the ranks that have a data iterator: tensor-parallel rank 0 of those pipeline
stages. Everyone learns the lengths, and plans for itself; plans are pure, so they agree.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from evenstep.balance import PackingPlan
from evenstep.exchange import Agreement
from evenstep.gbpacking.pull import LoaderItem
from evenstep.gbpacking.sample import Sample, tensors_of
from evenstep.gbpacking.stage import ModelGroups
from evenstep.gbpacking.step_lengths import StepLengths
from evenstep.gbpacking.step_plan import StepRules, deliveries
from evenstep.gbpacking.step_reading import StepReader
from evenstep.gbpacking.thd import pack_metadata, pack_microbatch


class PackedStep(NamedTuple):
    """One step on this rank.

    Attributes:
        microbatches: THD micro-batches for this rank; None if it is not tensor-parallel rank 0.
        plan: The whole step, equal on all ranks.
        lengths: The step's samples, equal on all ranks.
    """

    microbatches: list[Sample] | None
    plan: PackingPlan
    lengths: StepLengths


class StepScheduler:
    """Packs the steps of one model: its rules, its groups, and the fields that this stage needs.

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

    def run(self, data_iterator: Iterator[LoaderItem] | None, num_microbatches: int) -> PackedStep:
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
        if self._groups.tp.rank() > 0:
            return PackedStep(None, plan, lengths)
        if agreement is None or not self._keys:
            return PackedStep(self._borders_only(plan, lengths), plan, lengths)
        return PackedStep(self._moved(agreement, plan, lengths), plan, lengths)

    def _moved(self, agreement: Agreement, plan: PackingPlan, lengths: StepLengths) -> list[Sample]:
        """Move each sample to the rank that packs it, and lay the packs of this rank out."""
        transfer = self._reader.exchange("dp").prepare(agreement, lambda _: deliveries(plan))
        transfer.launch()
        arrivals = transfer.wait()
        packs: list[list[Sample]] = [[] for _ in plan.microbatches]
        for arrival in arrivals:
            packs[arrival.dst_slot].append(tensors_of(arrival.sample))
        microbatches = [
            pack_microbatch(
                samples,
                original=[lengths.original[index] for index in pack],
                padded=[lengths.padded[index] for index in pack],
                keys=self._keys,
                device=self._device,
            )
            for samples, pack in zip(packs, self._packs(plan), strict=True)
        ]
        transfer.release()  # the packs are copies
        return microbatches

    def _borders_only(self, plan: PackingPlan, lengths: StepLengths) -> list[Sample]:
        """Return the packs of a stage that reads no tokens: they follow from the lengths."""
        return [
            pack_metadata(
                [lengths.original[index] for index in pack],
                [lengths.padded[index] for index in pack],
            )
            for pack in self._packs(plan)
        ]

    def _packs(self, plan: PackingPlan) -> list[tuple[int, ...]]:
        return [packs[self._groups.dp.rank()] for packs in plan.microbatches]
