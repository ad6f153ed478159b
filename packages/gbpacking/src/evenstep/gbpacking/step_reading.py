"""Learn on every rank of a model what samples a step has: read, agree, and retell.

Reading concerns the ranks that have a data iterator: tensor-parallel rank 0 of some pipeline
stages. Everyone learns the lengths, or which rank failed, and can so plan for itself.

Every step makes the same rounds on every rank, whatever is wrong with its arguments: over DP, CP,
the pipeline and TP, in this order. What goes wrong fails the first of them, and the others tell it
to the rest of the model. Ranks that read nothing offer nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from evenstep.exchange import (
    Agreement,
    MismatchError,
    Offer,
    Patience,
    SampleExchange,
    Setting,
)
from evenstep.gbpacking.links import exchange_over, tell_failure
from evenstep.gbpacking.pull import LoaderItem, pull_samples
from evenstep.gbpacking.stage import ModelGroups
from evenstep.gbpacking.step_lengths import StepLengths

_READ_OVER: Final = "dp"
_RETOLD_OVER: Final = ("cp", "pp", "tp")


class StepReader:
    """Reads the steps of one model.

    Args:
        groups: The rank's process groups.
        settings: What all ranks of the model must have set alike.
        keys: Per-token fields that this pipeline stage reads; empty for one in the middle.
        capacity: Most tokens of a sample.
        multiple: What padded lengths must be a multiple of.
        timeout_s: Seconds to wait for other ranks.

    Raises:
        ValueError: If `timeout_s` is not positive.
    """

    def __init__(
        self,
        groups: ModelGroups,
        settings: Mapping[str, Setting],
        *,
        keys: Sequence[str],
        capacity: int,
        multiple: int,
        timeout_s: float,
    ) -> None:
        self._groups = groups
        self._settings = {**settings, "padding_multiple": multiple}
        self._keys = tuple(keys)
        self._capacity = capacity
        self._multiple = multiple
        self._patience = Patience(timeout_s=timeout_s)

    def read(
        self, data_iterator: Iterator[LoaderItem] | None, num_microbatches: int
    ) -> tuple[Agreement, StepLengths]:
        """Read one step; every rank of the model must call this.

        Args:
            data_iterator: This rank's samples; None on a rank that reads none.
            num_microbatches: Items to pull from it.

        Returns:
            What the data-parallel ranks offer each other, nothing where they read nothing; and the
            lengths of the step's samples, equal on all ranks.

        Raises:
            ExchangeError: If a rank failed, on every rank of the model in the same step.
            ValueError: If `num_microbatches` is no positive integer, or there is no iterator where
                the stage reads tokens; the other ranks get an ExchangeError. On every rank alike,
                if ranks read different numbers of micro-batches.
        """
        agreement: Agreement | None = None
        known: StepLengths | None = None
        failure: Exception | None = None
        try:
            agreement = self._agree(data_iterator, num_microbatches)
            if agreement.num_slots:
                known = StepLengths.from_agreement(agreement)
        except Exception as error:  # noqa: BLE001 - raised in _shared, once the peers know
            failure = error
        lengths = self._shared(known, failure)
        assert agreement is not None  # or there was a failure
        return agreement, lengths

    def exchange(self, name: str) -> SampleExchange:
        """Return the exchange over the named process group of the rank."""
        return exchange_over(getattr(self._groups, name), self._settings, self._patience)

    def _agree(
        self, data_iterator: Iterator[LoaderItem] | None, num_microbatches: int
    ) -> Agreement:
        """Read this rank's samples and agree on lengths with the data-parallel ranks."""

        def offer() -> Offer:
            _check_count(num_microbatches)
            if data_iterator is None:
                self._check_may_read_nothing()
                return Offer(samples=[], slot_counts=[], costs=[])
            pulled = pull_samples(
                data_iterator,
                num_microbatches,
                capacity=self._capacity,
                multiple=self._multiple,
            )
            return Offer(
                samples=[{key: sample[key] for key in self._keys} for sample in pulled.samples],
                slot_counts=pulled.counts,
                costs=list(zip(pulled.padded, pulled.original, strict=True)),
            )

        return self.exchange(_READ_OVER).agree(offer)

    def _check_may_read_nothing(self) -> None:
        if self._keys and self._groups.tp.rank() == 0:
            raise ValueError(
                f"data_iterator is None on data-parallel rank {self._groups.dp.rank()} of pipeline "
                f"stage {self._groups.pp.rank()}, which reads {', '.join(self._keys)}; pass the "
                "loader's iterator on tensor-parallel rank 0 of the first and the last stage"
            )

    def _shared(self, known: StepLengths | None, failure: Exception | None) -> StepLengths:
        """Make one outcome of all that this model's ranks know: lengths, or one rank's failure.

        Along CP, then the pipeline, then TP: after the three, every rank has heard of every other.
        """
        for name in _RETOLD_OVER:
            try:
                known = self._retold(name, known, failure)
            except Exception as error:  # noqa: BLE001 - raised below, once the peers know
                failure = error if failure is None else failure
        if failure is not None:
            raise failure
        assert known is not None  # the first stage reads, or has failed
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

        agreement = self.exchange(name).agree(offer)
        told = {
            rank: StepLengths.from_report(report, self._groups.dp.size())
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


def fail_step(groups: ModelGroups, failure: Exception) -> None:
    """Tell a step's failure to every rank of the model that takes part in it.

    For a rank that cannot make a `StepReader`. Whom it has no process group with, it cannot tell.

    Args:
        groups: The rank's process groups, as far as it has them.
        failure: What the others are told.
    """
    for name in (_READ_OVER, *_RETOLD_OVER):
        with suppress(Exception):  # the failure itself; or the group is missing, or gone
            tell_failure(getattr(groups, name), failure)


def _check_count(num_microbatches: int) -> None:
    if type(num_microbatches) is not int or num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches!r}; it must be a positive integer")
