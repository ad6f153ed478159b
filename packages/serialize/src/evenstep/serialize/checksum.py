"""The checksum of a payload: CRC-32 of its row sums, one pass at the speed of memory."""

import ctypes
import zlib

import torch
from torch import Tensor

ROW_WORDS = 64
"""64-bit words per row: 512 bytes."""


def payload_checksum(payload: Tensor) -> int:
    """Return the checksum of the bytes of ``payload``.

    The bytes are read as rows of 64 little-endian 64-bit words. The sums of the rows, modulo
    2**64, and then the bytes after the last whole row, go through CRC-32. A payload of less than
    one row thus has its plain CRC-32.

    What changes one word of a row, or the order of rows, changes the sums. Changes that cancel
    within a row of 512 bytes, such as two words in each other's place, go unseen; any other
    change is missed with probability 2**-32, that of the CRC.

    Args:
        payload: 1-D ``uint8`` on the CPU, contiguous, at an address that is a multiple of 8, of a
            size that is a multiple of 8.
    """
    words = payload.view(torch.int64)
    num_rows = words.numel() // ROW_WORDS
    rows = words[: num_rows * ROW_WORDS].view(num_rows, ROW_WORDS)
    # Integer sums wrap, and are the same in any order of summation.
    checksum = zlib.crc32(_bytes_of(rows.sum(1)))
    return zlib.crc32(_bytes_of(words[num_rows * ROW_WORDS :]), checksum)


def _bytes_of(words: Tensor) -> bytes:
    return ctypes.string_at(words.data_ptr(), words.nbytes) if words.numel() else b""
