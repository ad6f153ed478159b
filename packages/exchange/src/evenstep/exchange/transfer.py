"""The samples of one agreed plan on their way: packed, launched, and handed out."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import torch

from evenstep.exchange.errors import ExchangeError, ExchangeStoppedError
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
    LaidOutSample,
    Leaf,
    Manifest,
    PackedSamples,
    SampleLayout,
    unfold_values,
)

SETTLE_S = 5.0
"""How long peers of the node may take to come for what they were promised."""

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
        self._layouts = {
            source: [
                agreement.reports[source].layout(place.local_idx)
                for place in moves.receives[source]
            ]
            for source in self._sources
        }
        device = _device_of(agreement.samples, default=device)
        self._payload = Payload(group, *self._outgoing(shared=False), moves, device=device)
        self._handover = Handover(
            node, *self._outgoing(shared=True), moves, arriving=self._layouts, device=device
        )
        self.commitment = moves.digest + self._handover.message

    @property
    def lends(self) -> bool:
        """Whether peers of the node copy this rank's samples from where they lie."""
        return self._handover.lends

    @property
    def packed_nbytes(self) -> int:
        """Bytes of this rank's samples that were copied in order to send them."""
        return self._handover.packed_nbytes + sum(self.moves.over_network(self.moves.send_splits))

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
        come = [
            (source, place) for source in self._sources for place in self.moves.receives[source]
        ]
        return kept + come, [*layouts, *chain.from_iterable(self._layouts.values())]

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

    def wait(self) -> list[Arrival]:
        """Wait for the samples and return all that belong here, by slot and canonical position.

        On CUDA this makes the current stream wait, not the calling thread. Call it once. This
        rank's own samples may be written to afterwards, as its peers of the node are done with
        them.

        Raises:
            ExchangeError: If peers are lost or late.
        """
        with self.borrowed(borrow=False) as arrivals:
            return [arrival._replace(sample={**arrival.sample}) for arrival in arrivals]

    @contextlib.contextmanager
    def borrowed(self, *, borrow: bool = True, part: bool = True) -> Iterator[list[Arrival]]:
        """Do as `wait`, for samples that are copied, or done with, by the end of a `with` block.

        They make tensors when asked for them, of other ranks' memory where they share it with this
        one, and are void after the block.

        Args:
            borrow: False for samples with memory of their own.
            part: Whether to `part` at the end of the block. If not, do so later.

        Raises:
            ExchangeError: If peers are lost or late.
        """
        try:
            arrivals = self._arrivals(borrow=borrow)
            if not borrow:
                self.give_back()
            yield arrivals
        except BaseException as error:
            self.release()
            if part:  # the peers still come for this rank's samples, unless it is in a hurry
                waits = isinstance(error, Exception) and not isinstance(error, ExchangeStoppedError)
                self._handover.settle(grace_s=SETTLE_S if waits else 0.0)
            raise
        self.release()
        if part:
            try:
                self.part()
            finally:
                self._handover.withdraw()

    def part(self) -> None:
        """Wait until the peers of the node need this rank for its samples no more.

        Until then the samples must stay as they are. A peer that has not read them yet may wait
        for other things than this window first. After an error, call it again or `settle`.

        Raises:
            ExchangeError: If peers are lost or late.
        """
        self._handover.wait(self._patience)

    def settle(self, *, grace_s: float = SETTLE_S) -> None:
        """Wait until the peers have this rank's samples, or cannot get them; give up its own.

        Args:
            grace_s: How long at most peers of the node, which may be busy, are waited for. Those
                that come later for what this rank lends them get an error.
        """
        self.release()
        with contextlib.suppress(ExchangeError):
            self._payload.settle(self._patience)
        self._handover.settle(grace_s=grace_s)

    def give_back(self) -> None:
        """Tell the peers that this rank has copied what they lend, which they wait for.

        Borrowed samples of theirs are void then. `release` does it too.
        """
        self._handover.give_back()

    def release(self) -> None:
        """Tell the peers that this rank needs their memory no more."""
        self._handover.release()

    def _arrivals(self, *, borrow: bool) -> list[Arrival]:
        received = self._payload.wait(self._patience)
        kept = [self._agreement.offer.samples[place.local_idx] for place in self.moves.kept]
        with collection_paused():
            samples = [*kept, *map(_as_it_was, self._unpacked(received, borrow=borrow))]
            places = chain(
                self.moves.kept, *[self.moves.receives[source] for source in self._sources]
            )
            arrivals = [
                Arrival(place.dst_slot, place.canonical_pos, sample)
                for place, sample in zip(places, samples, strict=True)
            ]
        return sorted(arrivals, key=_SLOT_AND_POSITION)

    def _unpacked(self, received: torch.Tensor, *, borrow: bool) -> Iterator[LaidOutSample]:
        """Yield the samples that came, source by source."""
        shared = self.moves.shared
        far = [layouts for source, layouts in self._layouts.items() if not shared[source]]
        if far:
            yield from PackedSamples(Manifest(tuple(chain.from_iterable(far))), received)
        for source in self._sources:
            if shared[source]:
                yield from self._handover.samples_from(source, borrow=borrow)


def _as_it_was(sample: LaidOutSample) -> Mapping[str, Leaf]:
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
