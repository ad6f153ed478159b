"""The samples of one agreed plan on their way: packed, launched, and handed out."""

import contextlib
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from evenstep.exchange.errors import ExchangeError
from evenstep.exchange.moves import Moves, Placement
from evenstep.exchange.offer import Agreement
from evenstep.exchange.payload import Payload
from evenstep.exchange.payload_group import PayloadGroup
from evenstep.exchange.waiting import Patience
from evenstep.serialize import (
    VALUES_KEY,
    FlatSample,
    SampleLayout,
    TensorSample,
    unfold_values,
    unpack_samples,
)


class Arrival(NamedTuple):
    """A sample that belongs on this rank.

    Attributes:
        dst_slot: The micro-batch of the window.
        canonical_pos: Its place in the micro-batch over all ranks.
        sample: The sample. If it came from another rank, its tensors are views of one receive
            buffer, which lives as long as any of them.
    """

    dst_slot: int
    canonical_pos: int
    sample: FlatSample


class Transfer:
    """Samples that are packed and agreed upon; made by `SampleExchange.prepare`.

    Args:
        agreement: What all ranks know.
        moves: What this rank keeps, sends and receives.
        group: What carries the bytes.
        patience: How long to wait for peers.
        rank: This rank in the group.
        device: Where arrived samples shall be if this rank brought none that tell.

    Attributes:
        moves: As given.
    """

    def __init__(
        self,
        agreement: Agreement,
        moves: Moves,
        group: PayloadGroup,
        patience: Patience,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self.moves = moves
        self._agreement = agreement
        self._patience = patience
        self._incoming = [
            (source, place) for source, places in enumerate(moves.receives) for place in places
        ]
        self._incoming_layouts = [
            agreement.reports[source].layout(place.local_idx) for source, place in self._incoming
        ]
        self._rank = rank
        outgoing = [place.local_idx for place in chain.from_iterable(moves.sends)]
        self._payload = Payload(
            group,
            [agreement.samples[local] for local in outgoing],
            [agreement.layouts[local] for local in outgoing],
            moves,
            device=_device_of(agreement.samples, default=device),
        )

    def arriving(self) -> tuple[list[tuple[int, Placement]], list[SampleLayout]]:
        """Return holder, placement and layout of all samples that will be on this rank."""
        kept = [(self._rank, place) for place in self.moves.kept]
        layouts = [self._agreement.layouts[place.local_idx] for place in self.moves.kept]
        return kept + self._incoming, layouts + self._incoming_layouts

    def launch(self) -> None:
        """Start moving the samples; every rank's launches follow the same order."""
        self._payload.launch()

    def wait(self) -> list[Arrival]:
        """Wait for the samples and return all that belong here, by slot and canonical position.

        On CUDA this makes the current stream wait, not the calling thread. Call it once.

        Raises:
            ExchangeError: If peers are lost or late.
        """
        received = self._payload.wait(self._patience)
        kept = [self._agreement.offer.samples[place.local_idx] for place in self.moves.kept]
        came = map(_with_values, unpack_samples(received, self._incoming_layouts))
        places = chain(self.moves.kept, [place for _, place in self._incoming])
        arrivals = [
            Arrival(place.dst_slot, place.canonical_pos, sample)
            for place, sample in zip(places, chain(kept, came), strict=True)
        ]
        return sorted(arrivals, key=_slot_and_position)

    def settle(self) -> None:
        """Wait until the peers have this rank's samples, or cannot get them any more."""
        with contextlib.suppress(ExchangeError):
            self._payload.settle(self._patience)

    def release(self) -> None:
        """Do nothing: the receive buffer is free for later windows once no tensor is on it."""


def _slot_and_position(arrival: Arrival) -> tuple[int, int]:
    return arrival.dst_slot, arrival.canonical_pos


def _with_values(sample: TensorSample) -> FlatSample:
    """Unfold the plain values, from bytes of their own: they shall not hold the whole buffer."""
    values = sample.get(VALUES_KEY)
    if values is not None:
        sample[VALUES_KEY] = values.clone()
    return unfold_values(sample)


def _device_of(samples: Sequence[TensorSample], *, default: torch.device) -> torch.device:
    """Return where the samples' tensors are; `pack_samples` checks that it is one place."""
    tensors = (value for sample in samples for value in sample.values() if value is not None)
    return next((tensor.device for tensor in tensors), default)
