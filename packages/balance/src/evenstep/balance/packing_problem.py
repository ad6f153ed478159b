"""The question that packing answers, checked once: lengths, capacity, ranks, objective."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evenstep.balance.checks import checked_count
from evenstep.balance.packing_input import checked_lengths
from evenstep.balance.packing_load import SequenceLoad
from evenstep.balance.synchronize import Synchronize, check_synchronize


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingProblem:
    """Checked input of a packing planner.

    Attributes:
        lengths: Tokens of each sequence.
        loads: Load of each sequence, an integer in units of `1 / scale`.
        linear: Units of load per token.
        quadratic: Units of load per token and token attended to.
        scale: Units per load of 1.
        capacity: Most tokens of a bin.
        max_sequences: Most sequences of a bin.
        num_ranks: Bins of a micro-batch.
        multiple: The number of micro-batches is a multiple of this.
        synchronize: When ranks wait for each other.
        longest_first: Indices of the sequences by falling length, ties by index.
    """

    lengths: tuple[int, ...]
    loads: tuple[int, ...]
    linear: int
    quadratic: int
    scale: int
    capacity: int
    max_sequences: int
    num_ranks: int
    multiple: int
    synchronize: Synchronize
    longest_first: tuple[int, ...]

    @classmethod
    def checked(
        cls,
        lengths: Sequence[int],
        *,
        capacity: int,
        load: SequenceLoad,
        num_ranks: int,
        multiple: int,
        max_sequences: int | None,
        synchronize: Synchronize,
    ) -> "PackingProblem":
        """Check what the user passed and return it as exact integers.

        Raises:
            ValueError: Naming the parameter, its value, the rule and the remedy.
        """
        capacity = checked_count(capacity, "capacity")
        check_synchronize(synchronize)
        exact = checked_lengths(lengths)
        for index, length in enumerate(exact):
            if length > capacity:
                raise ValueError(
                    f"lengths[{index}] is {length}, more than the capacity of {capacity} tokens; "
                    "raise the capacity, or shorten or drop the sequence"
                )
        num_ranks = checked_count(num_ranks, "num_ranks")
        multiple = checked_count(multiple, "microbatch_multiple")
        if len(exact) < num_ranks * multiple:
            raise ValueError(
                f"{len(exact)} sequences cannot fill {num_ranks} ranks x {multiple} micro-batches "
                "without an empty bin; pass more sequences, or fewer ranks or a smaller multiple"
            )
        linear, quadratic, scale = load.integers()
        return cls(
            lengths=exact,
            loads=tuple((linear + quadratic * length) * length for length in exact),
            linear=linear,
            quadratic=quadratic,
            scale=scale,
            capacity=capacity,
            max_sequences=(
                len(exact)
                if max_sequences is None
                else checked_count(max_sequences, "max_sequences")
            ),
            num_ranks=num_ranks,
            multiple=multiple,
            synchronize=synchronize,
            longest_first=tuple(sorted(range(len(exact)), key=lambda i: (-exact[i], i))),
        )

    @property
    def bins_per_step(self) -> int:
        """The number of bins is a multiple of this."""
        return self.num_ranks * self.multiple

    def rounded_up(self, bins: int) -> int:
        """Return the next allowed number of bins."""
        return -(-bins // self.bins_per_step) * self.bins_per_step

    def allowed_bins(self, bins: int) -> int:
        """Return the next allowed number of bins.

        Raises:
            ValueError: If there are fewer sequences than that.
        """
        count = self.rounded_up(bins)
        if count > len(self.lengths):
            raise ValueError(
                f"{len(self.lengths)} sequences need {bins} bins of {self.capacity} tokens, which "
                f"{self.num_ranks} ranks x a multiple of {self.multiple} micro-batches round up to "
                f"{count} bins, and none may be empty; pass more sequences, raise the capacity, or "
                "lower the multiple"
            )
        return count

    def load_of(self, sequences: Iterable[int]) -> int:
        """Return the load, in units, of the sequences of these indices."""
        return sum(self.loads[i] for i in sequences)

    def tokens_of(self, sequences: Iterable[int]) -> int:
        """Return the tokens of the sequences of these indices."""
        return sum(self.lengths[i] for i in sequences)
