"""One window's samples from the ranks that read them to the ranks that compute them.

`agree` (what is there?) -> plan (pure, the caller's) -> `prepare` (pack, commit) ->
`Transfer.launch` (move) -> `Transfer.wait` (views of what arrived).
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from evenstep.balance import Route
from evenstep.exchange.errors import ExchangeError, ExchangeStoppedError, MismatchError
from evenstep.exchange.moves import Moves, Placement, plan_moves
from evenstep.exchange.offer import Agreement, Offer
from evenstep.exchange.offer_wire import SchemaAnnouncer, SchemaTable
from evenstep.exchange.payload import Payload
from evenstep.exchange.payload_group import DEFAULT_CHUNK_BYTES, PayloadGroup
from evenstep.exchange.rounds import Kind, Rounds, Setting
from evenstep.exchange.schemas import check_same_schema
from evenstep.exchange.waiting import Patience
from evenstep.serialize import (
    VALUES_KEY,
    FlatSample,
    SampleLayout,
    TensorSample,
    fold_values,
    sample_layout,
    unfold_values,
    unpack_sample,
)

T = TypeVar("T")

Plan: TypeAlias = Callable[[Agreement], Iterable[tuple[int, Route]]]
"""From what all ranks know, the same deliveries on every rank: (global index, route)."""

Check: TypeAlias = Callable[[Sequence[tuple[int, Placement]], Sequence[SampleLayout]], None]
"""Raises unless the samples that will be on this rank fit together.

