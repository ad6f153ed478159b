"""The collective that moves a window's bytes, in one piece or in bounded chunks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.distributed as dist

from evenstep.exchange.errors import ExchangeError
from evenstep.exchange.host_memory import CPU
from evenstep.exchange.moves import Moves
from evenstep.exchange.waiting import MOVING, Patience, start_all_to_all

WORD_BYTES = 8  # samples are padded to 8 bytes, so that fewer and wider elements move
DEFAULT_CHUNK_BYTES = (1 << 31) - (1 << 20)  # under 2 GiB, where 32-bit counts would end

Piece: TypeAlias = tuple[slice, Sequence[int], slice, Sequence[int]]
"""Bytes received and their splits by source, bytes sent and their splits by destination."""


class PayloadGroup:
    """The group that carries samples, and the stream on which they are packed and moved.

    Args:
        group: Gloo or NCCL group; None if there is one rank only.
        chunk_bytes: Most bytes that a rank sends or receives in one collective.
        stream: CUDA stream for packing and moving; None for the current one.

    Attributes:
        device: Where the bytes must be: CUDA for NCCL, else the host.
        is_gloo: Whether there is a group that takes host memory.
        stream: As given.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        if chunk_bytes < WORD_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be at least {WORD_BYTES}")
        on_gpu = group is not None and dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else CPU
        self.is_gloo = group is not None and not on_gpu
        self._group = group
        self._broken: BaseException | None = None
        self._chunk_bytes = chunk_bytes - chunk_bytes % WORD_BYTES
        self.stream = stream

    def check_usable(self) -> None:
        """Raise what ended an earlier wait: its collective still stands, and later ones fail."""
        if self._broken is not None:
            raise ExchangeError("an earlier transfer did not complete") from self._broken

    def scope(self) -> AbstractContextManager[object]:
        """Enter the stream for packing and moving, behind the work of the current one."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        return self.on_stream()

    def on_stream(self) -> AbstractContextManager[object]:
        """Enter the stream for packing and moving, in the order of its own work alone."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def start(self, sent: torch.Tensor, received: torch.Tensor, moves: Moves) -> list[dist.Work]:
        """Start moving `sent`, the samples by destination, into `received`, those by source.

        Every rank must call this, in the same order among the collectives of the group.

        Args:
            sent: uint8 on `device`, as many as this rank sends over the network.
            received: uint8 on `device`, as many as it receives over the network.
            moves: Whose splits and order apply.

        Returns:
            The collectives under way; none if no rank has anything to send.
        """
        if self._group is None or moves.peak_total == 0:
            return []
        pieces: Iterable[Piece]
        if moves.peak_total <= self._chunk_bytes:
            recv_splits = moves.over_network(moves.recv_splits)
            send_splits = moves.over_network(moves.send_splits)
            pieces = [(slice(None), recv_splits, slice(None), send_splits)]
        else:
            pieces = chunks(moves, dist.get_rank(self._group), self._chunk_bytes)
        return [
            start_all_to_all(
                received[into].view(torch.int64),
                sent[out_of].view(torch.int64),
                self._group,
                recv_splits=[nbytes // WORD_BYTES for nbytes in recv_splits],
                send_splits=[nbytes // WORD_BYTES for nbytes in send_splits],
                doing=MOVING,
            )
            for into, recv_splits, out_of, send_splits in pieces
        ]

    def finish(self, works: Sequence[dist.Work], patience: Patience) -> None:
        """Wait for what `start` began.

        On CUDA, make the current stream wait; and the stream for packing too, so that it may use
        the memory of the buffers again.
        """
        try:
            for work in works:
                self._wait(work, patience)
        except BaseException as error:
            self._broken = error
            raise

    def _wait(self, work: dist.Work, patience: Patience) -> None:
        if self.device == CPU:
            assert self._group is not None
            patience.wait(work, self._group, doing=MOVING)
            return
        work.wait()
        with self.on_stream():
            work.wait()


def chunks(moves: Moves, rank: int, chunk_bytes: int) -> Iterator[Piece]:
    """Yield collectives in which `rank` sends to one rank and receives from one.

    In those for distance d, every rank r sends to r + d alone, so that each side is one slice of
    its buffer and nothing is copied to regroup bytes. All ranks run equally many of them, as the
    plan's largest split at that distance demands.

    Args:
        moves: Those of `rank`.
        rank: This rank in the group.
        chunk_bytes: Most bytes in one direction of one collective, a multiple of 8.
    """
    world_size = len(moves.send_splits)
    recv_starts = [0, *accumulate(moves.over_network(moves.recv_splits))]
    send_starts = [0, *accumulate(moves.over_network(moves.send_splits))]
    for shift, peak in enumerate(moves.shift_peaks):
        to, source = (rank + shift) % world_size, (rank - shift) % world_size
        for start in range(0, peak, chunk_bytes):
            yield (
                *_slice(recv_starts, source, start, chunk_bytes),
                *_slice(send_starts, to, start, chunk_bytes),
            )


def _slice(starts: list[int], peer: int, start: int, limit: int) -> tuple[slice, list[int]]:
    """Return up to `limit` bytes of `peer`'s split from `start` on, and the splits they make."""
    first = min(starts[peer] + start, starts[peer + 1])
    last = min(first + limit, starts[peer + 1])
    splits = [0] * (len(starts) - 1)
    splits[peer] = last - first
    return slice(first, last), splits
