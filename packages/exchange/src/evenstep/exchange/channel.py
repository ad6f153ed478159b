"""A small message from every rank to every rank: bytes of any length, no pickle."""

import struct

import torch
import torch.distributed as dist

from evenstep.exchange.errors import ProtocolError
from evenstep.exchange.waiting import Patience, start_all_to_all

_LENGTH = struct.Struct("<q")
_FIRST_CAPACITY = 4096  # bytes; a header and some fifty samples
_MAX_MESSAGE_BYTES = 1 << 30  # far above the metadata of any window, far below what hurts


class Channel:
    """All-gathers one message per rank over a Gloo group.

    The frame all ranks send is equally long and grows when a message does not fit, so that in the
    steady state one collective carries a round. It is an all-to-all of copies rather than an
    all-gather, which Gloo runs as a ring: here every rank talks to every other directly, in one
    hop, and so learns at once when any of them dies.

    Args:
        group: A group that takes CPU tensors (Gloo). Only one thread may use it.
        world_size: Its number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, world_size: int) -> None:
        self._group = group
        self._world_size = world_size
        self._capacity = _FIRST_CAPACITY

    def gather(self, message: bytes, patience: Patience, *, doing: str) -> list[memoryview]:
        """Send `message` to every rank and return the messages of all, in rank order.

        Raises:
            ProtocolError: If a message has an impossible length; on every rank alike.
            ExchangeError: As `Patience.wait`.
        """
        if self._world_size == 1:
            return [memoryview(message)]
        while True:
            frames = self._exchange_frames(message, patience, doing)
            lengths = [_LENGTH.unpack_from(frame)[0] for frame in frames]
            self._check(lengths, doing)
            needed = _LENGTH.size + max(lengths)
            if needed <= self._capacity:
                return [
                    frame[_LENGTH.size : _LENGTH.size + length]
                    for frame, length in zip(frames, lengths, strict=True)
                ]
            self._capacity = 1 << (needed - 1).bit_length()

    def _exchange_frames(self, message: bytes, patience: Patience, doing: str) -> list[memoryview]:
        fitting = message[: self._capacity - _LENGTH.size]  # the rest goes in a second attempt
        frame = (_LENGTH.pack(len(message)) + fitting).ljust(self._capacity, b"\0")
        sent = torch.frombuffer(bytearray(frame), dtype=torch.uint8).repeat(self._world_size)
        received = bytearray(len(sent))
        work = start_all_to_all(
            torch.frombuffer(received, dtype=torch.uint8), sent, self._group, doing=doing
        )
        patience.wait(work, self._group, doing=doing)
        view = memoryview(received)
        return [
            view[start : start + self._capacity] for start in range(0, len(view), self._capacity)
        ]

    def _check(self, lengths: list[int], doing: str) -> None:
        for rank, length in enumerate(lengths):
            if not 0 <= length <= _MAX_MESSAGE_BYTES:
                raise ProtocolError(
                    f"rank {rank} announced a message of {length} bytes in {doing}; at most "
                    f"{_MAX_MESSAGE_BYTES} are allowed, so it runs another program or another "
                    "version"
                )
