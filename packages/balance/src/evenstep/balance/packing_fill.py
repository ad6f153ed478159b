"""Fewest bins: best-fit decreasing, and the splitting that reaches a wanted number of bins."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit_decreasing(
    lengths: Sequence[int], *, capacity: int, max_sequences: int
) -> list[list[int]]:
    """Pack sequences into few bins: longest first, each into the fullest bin that holds it.

    Uses at most 11/9 of the fewest bins plus 6/9 when `max_sequences` does not bind (Dosa et al.
    2013). O(n log n) comparisons: the open bins stay sorted by the room they have left.

    Args:
        lengths: Tokens of each sequence, each at most `capacity`.
        capacity: Most tokens of a bin.
        max_sequences: Most sequences of a bin.

    Returns:
        Sequence indices of each bin, in the order of opening; ties go to the lower index.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin) of the open bins, ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(rooms, (lengths[index], -1))
        if at < len(rooms):
            room, target = rooms.pop(at)
        else:
            room, target = capacity, len(bins)
            bins.append([])
        bins[target].append(index)
        if room > lengths[index] and len(bins[target]) < max_sequences:
            insort(rooms, (room - lengths[index], target))
    return bins
