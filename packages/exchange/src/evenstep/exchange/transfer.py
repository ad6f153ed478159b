"""The samples of one agreed plan on their way: packed, launched, and handed out."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

import torch

from evenstep.exchange.errors import ExchangeError
from evenstep.exchange.garbage import collection_paused
from evenstep.exchange.handover import Handover
from evenstep.exchange.moves import DIGEST_BYTES, Moves, Placement
from evenstep.exchange.node import Node
from evenstep.exchange.offer import Agreement
from evenstep.exchange.payload import Payload
from evenstep.exchange.payload_group import PayloadGroup
from evenstep.exchange.waiting import Patience
from evenstep.serialize import (
    VALUES_KEY,
    Leaf,
    Manifest,
    PackedSample,
    PackedSamples,
    SampleLayout,
    unfold_values,
)

_SLOT_AND_POSITION = itemgetter(0, 1)


class Arrival(NamedTuple):
    """A sample that belongs on this rank.

    Attributes:
        dst_slot: The micro-batch of the window.
        canonical_pos: Its place in the micro-batch over all ranks.
        sample: The sample, a dict unless it is borrowed. If it came from another rank, its tensors
            are views of one receive buffer, which lives as long as any of them.
    """

    dst_slot: int
    canonical_pos: int
    sample: Mapping[str, Leaf]


class Transfer:
    """Samples that are packed and agreed upon; made by `SampleExchange.prepare`.

    Args:
        agreement: What all ranks know.
        moves: What this rank keeps, sends and receives.
        group: What carries the bytes between nodes.
        node: What carries them within one.
        patience: How long to wait for peers.
        rank: This rank in the group.
        device: Where arrived samples shall be if this rank brought none that tell.

    Attributes:
        moves: As given.
        commitment: The message to commit with: the digest of the plan, and what the peers of this
            node need to `take` their samples.
    """

    def __init__(
        self,
        agreement: Agreement,
        moves: Moves,
        group: PayloadGroup,
        node: Node,
        patience: Patience,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self.moves = moves
        self._agreement = agreement
        self._patience = patience
        self._rank = rank
        sources = [source for source, places in enumerate(moves.receives) if places]
        # As their bytes lie: all that come over the network in one buffer, then rank by rank.
        self._sources = sorted(sources, key=lambda source: moves.shared[source])
        self._incoming = [
            (source, place) for source in self._sources for place in moves.receives[source]
        ]
        self._incoming_layouts = [
            agreement.reports[source].layout(place.local_idx) for source, place in self._incoming
        ]
        device = _device_of(agreement.samples, default=device)
        self._payload = Payload(group, *self._outgoing(shared=False), moves, device=device)
        self._handover = Handover(node, *self._outgoing(shared=True), moves, device=device)
        self.commitment = moves.digest + self._handover.message

    def _outgoing(
        self, *, shared: bool
    ) -> tuple[list[Mapping[str, torch.Tensor | None]], list[SampleLayout]]:
        """Return the samples that leave this rank one way, by destination, and their layouts."""
        chosen = [
            place.local_idx
            for to, places in enumerate(self.moves.sends)
            if places and self.moves.shared[to] == shared
            for place in places
        ]
        agreement = self._agreement
        return [agreement.samples[i] for i in chosen], [agreement.layouts[i] for i in chosen]

    def arriving(self) -> tuple[list[tuple[int, Placement]], list[SampleLayout]]:
        """Return holder, placement and layout of all samples that will be on this rank."""
        kept = [(self._rank, place) for place in self.moves.kept]
        layouts = [self._agreement.layouts[place.local_idx] for place in self.moves.kept]
        return kept + self._incoming, layouts + self._incoming_layouts

    def take(self, commitments: Sequence[memoryview]) -> None:
        """Open what the peers of this node have packed, once all ranks have committed.

        Args:
            commitments: Those of all ranks.

        Raises:
            ExchangeError: If a peer is lost.
        """
        self._handover.take([commitment[DIGEST_BYTES:] for commitment in commitments])

    def launch(self) -> None:
        """Start moving the samples; every rank's launches follow the same order."""
        self._payload.launch()

    def wait(self, *, borrow: bool = False) -> list[Arrival]:
        """Wait for the samples and return all that belong here, by slot and canonical position.

        On CUDA this makes the current stream wait, not the calling thread. Call it once.

        Args:
            borrow: Hand out samples that make views when asked for them, of other ranks' memory
                where they share it with this one. They are void once `release` is called, and a
                sender needs more memory until then.

        Raises:
            ExchangeError: If peers are lost or late.
        """
        received = self._payload.wait(self._patience)
        self._handover.wait(self._patience)
        kept = [self._agreement.offer.samples[place.local_idx] for place in self.moves.kept]
        with collection_paused():
            samples = [*kept, *map(_as_it_was, self._unpacked(received, borrow=borrow))]
            if not borrow:
                samples = [s if isinstance(s, dict) else {**s} for s in samples]
                self.release()
            places = chain(self.moves.kept, [place for _, place in self._incoming])
            arrivals = [
                Arrival(place.dst_slot, place.canonical_pos, sample)
                for place, sample in zip(places, samples, strict=True)
            ]
        return sorted(arrivals, key=_SLOT_AND_POSITION)

    def settle(self) -> None:
        """Wait until the peers have this rank's samples, or cannot get them; give up its own."""
        self.release()
        with contextlib.suppress(ExchangeError):
            self._payload.settle(self._patience)
        with contextlib.suppress(ExchangeError):
            self._handover.wait(self._patience)

    def release(self) -> None:
        """Give borrowed memory back; the receive buffer comes back once no tensor is on it."""
        self._handover.release()

    def _unpacked(self, received: torch.Tensor, *, borrow: bool) -> Iterator[PackedSample]:
        """Yield the samples that came, in the order of `_incoming`."""
        layouts = iter(self._incoming_layouts)
        remote, near = 0, []
        for source in self._sources:
            count = len(self.moves.receives[source])
            if self.moves.shared[source]:
                near.append((source, count))
            else:
                remote += count
        yield from _samples(received, islice(layouts, remote))
        for source, count in near:
            content = self._handover.bytes_from(source, borrow=borrow)
            yield from _samples(content, islice(layouts, count))


def _samples(content: torch.Tensor, layouts: Iterable[SampleLayout]) -> PackedSamples:
    return PackedSamples(Manifest(tuple(layouts)), content)


def _as_it_was(sample: PackedSample) -> Mapping[str, Leaf]:
    """Unfold the plain values, from bytes of their own: they shall not hold the whole buffer."""
    if VALUES_KEY not in sample.layout.schema.places:
        return sample
    values = sample[VALUES_KEY]
    return unfold_values({**sample, VALUES_KEY: None if values is None else values.clone()})


def _device_of(
    samples: Sequence[Mapping[str, torch.Tensor | None]], *, default: torch.device
) -> torch.device:
    """Return where the samples' tensors are; `pack_samples` checks that it is one place."""
    tensors = (value for sample in samples for value in sample.values() if value is not None)
    return next((tensor.device for tensor in tensors), default)
