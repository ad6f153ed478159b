"""A small message from every rank to every rank: bytes of any length, no pickle."""

import struct
from collections import deque
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from evenstep.exchange.errors import ProtocolError
from evenstep.exchange.waiting import Patience, start_all_to_all

_LENGTH = struct.Struct("<q")
_CAPACITY = 1 << 12  # bytes of the first frames; a header and some fifty samples

MAX_MESSAGE_BYTES = 1 << 27
"""The metadata of some two million samples of one rank."""


class MessageChannel(Protocol):
    """All-gathers one message per rank; see `Channel`."""

    def gather(
        self, message: bytes, group: dist.ProcessGroup, patience: Patience, *, doing: str
    ) -> list[memoryview]:
        """Send `message` to every rank and return the messages of all, in rank order."""
        ...


class Channel:
    """All-gathers one message per rank over a Gloo group.

    The frame all ranks send is equally long and grows when a message does not fit, so that in the
    steady state one collective carries a round. It is an all-to-all of copies rather than an
    all-gather, which Gloo runs as a ring: here every rank talks to every other directly, in one
    hop, and so learns at once when any of them dies.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._capacity = _CAPACITY
        self._pending: tuple[dist.Work, list[memoryview]] | None = None

    def gather(
        self, message: bytes, group: dist.ProcessGroup, patience: Patience, *, doing: str
    ) -> list[memoryview]:
        """Send `message` to every rank and return the messages of all, in rank order.

        After an interrupt, such as Ctrl-C, the same call again goes on where it was.

        Args:
            message: Bytes of any length.
            group: The group, which takes CPU tensors (Gloo). Only one thread may use it.
            patience: How long to wait for peers.
            doing: What the message is for, for errors.

        Raises:
            ProtocolError: If a message has an impossible length; on every rank alike.
            ExchangeError: As `Patience.wait`.
        """
        while True:
            frames = self._exchange_frames(message, group, patience, doing)
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

    def _exchange_frames(
        self, message: bytes, group: dist.ProcessGroup, patience: Patience, doing: str
    ) -> list[memoryview]:
        if self._pending is None:
            self._pending = self._start(message, group, doing)
        work, frames = self._pending
        patience.wait(
            work,
            group,
            doing=doing,
            # No message is empty, so a length that is still zero has not arrived.
            absent=lambda: [rank for rank, frame in enumerate(frames) if not _length(frame)],
        )
        self._pending = None
        return frames

    def _start(
        self, message: bytes, group: dist.ProcessGroup, doing: str
    ) -> tuple[dist.Work, list[memoryview]]:
        fitting = message[: self._capacity - _LENGTH.size]  # the rest goes in a second attempt
        frame = (_LENGTH.pack(len(message)) + fitting).ljust(self._capacity, b"\0")
        sent = torch.frombuffer(bytearray(frame) * self._world_size, dtype=torch.uint8)
        received = bytearray(len(sent))
        frames = [
            memoryview(received)[start : start + self._capacity]
            for start in range(0, len(received), self._capacity)
        ]
        work = start_all_to_all(
            torch.frombuffer(received, dtype=torch.uint8), sent, group, doing=doing
        )
        return work, frames

    def _check(self, lengths: list[int], doing: str) -> None:
        for rank, length in enumerate(lengths):
            if not 0 < length <= MAX_MESSAGE_BYTES:
                raise ProtocolError(
                    f"rank {rank} announced a message of {length} bytes in {doing}; 1 to "
                    f"{MAX_MESSAGE_BYTES} are allowed, so it runs another program or another "
                    "version"
                )


class Channels:
    """The channels of one group, which take turns, as offers are long and commitments short.

    Gloo matches collectives by their order in a group, and a frame of another length than a peer
    expects ends its process. So the turn follows the group's rounds, and neither their kind nor who
    makes them: a rank that leaves, makes another call than its peers, or opens an exchange of other
    settings on the same group is told from them by what the frames say.
    """

    def __init__(self, world_size: int) -> None:
        self._channels: deque[MessageChannel] = deque([Channel(world_size), Channel(world_size)])

    def replace(self, channel: MessageChannel) -> None:
        """Use another channel from the next round on; all ranks must do so between the same two."""
        self._channels = deque([channel])

    @property
    def current(self) -> MessageChannel:
        """The channel of the present round."""
        return self._channels[0]

    def turn(self) -> None:
        """Begin a round."""
        self._channels.rotate()


# A channel must not hold its group, or neither would ever be freed.
_channels: "WeakKeyDictionary[dist.ProcessGroup, Channels]" = WeakKeyDictionary()


def channels_of(group: dist.ProcessGroup, world_size: int) -> Channels:
    """Return the channels of a group, the same ones for all exchanges over it."""
    channels = _channels.get(group)
    if channels is None:
        channels = _channels[group] = Channels(world_size)
    return channels


def _length(frame: memoryview) -> int:
    length: int
    (length,) = _LENGTH.unpack_from(frame)
    return length
