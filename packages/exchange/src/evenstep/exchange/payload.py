"""One window's bytes of this rank: packed once, moved once."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from evenstep.exchange.buffers import CPU
from evenstep.exchange.moves import Moves
from evenstep.exchange.payload_group import PayloadGroup
from evenstep.exchange.waiting import Patience
from evenstep.serialize import SampleLayout, TensorSample, pack_samples


class Payload:
    """The samples that leave this rank, as bytes, and room for those that come.

    If samples and group live on different devices, the whole buffer is copied over at once.

    Args:
        group: What carries the bytes.
        samples: The samples to send, by destination.
        layouts: Their layouts.
        moves: Whose splits apply.
        device: Where the samples are, and where those that arrive shall be.
    """

    def __init__(
        self,
        group: PayloadGroup,
        samples: Sequence[TensorSample],
        layouts: Sequence[SampleLayout],
        moves: Moves,
        *,
        device: torch.device,
    ) -> None:
        self._group, self._moves, self._device = group, moves, device
        self._samples = samples  # a side stream may still read them when the caller drops them
        self._works: list[dist.Work] = []
        with group.scope():
            out = self._empty(sum(moves.send_splits), CPU) if device == CPU else None
            packed = pack_samples(samples, layouts=layouts, out=out)
            self._sent = self._on(packed, group.device)
            self._received = self._empty(sum(moves.recv_splits), group.device)

    def launch(self) -> None:
        """Start the collective; every rank's launches follow the same order."""
        with self._group.on_stream():  # behind the packing, but beside what is being computed
            self._works = self._group.start(self._sent, self._received, self._moves)

    def wait(self, patience: Patience) -> torch.Tensor:
        """Return the received bytes, uint8 [sum of recv_splits], on the samples' device.

        On CUDA, the current stream waits for them, not the calling thread.
        """
        self._group.finish(self._works, patience)
        self._samples = ()
        self._sent = self._dropped(self._sent)
        # A copy to the host shall wait for the samples alone, not for what is being computed.
        to_host = self._group.on_stream() if self._device == CPU else nullcontext()
        with to_host:
            self._received = self._on(self._received, self._device)
        if self._received.is_cuda:
            self._received.record_stream(torch.cuda.current_stream())
        return self._received

    def settle(self, patience: Patience) -> None:
        """Wait for the collective, without a look at what it brings."""
        self._group.finish(self._works, patience)

    def release(self) -> None:
        """Give the received bytes' buffer back for later windows."""
        self._received = self._dropped(self._received)

    def _empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if device == CPU:
            return self._group.buffers.take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _on(self, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the bytes of `buffer` on `device`; the copy blocks, so `buffer` is free then."""
        if buffer.device == device:
            return buffer
        copy = self._empty(buffer.numel(), device).copy_(buffer)
        self._dropped(buffer)
        return copy

    def _dropped(self, buffer: torch.Tensor) -> torch.Tensor:
        """Give `buffer` back if it came from the pool, and return nothing in its place."""
        if buffer.is_cpu and buffer._is_view():  # noqa: SLF001 - the pool hands out views only
            self._group.buffers.give_back(buffer)
        return torch.empty(0, dtype=torch.uint8)
