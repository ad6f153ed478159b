"""Our scheduler's loop for one step: read, agree, plan, move, pack.

Reading and moving concern the ranks that have a data iterator: tensor-parallel rank 0 of those
pipeline stages. Everyone learns the lengths, and plans for itself; plans are pure, so they agree.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from evenstep.balance import PackingPlan
from evenstep.exchange import Agreement, MismatchError, Offer, SampleExchange
from evenstep.gbpacking.links import exchange_over
from evenstep.gbpacking.pull import LoaderItem, pull_samples
from evenstep.gbpacking.sample import Sample
from evenstep.gbpacking.stage import ModelGroups
from evenstep.gbpacking.step_lengths import StepLengths
from evenstep.gbpacking.step_plan import StepRules, deliveries
from evenstep.gbpacking.thd import pack_metadata, pack_microbatch
from evenstep.serialize import FlatSample


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
        self._multiple = multiple
        self._device = device

    def run(self, data_iterator: Iterator[LoaderItem] | None, num_microbatches: int) -> PackedStep:
        """Pack one step; every rank of the model must call this.

        Args:
            data_iterator: This rank's samples; None on a rank that reads none.
            num_microbatches: Items to pull from it.

        Raises:
            ExchangeError: If a rank failed, on every rank of the model in the same step.
            ValueError: On every rank alike, if the samples cannot be packed.
        """
        agreement: Agreement | None = None
        known: StepLengths | None = None
        failure: Exception | None = None
        if data_iterator is not None:
            try:
                agreement = self._agree(data_iterator, num_microbatches)
                known = StepLengths.from_agreement(agreement)
            except Exception as error:  # noqa: BLE001 - raised in _shared, once the peers know
                failure = error
        lengths = self._shared(known, failure)
        plan = self._rules.plan(lengths)
        if self._groups.tp.rank() > 0:
            return PackedStep(None, plan, lengths)
        if agreement is None or not self._keys:
            return PackedStep(self._borders_only(plan, lengths), plan, lengths)
        return PackedStep(self._moved(agreement, plan, lengths), plan, lengths)

    def _agree(self, data_iterator: Iterator[LoaderItem], num_microbatches: int) -> Agreement:
        """Read this rank's samples and agree on lengths with the data-parallel ranks."""

        def offer() -> Offer:
            pulled = pull_samples(
                data_iterator,
                num_microbatches,
                capacity=self._rules.capacity,
                multiple=self._multiple,
            )
            return Offer(
                samples=[{key: sample[key] for key in self._keys} for sample in pulled.samples],
                slot_counts=pulled.counts,
                costs=list(zip(pulled.padded, pulled.original, strict=True)),
            )

        return self._exchange("dp").agree(offer)

    def _shared(self, known: StepLengths | None, failure: Exception | None) -> StepLengths:
        """Make one outcome of all that this model's ranks know: lengths, or one rank's failure.

        Along CP, then the pipeline, then TP: after the three, every rank has heard of every other.
        """
        names = ("tp",) if self._groups.tp.rank() > 0 else ("cp", "pp", "tp")
        for name in names:
            try:
                known = self._retold(name, known, failure)
            except Exception as error:  # noqa: BLE001 - raised below, once the peers know
                failure = error if failure is None else failure
        if failure is not None:
            raise failure
        if known is None:
            raise ValueError(
                "no rank of this model got a data iterator; pass it on tensor-parallel rank 0 of "
                "the first and the last pipeline stage"
            )
        return known

    def _retold(
        self, name: str, known: StepLengths | None, failure: Exception | None
    ) -> StepLengths | None:
        def offer() -> Offer:
            if failure is not None:
                raise failure
            if known is None:
                return Offer(samples=[], slot_counts=[], costs=[])
            flat_counts = [count for counts in known.counts for count in counts]
            return Offer(
                samples=[{} for _ in known.padded], slot_counts=flat_counts, costs=known.rows
            )

        agreement = self._exchange(name).agree(offer)
        told = {
            rank: StepLengths.from_report(report, self._rules.num_ranks)
            for rank, report in enumerate(agreement.reports)
            if report.slot_counts
        }
        for rank, lengths in told.items():
            if lengths != next(iter(told.values())):
                raise MismatchError(
                    f"rank {rank} of the {name} group read other samples than rank {min(told)}; "
                    "ranks of one model must read the same data, seed their samplers alike"
                )
        return next(iter(told.values()), None)

    def _moved(self, agreement: Agreement, plan: PackingPlan, lengths: StepLengths) -> list[Sample]:
        """Move each sample to the rank that packs it, and lay the packs of this rank out."""
        transfer = self._exchange("dp").prepare(agreement, lambda _: deliveries(plan))
        transfer.launch()
        arrivals = transfer.wait()
        packs: list[list[Sample]] = [[] for _ in plan.microbatches]
        for arrival in arrivals:
            packs[arrival.dst_slot].append(_tensors(arrival.sample))
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

    def _exchange(self, name: str) -> SampleExchange:
        return exchange_over(
            getattr(self._groups, name),
            {**self._rules.settings, "padding_multiple": self._multiple},
            timeout_s=self._rules.options.timeout_s,
        )


def _tensors(sample: FlatSample) -> Sample:
    return {key: value for key, value in sample.items() if isinstance(value, torch.Tensor)}
