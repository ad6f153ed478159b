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
    num_rows, rest = divmod(payload.numel(), 8 * ROW_WORDS)
    checksum = 0
    if num_rows:
        words = payload.view(torch.int64)
        rows = words.as_strided((num_rows, ROW_WORDS), (ROW_WORDS, 1), words.storage_offset())
        # Integer sums wrap, and are the same in any order of summation.
        sums = rows.sum(1)
        checksum = zlib.crc32(ctypes.string_at(sums.data_ptr(), 8 * num_rows))
    if rest:
        end = payload.data_ptr() + payload.numel()
        checksum = zlib.crc32(ctypes.string_at(end - rest, rest), checksum)
    return checksum
