"""The lowest level at which something fits."""

from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def lowest_level(
    attempt: Callable[[int], Found | None], *, guess: int, enough: int, precision: int
) -> tuple[int, Found] | None:
    """Return the lowest level found at which `attempt` succeeds, and its result there.

    Looks around the guess first, in steps that double, then halves what is left between the
    highest level that failed and the lowest that succeeded.

    Args:
        attempt: Returns None where the level is too low. It need not be monotone.
        guess: Where to look first.
        enough: A level that is not tried: only lower ones are of interest.
        precision: Ends when the level is known to one part in this many.

    Returns:
        None if every level that was tried is too low.
    """
    best: tuple[int, Found] | None = None
    too_low = -1  # no load is below 0
    level, step = guess, guess // 16
    while enough - too_low > max(1, enough // precision):
        if not too_low < level < enough:
            level = (enough + too_low) // 2
        found = attempt(level)
        if found is not None:
            best = level, found
            enough = level
            level -= step
        else:
            too_low = level
            level += step
        step *= 2
    return best
