"""One window's samples from the ranks that read them to the ranks that compute them.

`agree` (what is there?) -> plan (pure, the caller's) -> `prepare` (pack, commit) ->
`Transfer.launch` (move) -> `Transfer.wait` (views of what arrived).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from evenstep.balance import Route, RouteColumns
from evenstep.exchange.errors import ExchangeStoppedError, MismatchError
from evenstep.exchange.garbage import collection_paused
from evenstep.exchange.moves import DIGEST_BYTES, Placement, plan_moves
from evenstep.exchange.node import Node, node_of
from evenstep.exchange.offer import Agreement, Offer
from evenstep.exchange.offer_wire import SchemaAnnouncer, SchemaTable
from evenstep.exchange.payload_group import DEFAULT_CHUNK_BYTES, PayloadGroup
from evenstep.exchange.rounds import Kind, Rounds, Setting
from evenstep.exchange.schemas import check_same_schema
from evenstep.exchange.transfer import Transfer
from evenstep.exchange.waiting import Patience
from evenstep.serialize import SampleLayout, fold_values, sample_layout

Plan: TypeAlias = Callable[[Agreement], Iterable[tuple[int, Route]] | RouteColumns]
"""From what all ranks know, the same deliveries on every rank: (global index, route).

Or the routes of all samples, each delivered once, as columns.
"""

Check: TypeAlias = Callable[[Sequence[tuple[int, Placement]], Sequence[SampleLayout]], None]
"""Raises unless the samples that will be on this rank fit together.

It gets the holder and placement of each, those that stay and those that come, and their layouts.
"""

_Offered: TypeAlias = tuple[
    Offer, Sequence[Mapping[str, torch.Tensor | None]], Sequence[SampleLayout]
]


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
        device: Where arrived samples shall be in a window to which this rank brings none; else
            they are where its own are. None: where `payload_group` needs the bytes.
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
        device: torch.device | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.patience = patience or Patience()
        self.payload = PayloadGroup(payload_group, chunk_bytes=chunk_bytes, stream=stream)
        self._device = device or self.payload.device
        self._rounds = Rounds(
            control_group,
            world_size=world_size,
            settings=settings or {},
            patience=self.patience,
        )
        self._same_schema = same_schema
        self._node = Node.alone(rank, world_size)
        self._control_group = control_group
        self._announcer = SchemaAnnouncer()
        self._tables = [SchemaTable() for _ in range(world_size)]

    def compare_settings(self) -> None:
        """Raise `MismatchError` on every rank if settings differ; every rank must call this."""
        self._rounds.compare_settings()

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

        def report() -> tuple[_Offered, bytes]:
            offer = make_offer()
            with collection_paused():
                samples = [fold_values(sample) for sample in offer.samples]
                layouts = [sample_layout(sample) for sample in samples]
                return (offer, samples, layouts), self._announcer.encode(offer, layouts)

        (offer, samples, layouts), messages = self._rounds.gather(Kind.OFFER, report)
        self._announcer.mark_announced()
        # A table that is half extended is of no more use.
        with self._rounds.breaking(), collection_paused():
            reports = tuple(
                table.decode(message, rank)
                for rank, (table, message) in enumerate(zip(self._tables, messages, strict=True))
            )
        if self._same_schema:
            check_same_schema([report.schemas for report in reports])
        return Agreement(reports=reports, offer=offer, samples=samples, layouts=layouts)

    def prepare(self, agreement: Agreement, plan: Plan, *, check: Check | None = None) -> Transfer:
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
        if self.payload.is_gloo and self._control_group is not None:
            self._node = node_of(self._control_group, self.rank, self._rounds)

        @collection_paused()
        def commit() -> tuple[Transfer, bytes]:
            moves = plan_moves(
                plan(agreement),
                holders=agreement.holders,
                nbytes=agreement.nbytes,
                rank=self.rank,
                world_size=self.world_size,
                hosts=self._node.hosts,
            )
            transfer = Transfer(
                agreement,
                moves,
                self.payload,
                self._node,
                self.patience,
                rank=self.rank,
                device=self._device,
            )
            if check is not None:
                check(*transfer.arriving())
            return transfer, transfer.commitment

        transfer, commitments = self._rounds.gather(Kind.COMMIT, commit)
        for rank, commitment in enumerate(commitments):
            if commitment[:DIGEST_BYTES] != commitments[0][:DIGEST_BYTES]:
                raise MismatchError(
                    f"rank {rank} came to another plan than rank 0 for the same costs; a balancer "
                    "must depend on the costs alone, and all ranks need one version of it"
                )
        with self._rounds.breaking():
            transfer.take(commitments)
        return transfer

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers that this rank takes no further part; their next round raises.

        Returns when they have heard it, know that a rank failed already, or cannot hear any more.

        Args:
            cause: What they are told; by default, that this rank has left.
        """
        self._rounds.fail(cause or ExchangeStoppedError("this rank has left the exchange"))
