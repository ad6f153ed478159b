"""What all ranks know of a step before it is planned: the length of every sample."""

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.exchange import Agreement, RankReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLengths:
    """The samples of one step over all data-parallel ranks, by global index.

    The global index counts micro-batch by micro-batch, within one rank by rank: the order in which
    the global batch was drawn.

    Attributes:
        counts: `[micro-batch][rank]`, samples that the rank read in it.
        padded: Tokens of each sample with alignment padding.
        original: Tokens of each sample.
    """

    counts: tuple[tuple[int, ...], ...]
    padded: tuple[int, ...]
    original: tuple[int, ...]

    @property
    def holders(self) -> list[tuple[int, int]]:
        """`(data-parallel rank, index among the samples that it read)` of each sample."""
        read = [0] * len(self.counts[0])
        holders = []
        for counts in self.counts:
            for rank, count in enumerate(counts):
                holders += [(rank, read[rank] + i) for i in range(count)]
                read[rank] += count
        return holders

    @property
    def token_sum(self) -> int:
        """Padded tokens of the step, exact."""
        return sum(self.padded)

    @property
    def token_squared_sum(self) -> int:
        """Sum over samples of the squared padded length, exact."""
        return sum(length * length for length in self.padded)

    @property
    def rows(self) -> list[tuple[float, float]]:
        """`(padded, original)` of each sample, as the exchange carries costs: exact to 2**53."""
        return [(float(p), float(o)) for p, o in zip(self.padded, self.original, strict=True)]

    def of_pack(self, sequences: Sequence[int]) -> dict[str, list[int]]:
        """Return the `original` and `padded` lengths of a pack, in its order."""
        return {
            "original": [self.original[index] for index in sequences],
            "padded": [self.padded[index] for index in sequences],
        }

    @classmethod
    def from_agreement(cls, agreement: Agreement) -> "StepLengths":
        """Read from what the data-parallel ranks agreed on; costs are `(padded, original)`.

        Raises:
            ValueError: On every rank, if ranks read different numbers of micro-batches.
        """
        asked = [len(report.slot_counts) for report in agreement.reports]
        if len(set(asked)) > 1:
            odd = next(rank for rank, count in enumerate(asked) if count != asked[0])
            if not min(asked):
                raise ValueError(
                    f"data_iterator is None on data-parallel rank {asked.index(0)} alone; pass an "
                    "iterator on every data-parallel rank of a pipeline stage, or on none"
                )
            raise ValueError(
                f"num_microbatches is {asked[odd]} on data-parallel rank {odd} and {asked[0]} on "
                "rank 0; every rank must pull the same number in a step"
            )
        rows = [
            row for slot in range(agreement.num_slots) for row in agreement.cost_rows_of_slot(slot)
        ]
        return cls(
            counts=tuple(zip(*(report.slot_counts for report in agreement.reports), strict=True)),
            padded=tuple(int(padded) for padded, _ in rows),
            original=tuple(int(original) for _, original in rows),
        )

    @classmethod
    def from_report(cls, report: RankReport, num_ranks: int) -> "StepLengths":
        """Read from what a rank of the same step retold: counts flattened, rows by global index."""
        counts: Sequence[int] = report.slot_counts
        return cls(
            counts=tuple(
                tuple(counts[start : start + num_ranks])
                for start in range(0, len(counts), num_ranks)
            ),
            padded=tuple(int(value) for value in report.costs[0::2]),
            original=tuple(int(value) for value in report.costs[1::2]),
        )
