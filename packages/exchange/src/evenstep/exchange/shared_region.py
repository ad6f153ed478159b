"""Memory that another process of this machine can map, and the marks by which both use it in turn.

A region is a memfd of Linux: nothing of it is left when the processes that hold it are gone. It
begins with words, int64, each written by one process alone:

    identity, number of the content, then for every rank of the node:
    where its bytes begin, the content that it has mapped, the content that it is done with
"""

import mmap
import os
import secrets
import struct
import sys
import threading
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import torch

_WORD_BYTES = 8
_HEAD_WORDS = 2
_RANK_WORDS = 3
_BEGIN, _MAPPED, _DONE = range(_RANK_WORDS)
_PAGE_BYTES = 1 << 12
_HANDLE = struct.Struct("<qqqi?")


class Handle(NamedTuple):
    """What a process needs to map another's region.

    Attributes:
        identity: A random number, found in the region too.
        content: The number of what it holds now.
        nbytes: Its size.
        descriptor: Its file, in the process that owns it.
        lends: Whether it holds not samples, but where they lie in that process.
    """

    identity: int
    content: int
    nbytes: int
    descriptor: int
    lends: bool

    def encode(self) -> bytes:
        """Return the handle's bytes in a control message."""
        return _HANDLE.pack(*self)

    @classmethod
    def decode(cls, data: memoryview) -> Self:
        """Return the handle in a control message.

        Raises:
            ValueError: If it has another length.
        """
        if len(data) != _HANDLE.size:
            raise ValueError(f"a handle of a region has {_HANDLE.size} bytes, not {len(data)}")
        return cls(*_HANDLE.unpack(data))


class Region:
    """Memory of this process for others to read.

    Args:
        capacity: Least bytes of content.
        num_ranks: Number of ranks of the node.

    Attributes:
        capacity: Bytes of content that fit.
        is_committed: Whether the readers have heard of the content.

    Raises:
        OSError: If the system has no memory, or no descriptor, left.
    """

    def __init__(self, capacity: int, num_ranks: int) -> None:
        assert sys.platform == "linux"
        start = _content_start(num_ranks)
        size = start + capacity
        self._descriptor = os.memfd_create("evenstep", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        os.posix_fallocate(self._descriptor, 0, size)  # no memory is an error here, a signal later
        self._words, self._content = _map(self._descriptor, size, num_ranks)
        self._identity = self._words[0] = secrets.randbits(63)
        self._size, self.capacity = size, capacity
        self._number = 0
        self._lends = False
        self._changes = threading.RLock()  # a finalizer, which withdraws, may run anywhere
        self.is_committed = False
        self._readers: list[int] = []

    def fill(self, number: int, nbytes: Sequence[int], *, lends: bool = False) -> torch.Tensor:
        """Begin new content; return uint8 [sum of nbytes] to write it to.

        Args:
            number: Numbers the content, other than any before.
            nbytes: Bytes of the content for each rank of the node, in order.
            lends: Whether the content says where something else lies, which readers need too.
        """
        assert self.is_free
        with self._changes:
            self._number = self._words[1] = number
            self._lends = lends
        self.is_committed = False
        self._readers = [place for place, count in enumerate(nbytes) if count]
        for place, begin in enumerate(accumulate(nbytes[:-1], initial=0)):
            self._words[_HEAD_WORDS + _RANK_WORDS * place + _BEGIN] = begin
        return self._content[: sum(nbytes)]

    @property
    def handle(self) -> Handle:
        """What the readers need."""
        return Handle(self._identity, self._number, self._size, self._descriptor, self._lends)

    def late(self, number: int) -> list[int]:
        """Return the readers that need this process for some content, by place on the node.

        They have not mapped it yet; or, where it lends, are not done with it. Nobody is late for
        content that was replaced: all were done with it.
        """
        if number != self._number:
            return []
        mark = _DONE if self._lends else _MAPPED
        return [place for place in self._readers if self._word(place, mark) != number]

    def withdraw(self, number: int) -> None:
        """Tell readers that come late that what some content lends is not there any more."""
        with self._changes:
            if number == self._number and self._lends:
                self._words[1] = 0

    @property
    def is_free(self) -> bool:
        """Whether all readers are done with the content, or will never hear of it."""
        return not self.is_committed or all(
            self._word(place, _DONE) == self._number for place in self._readers
        )

    def retire(self) -> None:
        """Tell who has mapped this region that it holds nothing any more, and never will."""
        self._words[0] = 0

    def _word(self, place: int, which: int) -> int:
        return self._words[_HEAD_WORDS + _RANK_WORDS * place + which]


class MappedRegion:
    """A region of another process.

    Args:
        process: Its id.
        handle: As it told.
        num_ranks: Number of ranks of the node.
        place: Of this rank on the node.

    Raises:
        FileNotFoundError: If the process is gone.
        ProcessLookupError: If another process has its id, or another file its descriptor.
        OSError: If this process has no memory, or no descriptor, left.
    """

    def __init__(self, process: int, handle: Handle, *, num_ranks: int, place: int) -> None:
        descriptor = os.open(f"/proc/{process}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._words, self._content = _map(descriptor, handle.nbytes, num_ranks)
        finally:
            os.close(descriptor)
        if self._words[0] != handle.identity:
            raise ProcessLookupError(f"what process {process} has there now is another file")
        self._identity = handle.identity
        self._first = _HEAD_WORDS + _RANK_WORDS * place

    @property
    def is_retired(self) -> bool:
        """Whether its owner has given it up."""
        return self._words[0] != self._identity

    def take(self, number: int, nbytes: int) -> torch.Tensor:
        """Return this rank's bytes of the content, and tell the owner that they are mapped."""
        begin = self._words[self._first + _BEGIN]
        self._words[self._first + _MAPPED] = number
        return self._content[begin : begin + nbytes]

    def holds(self, number: int) -> bool:
        """Return whether the content is there, and with it what it lends."""
        return self._words[1] == number

    def done(self, number: int) -> None:
        """Tell the owner that this rank does not read the content any more."""
        self._words[self._first + _DONE] = number


def _content_start(num_ranks: int) -> int:
    words = _HEAD_WORDS + _RANK_WORDS * num_ranks
    return -(-words * _WORD_BYTES // _PAGE_BYTES) * _PAGE_BYTES


def _map(descriptor: int, size: int, num_ranks: int) -> "tuple[memoryview[int], torch.Tensor]":
    """Return the words and the content, uint8, of a region."""
    assert sys.platform == "linux"
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    start = _content_start(num_ranks)
    words = memoryview(memory)[:start].cast("q")
    return words, torch.frombuffer(memory, dtype=torch.uint8)[start:]
