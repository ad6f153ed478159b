"""Host memory that is used again, because fresh memory costs a page fault every 4 KiB.

Under a hypervisor, taking those faults can take several times as long as copying into the memory.
"""

import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch

CPU = torch.device("cpu")

_PAGE_BYTES = 1 << 12
_KEPT_SHARE = 1.25  # of the most that was in use: requests vary, so that not all regions fit again
_LEAST_BYTES = 1 << 17  # smaller blocks are kept for reuse by the C library's allocator


class HostMemory:
    """Memory for tensors; it comes back by itself when the last tensor on it is gone.

    What is free is kept, up to a little more than was in use at once not long ago. Any thread may
    call.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start with nothing, as a forked child must: its parent's lock may have been held."""
        self._lock = threading.Lock()
        self._returned: deque[mmap.mmap] = deque()  # what finalizers touch; they may run anywhere
        self._free: list[mmap.mmap] = []
        self._bytes_in_use = 0
        self._recent_peak = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous host tensor with arbitrary content."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes < _LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        try:
            region = self._take(nbytes)
        except (OSError, OverflowError):  # no memory: torch has the words for that
            return torch.empty(tuple(shape), dtype=dtype)
        # A buffer object of its own stands for this use: torch holds it while the tensor lives.
        lease = (ctypes.c_char * len(region)).from_buffer(region)
        weakref.finalize(lease, self._returned.append, region).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count).view(tuple(shape))

    def _take(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
                self._bytes_in_use -= len(self._free[-1])
            fitting = (region for region in self._free if nbytes <= len(region) <= 2 * nbytes)
            region = min(fitting, key=len, default=None)
            if region is None:
                region = _map(rounded(nbytes))
            else:
                self._free.remove(region)
            self._bytes_in_use += len(region)
            fading = self._recent_peak - self._recent_peak // 1024  # half in some 700 takes
            self._recent_peak = max(self._bytes_in_use, fading)
            while sum(map(len, self._free)) > _KEPT_SHARE * self._recent_peak:
                del self._free[0]  # the one that was not wanted for longest
            return region


HOST_MEMORY = HostMemory()
"""The one instance, so that windows reuse what earlier ones have freed."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HOST_MEMORY.forget)


def rounded(nbytes: int) -> int:
    """Return the next of four sizes per power of two, so that similar requests share regions."""
    step = max(_PAGE_BYTES, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


def _map(nbytes: int) -> mmap.mmap:
    region = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