It gets the holder and placement of each, those that stay and those that come, and their layouts.
"""


class Arrival(NamedTuple):
    """A sample that belongs on this rank.

    Attributes:
        dst_slot: The micro-batch of the window.
        canonical_pos: Its place in the micro-batch over all ranks.
        sample: The sample. If it came from another rank, its tensors are views of the receive
            buffer; they are valid until `Transfer.release`.
    """

    dst_slot: int
    canonical_pos: int
    sample: FlatSample


class SampleExchange:
    """Moves whole samples between the ranks of one group, window by window.

    Every rank of the group makes the same calls in the same order. What goes wrong on one rank
    raises on all of them in the same round.

    Args:
        rank: This rank in the group.
        world_size: Number of ranks in the group.
        control_group: Gloo group for the metadata; None if `world_size` is 1.
        payload_group: Group for the samples, NCCL or Gloo; None if `world_size` is 1. If another
            thread launches than the one that agrees, it must be another group than
            `control_group`.
        settings: What must be set alike on all ranks, for example the balancer and the number of
            groups. `compare_settings` compares it, and every round its fingerprint.
        same_schema: Whether all samples must have the same keys, dtypes and numbers of dimensions.
        patience: How long to wait for peers.
        chunk_bytes: Most bytes that a rank sends or receives in one collective.
        stream: CUDA stream for packing and moving; None for the current one.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        control_group: dist.ProcessGroup | None,
        payload_group: dist.ProcessGroup | None,
        settings: Mapping[str, Setting] | None = None,
        same_schema: bool = True,
        patience: Patience | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.patience = patience or Patience()
        self.payload = PayloadGroup(payload_group, chunk_bytes=chunk_bytes, stream=stream)
        self._rounds = Rounds(
            control_group,
            rank=rank,
            world_size=world_size,
            settings=settings or {},
            patience=self.patience,
        )
        self._same_schema = same_schema
        self._announcer = SchemaAnnouncer()
        self._tables = [SchemaTable() for _ in range(world_size)]

    def compare_settings(self) -> None:
        """Raise `MismatchError` on every rank if settings differ; every rank must call this."""
        self.begin(lambda: None)

    def begin(self, source: Callable[[], T]) -> T:
        """Open what this rank reads from, and compare the settings; every rank must call this.

        Args:
            source: Called once. What it raises here reaches the peers as text.

        Returns:
            What `source` returned.

        Raises:
            BaseException: What `source` raised here.
            PeerFailedError: What it raised on another rank.
            MismatchError: If settings differ.
        """
        return self._rounds.compare_settings(source)

    def agree(self, make_offer: Callable[[], Offer]) -> Agreement:
        """Tell all ranks what this rank brings, and learn what they bring.

        Args:
            make_offer: Reads this rank's samples and computes their costs. It is called once, and
                what it raises reaches the peers as text.

        Raises:
            BaseException: What `make_offer` raised here.
            PeerFailedError: What it raised on another rank.
            MismatchError: If schemas or settings differ.
            ExchangeError: If peers are lost or late.
        """

        def report() -> tuple[tuple[Offer, list[TensorSample], list[SampleLayout]], bytes]:
            offer = make_offer()
            samples = [fold_values(sample) for sample in offer.samples]
            layouts = [sample_layout(sample) for sample in samples]
            return (offer, samples, layouts), self._announcer.encode(offer, layouts)

        (offer, samples, layouts), messages = self._rounds.gather(Kind.OFFER, report)
        self._announcer.mark_announced()
        decoded = [
            table.decode(message, rank)
            for rank, (table, message) in enumerate(zip(self._tables, messages, strict=True))
        ]
        if self._same_schema:
            check_same_schema([schemas for _, schemas in decoded])
        return Agreement(
            reports=tuple(report for report, _ in decoded),
            offer=offer,
            samples=samples,
            layouts=layouts,
        )

    def prepare(
        self, agreement: Agreement, plan: Plan, *, check: Check | None = None
    ) -> "Transfer":
        """Plan, pack, and commit to the plan together with all ranks.

        Args:
            agreement: The latest result of `agree`.
            plan: Called once. All ranks must come to the same deliveries; that is checked.
            check: Called once with what will be on this rank, before anything moves.

        Raises:
            BaseException: What went wrong while planning, checking or packing here.
            PeerFailedError: What went wrong on another rank.
            MismatchError: If ranks came to different plans.
            ExchangeError: If peers are lost or late.
        """

        def commit() -> tuple[Transfer, bytes]:
            moves = plan_moves(
                plan(agreement),
                holders=agreement.holders,
                nbytes=agreement.nbytes,
                rank=self.rank,
                world_size=self.world_size,
            )
            transfer = Transfer(self, agreement, moves)
            if check is not None:
                check(*transfer.arriving(agreement))
            return transfer, moves.digest

        transfer, digests = self._rounds.gather(Kind.COMMIT, commit)
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise MismatchError(
                    f"rank {rank} came to another plan than rank 0 for the same costs; a balancer "
                    "must depend on the costs alone, and all ranks need one version of it"
                )
        return transfer

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers that this rank takes no further part; their next round raises.

        Returns when they have heard it, know that a rank failed already, or cannot hear any more.

        Args:
            cause: What they are told; by default, that this rank has left.
        """
        self._rounds.fail(cause or ExchangeStoppedError("this rank has left the exchange"))


class Transfer:
    """Samples that are packed and agreed upon; made by `SampleExchange.prepare`.

    Attributes:
        moves: What this rank keeps, sends and receives.
    """

    def __init__(self, exchange: SampleExchange, agreement: Agreement, moves: Moves) -> None:
        self.moves = moves
        self._kept = [(place, agreement.offer.samples[place.local_idx]) for place in moves.kept]
        self._rank = exchange.rank
        self._incoming = [
            (peer, place, agreement.reports[peer].layout(place.local_idx))
            for peer, places in enumerate(moves.receives)
            for place in places
        ]
        outgoing = [place.local_idx for places in moves.sends for place in places]
        self._payload = Payload(
            exchange.payload,
            [agreement.samples[local] for local in outgoing],
            [agreement.layouts[local] for local in outgoing],
            moves,
            device=_device_of(agreement.samples, default=exchange.payload.device),
        )
        self._patience = exchange.patience

    def arriving(
        self, agreement: Agreement
    ) -> tuple[list[tuple[int, Placement]], list[SampleLayout]]:
        """Return holder, placement and layout of all samples that will be on this rank."""
        rank, moves = self._rank, self.moves
        kept = [((rank, place), agreement.layouts[place.local_idx]) for place in moves.kept]
        incoming = [((peer, place), layout) for peer, place, layout in self._incoming]
        return [what for what, _ in kept + incoming], [layout for _, layout in kept + incoming]

    def launch(self) -> None:
        """Start moving the samples; every rank's launches follow the same order."""
        self._payload.launch()

    def wait(self) -> list[Arrival]:
        """Wait for the samples and return all that belong here, by slot and canonical position.

        On CUDA this makes the current stream wait, not the calling thread.

        Raises:
            ExchangeError: If peers are lost or late.
        """
        received = self._payload.wait(self._patience)
        arrivals = [Arrival(*place[:2], sample) for place, sample in self._kept]
        offset = 0
        for _, place, layout in self._incoming:
            sample = unpack_sample(received, layout, offset)
            arrivals.append(Arrival(*place[:2], _with_values(sample)))
            offset += layout.nbytes
        return sorted(arrivals, key=lambda arrival: arrival[:2])

    def settle(self) -> None:
        """Wait until the peers have this rank's samples, or cannot get them any more."""
        with contextlib.suppress(ExchangeError):
            self._payload.settle(self._patience)

    def release(self) -> None:
        """Give the receive buffer back for later windows; no arrived tensor may be used after."""
        self._payload.release()


def _with_values(sample: TensorSample) -> FlatSample:
    """Unfold the plain values, from bytes of their own: they outlive the receive buffer."""
    values = sample.get(VALUES_KEY)
    if values is not None:
        sample[VALUES_KEY] = values.clone()
    return unfold_values(sample)


def _device_of(samples: Sequence[TensorSample], *, default: torch.device) -> torch.device:
    """Return where the samples' tensors are; `pack_samples` checks that it is one place."""
    tensors = (value for sample in samples for value in sample.values() if value is not None)
    return next((tensor.device for tensor in tensors), default)
