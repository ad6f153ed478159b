"""One window's bytes of this rank over the network: packed once, moved once."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from evenstep.exchange.host_memory import CPU, HOST_MEMORY
from evenstep.exchange.moves import Moves
from evenstep.exchange.payload_group import PayloadGroup
from evenstep.exchange.waiting import Patience
from evenstep.serialize import SampleLayout, pack_samples


class Payload:
    """The samples that leave this rank over the network, as bytes, and room for those that come.

    If samples and group live on different devices, the whole buffer is copied over at once,
    through page-locked memory.

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
        samples: Sequence[Mapping[str, torch.Tensor | None]],
        layouts: Sequence[SampleLayout],
        moves: Moves,
        *,
        device: torch.device,
    ) -> None:
        self._group, self._moves, self._device = group, moves, device
        self._pinned = device != group.device
        self._samples = samples  # a side stream may still read them when the caller drops them
        self._works: list[dist.Work] = []
        self._sent = self._received = torch.empty(0, dtype=torch.uint8, device=device)
        group.check_usable()
        if not moves.peak_total:  # nothing for any rank
            return
        with group.scope():
            out = self._empty(sum(moves.over_network(moves.send_splits)), device)
            self._sent = self._on(pack_samples(samples, layouts=layouts, out=out), group.device)
            self._received = self._empty(sum(moves.over_network(moves.recv_splits)), group.device)

    def launch(self) -> None:
        """Start the collective; every rank's launches follow the same order."""
        with self._group.on_stream():  # behind the packing, but beside what is being computed
            self._works = self._group.start(self._sent, self._received, self._moves)

    def wait(self, patience: Patience) -> torch.Tensor:
        """Return the received bytes, uint8, by source, on the samples' device.

        On CUDA, the current stream waits for them, not the calling thread. Call it once.
        """
        if not self._works:
            return self._received
        self._group.finish(self._works, patience)
        with self._group.on_stream():  # a copy waits for the samples, not for what is computed
            received = self._on(self._received, self._device)
        if received.is_cuda:
            # It may come from the other stream's memory, and the current one is about to use it.
            received.record_stream(torch.cuda.current_stream())
        self._samples, self._works = (), []
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)
        return received

    def settle(self, patience: Patience) -> None:
        """Wait for the collective, without a look at what it brings."""
        self._group.finish(self._works, patience)

    def _empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if device == CPU and not self._pinned:
            return HOST_MEMORY.empty([nbytes], torch.uint8)
        # Where it is page-locked or on the device, torch's allocator keeps it for reuse, and knows
        # which copies and streams still use it.
        pin = self._pinned and device == CPU
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)

    def _on(self, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the bytes of `buffer` on `device`; the thread waits for a copy."""
        if buffer.device == device:
            return buffer
        return self._empty(buffer.numel(), device).copy_(buffer)
