"""A small message from every rank to every rank: bytes of any length, no pickle."""

import struct

import torch
import torch.distributed as dist

from evenstep.exchange.errors import ProtocolError
from evenstep.exchange.waiting import Patience, start_all_to_all

_LENGTH = struct.Struct("<q")
_MAX_MESSAGE_BYTES = 1 << 27  # the metadata of some two million samples of one rank


class Channel:
    """All-gathers one message per rank over a Gloo group.

    The frame all ranks send is equally long and grows when a message does not fit, so that in the
    steady state one collective carries a round. It is an all-to-all of copies rather than an
    all-gather, which Gloo runs as a ring: here every rank talks to every other directly, in one
    hop, and so learns at once when any of them dies.

    Args:
        group: A group that takes CPU tensors (Gloo). Only one thread may use it.
        world_size: Its number of ranks.
        capacity: Bytes of the first frame: a message and 8 more.
    """

    def __init__(self, group: dist.ProcessGroup, world_size: int, *, capacity: int) -> None:
        self._group = group
        self._world_size = world_size
        self._capacity = capacity
        self._pending: tuple[dist.Work, list[memoryview]] | None = None

    def gather(self, message: bytes, patience: Patience, *, doing: str) -> list[memoryview]:
        """Send `message` to every rank and return the messages of all, in rank order.

        After an interrupt, such as Ctrl-C, the same call again goes on where it was.

        Raises:
            ProtocolError: If a message has an impossible length; on every rank alike.
            ExchangeError: As `Patience.wait`.
        """
        while True:
            frames = self._exchange_frames(message, patience, doing)
            lengths = [_length(frame) for frame in frames]
            self._check(lengths, doing)
            fitting = 1 << (_LENGTH.size + max(lengths) - 1).bit_length()
            if fitting <= self._capacity:
                # One long message, such as an error's text, shall not make all later ones long.
                self._capacity = max(fitting, self._capacity // 2)
                return [
                    frame[_LENGTH.size : _LENGTH.size + length]
                    for frame, length in zip(frames, lengths, strict=True)
                ]
            self._capacity = fitting

    def _exchange_frames(self, message: bytes, patience: Patience, doing: str) -> list[memoryview]:
        if self._pending is None:
            self._pending = self._start(message, doing)
        work, frames = self._pending
        patience.wait(
            work,
            self._group,
            doing=doing,
            # No message is empty, so a length that is still zero has not arrived.
            absent=lambda: [rank for rank, frame in enumerate(frames) if not _length(frame)],
        )
        self._pending = None
        return frames

    def _start(self, message: bytes, doing: str) -> tuple[dist.Work, list[memoryview]]:
        fitting = message[: self._capacity - _LENGTH.size]  # the rest goes in a second attempt
        frame = (_LENGTH.pack(len(message)) + fitting).ljust(self._capacity, b"\0")
        sent = torch.frombuffer(bytearray(frame), dtype=torch.uint8).repeat(self._world_size)
        received = bytearray(len(sent))
        frames = [
            memoryview(received)[start : start + self._capacity]
            for start in range(0, len(received), self._capacity)
        ]
        work = start_all_to_all(
            torch.frombuffer(received, dtype=torch.uint8), sent, self._group, doing=doing
        )
        return work, frames

    def _check(self, lengths: list[int], doing: str) -> None:
        for rank, length in enumerate(lengths):
            if not 0 < length <= _MAX_MESSAGE_BYTES:
                raise ProtocolError(
                    f"rank {rank} announced a message of {length} bytes in {doing}; 1 to "
                    f"{_MAX_MESSAGE_BYTES} are allowed, so it runs another program or another "
                    "version"
                )


def _length(frame: memoryview) -> int:
    length: int
    (length,) = _LENGTH.unpack_from(frame)
    return length
