"""Steps drawn from the input: which numbers each one takes, and what they cost."""

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from evenstep.balance.cli.errors import InputError

CostsOf: TypeAlias = Callable[[Sequence[float]], Sequence[float]]
"""From the numbers of the input to costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Disjoint blocks of the input, one per simulated step.

    Attributes:
        values: The numbers of the input, in the order in which they are drawn.
        size: Numbers of a step.
        starts: Where each drawn block starts, ascending.
        available: How many whole blocks the input has.
        seed: What the input was shuffled with; None in the order of the input.
    """

    values: "array[float]"
    size: int
    starts: Sequence[int]
    available: int
    seed: int | None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Sequence[float]:
        start = self.starts[index]
        return self.values[start : start + self.size]

    def __iter__(self) -> Iterator[Sequence[float]]:
        return map(self.__getitem__, range(len(self)))

    def describe(self) -> str:
        """Return how many steps were drawn, and how."""
        how = "in the order of the input" if self.seed is None else f"shuffled, seed {self.seed}"
        if len(self) < self.available:
            how = f"evenly spaced, {how}" if self.seed is None else how
            return f"{len(self):,} of {self.available:,} steps, {how}"
        return f"{self.available:,} {'step' if self.available == 1 else 'steps'}, {how}"


def choose_draws(
    values: "array[float]", size: int, *, max_draws: int, seed: int | None, what: str
) -> Draws:
    """Divide the input into blocks and choose at most `max_draws` of them, evenly spaced.

    With a seed, the input is shuffled in place, as far as it will be drawn.

    Args:
        values: The numbers of the input.
        size: Numbers of a block.
        max_draws: Most blocks; 0 takes all.
        seed: What to shuffle with, None to keep the order.
        what: How `size` comes about, for the message.

    Raises:
        InputError: The input does not fill one block.
    """
    available = len(values) // size
    if not available:
        raise InputError(
            f"it has {len(values):,} numbers, but one step takes {size:,} ({what}); "
            "give more input, or make the step smaller"
        )
    count = min(available, max_draws or available)
    if seed is None:
        starts = [index * available // count * size for index in range(count)]
    else:
        _shuffle_front(values, count * size, random.Random(seed))  # noqa: S311 (no secret)
        starts = [index * size for index in range(count)]
    return Draws(values=values, size=size, starts=starts, available=available, seed=seed)


def _shuffle_front(values: "array[float]", count: int, rng: random.Random) -> None:
    """Move a random choice of `count` numbers, in random order, to the front (Fisher and Yates)."""
    for front in range(count):
        # random() is the method whose sequence Python promises never to change.
        other = front + int(rng.random() * (len(values) - front))
        values[front], values[other] = values[other], values[front]
