"""Samples and offers that tests of several modules use."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from evenstep.balance import Route
from evenstep.exchange import Agreement, Offer, Patience, SampleExchange
from evenstep.exchange.local_links import Links
from evenstep.exchange.node import VARIABLE
from evenstep.exchange.offer_wire import SchemaAnnouncer, SchemaTable
from evenstep.serialize import FlatSample, fold_values, sample_layout


def sample(rank: int, index: int, *, length: int = 3) -> FlatSample:
    """A sample that tells where it comes from, with tensors, None and plain values."""
    return {
        "ids": torch.arange(length, dtype=torch.int64) + 1000 * rank + index,
        "mask": torch.arange(index % 5) % 2 == 0,
        "nothing": None,
        "tags": ["rank", rank, {"index": index}],
        "scalar": torch.tensor(float(index)),
    }


def offer_of(rank: int, slot_counts: Sequence[int], **more: Any) -> Offer:
    """Samples with lengths and costs that vary by rank and place."""
    count = sum(slot_counts)
    return Offer(
        samples=[sample(rank, index, length=1 + (7 * rank + index) % 11) for index in range(count)],
        slot_counts=slot_counts,
        costs=[float(rank + index % 3) for index in range(count)],
        **more,
    )


def agreed(offers: Sequence[Offer]) -> list[Agreement]:
    """What every rank would know after a round, without any group."""
    folded = [[fold_values(flat) for flat in offer.samples] for offer in offers]
    layouts = [[sample_layout(flat) for flat in samples] for samples in folded]
    messages = [
        memoryview(SchemaAnnouncer().encode(offer, of_rank))
        for offer, of_rank in zip(offers, layouts, strict=True)
    ]
    return [
        Agreement(
            reports=tuple(SchemaTable().decode(m, rank) for rank, m in enumerate(messages)),
            offer=offer,
            samples=samples,
            layouts=of_rank,
        )
        for offer, samples, of_rank in zip(offers, folded, layouts, strict=True)
    ]


def round_robin(agreement: Agreement) -> list[tuple[int, Route]]:
    """Deliver sample g to rank g modulo the number of ranks, in its own slot."""
    world_size = len(agreement.reports)
    deliveries = []
    start = 0
    for slot in range(agreement.num_slots):
        count = len(agreement.costs_of_slot(slot))
        for position in range(count):
            index = start + position
            deliveries.append((index, Route(slot, index % world_size, position)))
        start += count
    return deliveries


def gloo_group(ranks: Sequence[int] | None = None, **more: Any) -> dist.ProcessGroup:
    """A new group; every rank of the world must call this."""
    members = None if ranks is None else [*ranks]
    group = dist.new_group(members, backend="gloo", **more)
    return cast("dist.ProcessGroup", group)  # a number on ranks outside


@contextlib.contextmanager
def over_network() -> Iterator[None]:
    """Let this rank's samples move over the network, in groups whose first window is in here."""
    with mock.patch.dict(os.environ, {VARIABLE: "0"}):
        yield


@contextlib.contextmanager
def on_machine(name: bytes) -> Iterator[None]:
    """Let this rank be on a machine of that name, in groups whose first window is in here."""
    with mock.patch("evenstep.exchange.node._machine", return_value=name.ljust(16)):
        yield


_LISTEN = Links.listen


def _nobody_listens(_links: Links) -> None:
    pass


def hold_rounds(*, over_gloo: bool) -> None:
    """Choose where this process holds rounds from now on: over Gloo, as between nodes, or sockets.

    For good, as threads may meet later; whoever cares chooses again.
    """
    Links.listen = _nobody_listens if over_gloo else _LISTEN  # type: ignore[method-assign, assignment]


def exchange_over_world(rank: int, world_size: int, **settings: Any) -> SampleExchange:
    """An exchange on new Gloo groups of all ranks."""
    hold_rounds(over_gloo=False)
    return SampleExchange(
        rank=rank,
        world_size=world_size,
        control_group=gloo_group(),
        payload_group=gloo_group(),
        **{"patience": Patience(timeout_s=20.0), **settings},
    )


def shown(value: Any) -> Any:
    """A value that compares by content."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, Mapping):
        return {key: shown(item) for key, item in value.items()}
    return value
