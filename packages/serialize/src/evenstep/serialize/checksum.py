"""The checksum of a payload: CRC-32 of its sums, so that it costs little more than reading it."""

import ctypes
import zlib

import torch
from torch import Tensor

ROW_WORDS = 512
"""64-bit words per row: 4 KiB."""


def payload_checksum(payload: Tensor) -> int:
    """Return the checksum of the bytes of ``payload``.

    The bytes are read as rows of 512 little-endian 64-bit words. The sums of all rows and of all
    columns, modulo 2**64, and then the bytes after the last whole row go through CRC-32. A payload
    of less than one row thus has its plain CRC-32.

    A change within one row changes a column sum; changed words in several rows go unseen only if
    they cancel in every row and in every column, which takes four words at the corners of
    rectangles. Any other change is missed with probability 2**-32, that of the CRC.

    Args:
        payload: 1-D ``uint8`` on the CPU, contiguous, at an address that is a multiple of 8, of a
            size that is a multiple of 8.
    """
    words = payload.view(torch.int64)
    num_rows = words.numel() // ROW_WORDS
    rows = words[: num_rows * ROW_WORDS].view(num_rows, ROW_WORDS)
    checksum = 0
    if num_rows:
        # Integer sums wrap, and are the same in any order of summation.
        for sums in (rows.sum(1), rows.sum(0)):
            checksum = zlib.crc32(_bytes_of(sums), checksum)
    return zlib.crc32(_bytes_of(words[num_rows * ROW_WORDS :]), checksum)


def _bytes_of(words: Tensor) -> bytes:
    return ctypes.string_at(words.data_ptr(), words.nbytes) if words.numel() else b""
