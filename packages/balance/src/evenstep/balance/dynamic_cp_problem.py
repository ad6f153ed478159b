"""The question of dynamic context parallelism, checked once: lengths, group sizes, prices."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from evenstep.balance.checks import checked_count
from evenstep.balance.packing_fill import longest_of_load
from evenstep.balance.packing_input import check_share, checked_lengths
from evenstep.balance.packing_load import Coefficient, SequenceLoad


class GroupSize(NamedTuple):
    """One size of context-parallel groups, and what a sequence costs each rank of such a group.

    Loads are integers in units of `1 / DynamicProblem.scale`, the same for all sizes.

    Attributes:
        size: Ranks of the group.
        capacity: Most tokens of the group.
        linear: Load of each rank per token of a sequence.
        quadratic: Load of each rank per token and token attended to.
    """

    size: int
    capacity: int
    linear: int
    quadratic: int

    def load(self, length: int) -> int:
        """Return what a sequence of `length` tokens costs each rank of the group."""
        return (self.linear + self.quadratic * length) * length

    def longest(self, load: int) -> int:
        """Return the length of the longest sequence that costs each rank at most `load`."""
        return longest_of_load(load, self.linear, self.quadratic)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicProblem:
    """Checked input of a planner of dynamic context parallelism.

    Attributes:
        lengths: Tokens of each sequence.
        num_ranks: Ranks of the domain (DP x CP).
        sizes: Allowed group sizes, ascending; each divides the next, but for the whole domain,
            which is always the last.
        least: For each sequence, the index of the smallest size that has room for it.
        work: Load of all sequences summed over ranks, without communication.
        rank_tokens: Tokens, each times the smallest size that has room for its sequence.
        bound: No step of any plan has a smaller load.
        scale: Units per load of 1.
        multiple: The number of micro-batches is a multiple of this.
    """

    lengths: tuple[int, ...]
    num_ranks: int
    sizes: tuple[GroupSize, ...]
    least: tuple[int, ...]
    work: int
    rank_tokens: int
    bound: int
    scale: int
    multiple: int

    @classmethod
    def checked(
        cls,
        lengths: Sequence[int],
        *,
        tokens_per_rank: int,
        num_ranks: int,
        load: SequenceLoad,
        communication: Coefficient,
        min_cp_size: int,
        cp_sizes: Sequence[int] | None,
        multiple: int,
    ) -> "DynamicProblem":
        """Check what the user passed and return it as exact integers.

        Raises:
            ValueError: Naming the parameter, its value, the rule and the remedy.
        """
        tokens_per_rank = checked_count(tokens_per_rank, "tokens_per_rank")
        num_ranks = checked_count(num_ranks, "num_ranks")
        exact = checked_lengths(lengths)
        for index, length in enumerate(exact):
            if length > tokens_per_rank * num_ranks:
                raise ValueError(
                    f"lengths[{index}] is {length}, more than the {tokens_per_rank * num_ranks} "
                    f"tokens of all {num_ranks} ranks of {tokens_per_rank}; raise tokens_per_rank, "
                    "or shorten or drop the sequence"
                )
        multiple = checked_count(multiple, "microbatch_multiple")
        if len(exact) < multiple:
            raise ValueError(
                f"{len(exact)} sequences cannot fill a multiple of {multiple} micro-batches "
                "without an empty one; pass more sequences or a smaller microbatch_multiple"
            )
        widths = _checked_sizes(num_ranks, min_cp_size, cp_sizes)
        sizes, scale = _priced_sizes(widths, tokens_per_rank, load, communication)
        capacities = [size.capacity for size in sizes]
        least = tuple(bisect_left(capacities, length) for length in exact)
        linear, quadratic = (int(Fraction(c) * scale) for c in (load.linear, load.quadratic))
        return cls(
            lengths=exact,
            num_ranks=num_ranks,
            sizes=sizes,
            least=least,
            work=sum((linear + quadratic * length) * length for length in exact),
            rank_tokens=sum(sizes[k].size * length for length, k in zip(exact, least, strict=True)),
            bound=_bound(exact, sizes, least),
            scale=scale,
            multiple=multiple,
        )


def _bound(lengths: Sequence[int], sizes: Sequence[GroupSize], least: Sequence[int]) -> int:
    """Return a load below which no step can be.

    A larger group never makes the load of all its ranks together smaller, so all ranks together
    bear at least each sequence in its smallest group; and one micro-batch holds the longest
    sequence, at best in the group that suits it.
    """
    work = sum(
        sizes[k].load(length) * sizes[k].size for length, k in zip(lengths, least, strict=True)
    )
    longest, k = max(zip(lengths, least, strict=True))
    return max(-(-work // sizes[-1].size), min(size.load(longest) for size in sizes[k:]))


def _checked_sizes(num_ranks: int, min_cp_size: int, cp_sizes: Sequence[int] | None) -> list[int]:
    """Return the allowed group sizes, ascending, the whole domain last."""
    smallest = checked_count(min_cp_size, "min_cp_size")
    if cp_sizes is None:
        widths = [smallest << k for k in range(num_ranks.bit_length()) if smallest << k < num_ranks]
    else:
        given = {checked_count(size, f"cp_sizes[{i}]") for i, size in enumerate(cp_sizes)}
        widths = sorted(size for size in given if smallest <= size < num_ranks)
        for small, large in pairwise(widths):
            if large % small:
                raise ValueError(
                    f"cp_sizes has {small} and {large}; each size must divide the next, so that "
                    "groups of both fit side by side"
                )
    if smallest > num_ranks or num_ranks % (widths or [num_ranks])[0]:
        raise ValueError(
            f"the smallest group size is {(widths or [smallest])[0]} and num_ranks is {num_ranks}; "
            "the smallest size must divide the ranks, so that none is idle"
        )
    return [*widths, num_ranks]


def _priced_sizes(
    widths: Sequence[int], tokens_per_rank: int, load: SequenceLoad, communication: Coefficient
) -> tuple[tuple[GroupSize, ...], int]:
    """Return the sizes with integer loads per rank, and the units per load of 1."""
    check_share("communication", communication)
    price, linear, quadratic = (Fraction(c) for c in (communication, load.linear, load.quadratic))
    scale = math.lcm(price.denominator, linear.denominator, quadratic.denominator)
    scale *= math.lcm(*widths)
    sizes = tuple(
        GroupSize(
            width,
            width * tokens_per_rank,
            int((linear + price * (width - 1)) * scale / width),
            int(quadratic * scale / width),
        )
        for width in widths
    )
    return sizes, scale
