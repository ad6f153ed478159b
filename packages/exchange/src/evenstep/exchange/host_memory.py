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
from functools import lru_cache

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
        self._leases: dict[int, _Lease] = {}  # by id: they must live to hear of the tensors' end
        self._ended: deque[_Lease] = deque()  # what their callback touches; it may run anywhere
        self._free: dict[int, list[mmap.mmap]] = {}  # by size; the size used last is last
        self._bytes_free = 0
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
        buffer = _bytes_type(len(region)).from_buffer(region)
        lease = _Lease(buffer, self._ended.append)
        lease.region = region
        self._leases[id(lease)] = lease
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(tuple(shape))

    def _take(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            self._take_back()
            size = min([size for size in self._free if nbytes <= size <= 2 * nbytes], default=0)
            region = self._reused(size) if size else _map(rounded(nbytes))
            self._bytes_in_use += len(region)
            fading = self._recent_peak - self._recent_peak // 1024  # half in some 700 takes
            self._recent_peak = max(self._bytes_in_use, fading)
            while self._bytes_free > _KEPT_SHARE * self._recent_peak:
                self._drop()
            return region

    def _take_back(self) -> None:
        """Free the regions whose tensors are gone."""
        while self._ended:
            lease = self._ended.popleft()
            del self._leases[id(lease)]
            size = len(lease.region)
            self._free.setdefault(size, []).append(lease.region)
            self._bytes_free += size
            self._bytes_in_use -= size

    def _reused(self, size: int) -> mmap.mmap:
        regions = self._free.pop(size)
        region = regions.pop()
        if regions:
            self._free[size] = regions
        self._bytes_free -= size
        return region

    def _drop(self) -> None:
        """Unmap a region of the size that was not wanted for longest."""
        size, regions = next(iter(self._free.items()))
        del regions[0]
        if not regions:
            del self._free[size]
        self._bytes_free -= size


class _Lease(weakref.ref[ctypes.Array[ctypes.c_char]]):
    """Tells the end of a buffer's use; lighter than `weakref.finalize`."""

    __slots__ = ("region",)

    region: mmap.mmap


HOST_MEMORY = HostMemory()
"""The one instance, so that windows reuse what earlier ones have freed."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HOST_MEMORY.forget)


@lru_cache(256)
def _bytes_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the type of a buffer, which takes longer to make than the buffer itself."""
    return ctypes.c_char * nbytes


def rounded(nbytes: int) -> int:
    """Return the next of four sizes per power of two, so that similar requests share regions."""
    step = max(_PAGE_BYTES, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


def _map(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        # A forked child has its own then, and huge pages are for the asking.
        region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        region = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
