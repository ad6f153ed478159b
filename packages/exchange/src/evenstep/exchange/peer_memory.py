"""Memory of another process of this machine, copied from where it lies: cross-memory attach.

One copy takes the place of two, one into shared memory and one out of it. Linux lets a process do
so (`process_vm_readv`) that could also attach a debugger: one of the same user, unless Yama, a
container or a sandbox forbids it.
"""

import ctypes
import os
import sys
from array import array
from collections.abc import Sequence
from operator import itemgetter

from evenstep.serialize import Copy, in_pieces

# What one call takes: IOV_MAX pieces of Linux, and a little less than 2 GiB of bytes.
_MAX_PIECES = 1 << 10
_MAX_PIECE_BYTES = 1 << 20

_NBYTES = itemgetter(2)

_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def read_memory(process: int, copies: Sequence[Copy]) -> None:
    """Copy bytes from addresses of another process.

    Args:
        process: Its id.
        copies: The addresses to copy to are of this process.

    Raises:
        OSError: If the process is gone, does not allow it, or has nothing there.
    """
    if _readv is None or sys.platform != "linux":
        raise OSError("this system has no process_vm_readv")
    if max(map(_NBYTES, copies), default=0) > _MAX_PIECE_BYTES:
        copies = in_pieces(copies, _MAX_PIECE_BYTES)
    for start in range(0, len(copies), _MAX_PIECES):
        to, source, nbytes = zip(*copies[start : start + _MAX_PIECES], strict=True)
        here = _vectors(to, nbytes)
        there = _vectors(source, nbytes)
        count = len(nbytes)
        copied = _readv(process, here.buffer_info()[0], count, there.buffer_info()[0], count, 0)
        if copied < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if copied < sum(nbytes):
            raise OSError(f"only {copied} bytes of {sum(nbytes)} could be read")


def _vectors(addresses: Sequence[int], nbytes: Sequence[int]) -> "array[int]":
    """Return an array of `struct iovec`."""
    vectors = array("Q", bytes(16 * len(addresses)))
    vectors[0::2] = array("Q", addresses)
    vectors[1::2] = array("Q", nbytes)
    return vectors
