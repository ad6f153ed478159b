"""Copies of bytes between addresses, which are collected first and made at the end."""

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import TypeAlias

import torch

Copy: TypeAlias = tuple[int, int, int]
"""To which address, from which, and how many bytes."""

Copier: TypeAlias = Callable[[Sequence[Copy]], None]
"""Makes copies."""

# Above this size copies of torch with several threads beat memmove, which has one, but starts
# within 0.5 us where a view and a copy_ take 5 us.
_LARGE_NBYTES = 1 << 20

# ctypes.memmove lets other threads run. For a small copy that costs more than the copy, and if
# another thread does run Python, it costs a switch interval, 5 ms, to get the interpreter back.
# Small copies are slices of this, all memory there may be, which is a call of ctypes less as well.
_HELD_NBYTES = 1 << 16
_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")

# On AMD glibc copies with `rep movsb` up to the size of the second-level cache, 512 KiB on many,
# and with a loop of vectors above, which takes a twentieth longer. But the instruction takes three
# times as long to where, within its page, is just above the source (glibc's bug 30994). Where the
# variable says that glibc streams from some size on, whole copies are faster than either.
_PIECE_NBYTES = 448 << 10
_PAGE_NBYTES, _JUST_ABOVE = 1 << 12, range(1, 32)
_STREAMS = "x86_non_temporal_threshold" in os.environ.get("GLIBC_TUNABLES", "")


def largest_memmove() -> int:
    """Return up to how many bytes a memmove is the fastest copy."""
    return _LARGE_NBYTES if torch.get_num_threads() > 1 else sys.maxsize


def copy_all(copies: Sequence[Copy]) -> None:
    """Copy bytes between addresses; what is copied to is not copied from."""
    memory = _MEMORY
    large = []
    for copy in copies:
        to, source, nbytes = copy
        if nbytes <= _HELD_NBYTES:
            memory[to : to + nbytes] = memory[source : source + nbytes]
        else:
            large.append(copy)
    if threading.active_count() == 1 and not _STREAMS:  # each piece lets other threads run
        large = [piece for copy in large for piece in in_pieces([copy], _piece_nbytes(copy))]
    deque(starmap(ctypes.memmove, large), 0)


def _piece_nbytes(copy: Copy) -> int:
    """Return in pieces of how many bytes at most a large copy is fastest."""
    to, source, nbytes = copy
    return nbytes if (to - source) % _PAGE_NBYTES in _JUST_ABOVE else _PIECE_NBYTES


def in_pieces(copies: Sequence[Copy], most_nbytes: int) -> list[Copy]:
    """Return copies of so many bytes at most that do the same."""
    return [
        (to + start, source + start, min(most_nbytes, nbytes - start))
        for to, source, nbytes in copies
        for start in range(0, nbytes, most_nbytes)
    ]


class Copies:
    """Copies to make at the end, because code that runs between two copies runs without cache."""

    __slots__ = ("_by_copier",)

    def __init__(self) -> None:
        self._by_copier: dict[Copier, list[Copy]] = {}

    def by(self, copier: Copier) -> list[Copy]:
        """Return the list that takes the copies for one copier to make."""
        return self._by_copier.setdefault(copier, [])

    def fetch(self) -> None:
        """Make the copies of memory that is not this process's own, ahead of the others."""
        own = self._by_copier.pop(copy_all, [])
        self.make()
        self._by_copier = {copy_all: own}

    def make(self, base: int = 0) -> None:
        """Make all copies; the addresses to copy to are counted from ``base``."""
        for copier, copies in self._by_copier.items():
            copier([(base + to, source, n) for to, source, n in copies] if base else copies)
