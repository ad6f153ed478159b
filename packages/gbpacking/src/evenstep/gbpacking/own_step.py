"""Our schedulers' loop for one step: read, plan, move, pack.

Moving concerns the ranks that have a data iterator: tensor-parallel rank 0 of those pipeline
stages. Everyone learns the lengths, and plans for itself; plans are pure, so they agree.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from evenstep.exchange import Agreement, Setting, Transfer
from evenstep.gbpacking.pull import LoaderItem
from evenstep.gbpacking.sample import Sample, tensors_of
from evenstep.gbpacking.stage import ModelGroups
from evenstep.gbpacking.step_lengths import StepLengths
from evenstep.gbpacking.step_reading import StepReader
from evenstep.gbpacking.thd import pack_metadata, pack_microbatch


class StepPlan(Protocol):
    """Which sequences each rank computes in which micro-batch."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of every rank."""
        ...


class StepOptions(Protocol):
    """What the user chose, as far as every kind of plan has it."""

    @property
    def timeout_s(self) -> float:
        """Seconds to wait for other ranks."""
        ...


PlanT = TypeVar("PlanT", bound=StepPlan)
PlanT_co = TypeVar("PlanT_co", bound=StepPlan, covariant=True)
GroupsT = TypeVar("GroupsT", bound=ModelGroups)


class PlanRules(Protocol[PlanT_co]):
    """What a plan must keep, and how one is made."""

    @property
    def capacity(self) -> int:
        """Most tokens of a sample."""
        ...

    @property
    def settings(self) -> dict[str, Setting]:
        """What all ranks of the model must have set alike."""
        ...

    @property
    def options(self) -> StepOptions:
        """What the user chose."""
        ...

    def plan(self, lengths: StepLengths) -> PlanT_co:
        """Plan the step: pure, so equal on all ranks."""
        ...


class RankPack(NamedTuple):
    """This rank's part of one micro-batch.

    Attributes:
        sequences: Global indices, in the order of the pack.
        extra: What the pack says beside its tokens and their borders.
    """

    sequences: Sequence[int]
    extra: Mapping[str, torch.Tensor]


class PackedStep(NamedTuple, Generic[PlanT]):
    """One step on this rank.

    Attributes:
        microbatches: THD micro-batches for this rank; None if it is not tensor-parallel rank 0.
        plan: The whole step, equal on all ranks.
        lengths: The step's samples, equal on all ranks.
    """

    microbatches: list[Sample] | None
    plan: PlanT
    lengths: StepLengths


class StepScheduler(ABC, Generic[PlanT, GroupsT]):
    """Packs the steps of one model; what it moves, the subclasses say.

    Args:
        rules: What plans must keep.
        groups: The rank's process groups.
        keys: Per-token fields that this pipeline stage reads; empty for one in the middle.
        multiple: What padded lengths must be a multiple of.
        device: Where micro-batches are put.
    """

    def __init__(
        self,
        rules: PlanRules[PlanT],
        groups: GroupsT,
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

    def _plan(self, lengths: StepLengths) -> PlanT:
        """Plan the step, the same on every rank; every rank of the model calls this."""
        return self._rules.plan(lengths)

    @abstractmethod
    def _packs(self, plan: PlanT) -> list[RankPack]:
        """Return this rank's part of each micro-batch."""

    @abstractmethod
    def _prepare(self, agreement: Agreement, plan: PlanT, lengths: StepLengths) -> Transfer:
        """Prepare to bring each sample to the ranks that pack it: the slot is the micro-batch."""

    def run(
        self, data_iterator: Iterator[LoaderItem] | None, num_microbatches: int
    ) -> PackedStep[PlanT]:
        """Pack one step; every rank of the model must call this.

        Args:
            data_iterator: This rank's samples; None on a rank that reads none.
            num_microbatches: Items to pull from it.

        Raises:
            ExchangeError: If a rank failed, on every rank of the model in the same step.
            ValueError: On every rank alike, if the samples cannot be packed.
        """
        agreement, lengths = self._reader.read(data_iterator, num_microbatches)
        plan = self._plan(lengths)
        if self._groups.tp.rank() > 0:
            return PackedStep(None, plan, lengths)
        if not self._keys:  # the borders follow from the lengths
            borders = [
                {**pack_metadata(**lengths.of_pack(pack.sequences)), **pack.extra}
                for pack in self._packs(plan)
            ]
            return PackedStep(borders, plan, lengths)
        return PackedStep(self._moved(agreement, plan, lengths), plan, lengths)

    def _moved(self, agreement: Agreement, plan: PlanT, lengths: StepLengths) -> list[Sample]:
        """Move the samples, and lay the packs of this rank out."""
        transfer = self._prepare(agreement, plan, lengths)
        transfer.launch()
        arrived: list[list[Sample]] = [[] for _ in range(plan.num_microbatches)]
        with transfer.borrowed() as arrivals:  # the packs are copies
            for arrival in arrivals:
                arrived[arrival.dst_slot].append(tensors_of(arrival.sample))
            return [
                {
                    **pack_microbatch(
                        samples,
                        **lengths.of_pack(pack.sequences),
                        keys=self._keys,
                        device=self._device,
                    ),
                    **pack.extra,
                }
                for samples, pack in zip(arrived, self._packs(plan), strict=True)
            ]
