"""The contract's explicit steps, driven as the reference drives them, and broken plans."""

import dataclasses
from typing import Any

import pytest
import torch

from evenstep.balance import build_window_route
from evenstep.exchange import PreparedExchange
from evenstep.reorder_buffer import (
    exchange_by_route,
    prepare_sample_exchange,
    reassemble_window,
    split_microbatch,
    tensor_metadata,
)
from evenstep.serialize import FlatSample
from tests.harness import RankPools
from tests.reorder_buffer.microbatches import assert_same
from tests.reorder_buffer.numbered import checked, cost_of, groups, image_counts, microbatch, shard

SIZE, SLOTS = 4, 2


def _flats(rank: int, world_size: int, slots: int = SLOTS) -> list[FlatSample]:
    flats: list[FlatSample] = []
    for slot in range(slots):
        batch = microbatch(shard(slot, rank, world_size, SIZE))
        offsets = [0, *image_counts(batch).cumsum(0).tolist()]
        flats += split_microbatch(batch, cu_img=offsets)
    return flats


class Known:
    """What all ranks know once they have gathered costs and metadata."""

    def __init__(self, world_size: int, slots: int = SLOTS) -> None:
        self.flats = [_flats(rank, world_size, slots) for rank in range(world_size)]
        self.metas = [[tensor_metadata(flat) for flat in flats] for flats in self.flats]
        per_slot = world_size * SIZE
        self.indices = [
            [
                slot * per_slot + rank * SIZE + local
                for slot in range(slots)
                for local in range(SIZE)
            ]
            for rank in range(world_size)
        ]
        costs = [
            [
                cost_of(flat)
                for flats in self.flats
                for flat in flats[slot * SIZE : (slot + 1) * SIZE]
            ]
            for slot in range(slots)
        ]
        self.route = build_window_route(costs, world_size, world_size)

    def prepare(self, rank: int) -> PreparedExchange:
        return prepare_sample_exchange(
            self.flats[rank],
            self.indices[rank],
            self.route,
            self.indices,
            self.metas,
            rank,
            len(self.flats),
            window_size=SLOTS,
        )

    def reassemble(self, rank: int, received: torch.Tensor, **changes: Any) -> list[Any]:
        plan = dataclasses.replace(self.prepare(rank), **changes.pop("plan", {}))
        settings = {
            "dp_size": len(self.flats),
            "window_size": SLOTS,
            "local": SIZE,
            **changes,
        }
        return reassemble_window(self.flats[rank], plan, received, self.metas, **settings)


def _emulated(plans: list[PreparedExchange], rank: int) -> torch.Tensor:
    """Return what an all-to-all would bring to `rank`."""
    parts = [plan["send_buf"].split(plan["send_splits"])[rank] for plan in plans]
    return torch.cat(parts)


def _by_route(rank: int, world_size: int) -> list[list[int]]:
    known = Known(world_size)
    with groups() as made:
        found = exchange_by_route(
            known.flats[rank],
            [(slot, owner, position) for slot, owner, position in known.route],
            known.indices,
            known.metas,
            dp_rank=rank,
            dp_size=world_size,
            window_size=SLOTS,
            local=SIZE,
            dp_group_nccl=made.payload,
        )
    return [checked(batch) for batch in found]


@pytest.mark.parametrize("world_size", [2, 4])
def test_exchange_by_route_moves_what_the_plan_says(ranks: RankPools, world_size: int) -> None:
    found = ranks(world_size).run(_by_route)
    plans = [Known(world_size).prepare(rank) for rank in range(world_size)]
    emulated = [
        [checked(b) for b in Known(world_size).reassemble(rank, _emulated(plans, rank))]
        for rank in range(world_size)
    ]
    assert found == emulated
    for slot in range(SLOTS):
        there = sorted(n for rank in found for n in rank[slot])
        assert there == [*range(slot * world_size * SIZE, (slot + 1) * world_size * SIZE)]


def test_one_rank_keeps_all_and_needs_no_group() -> None:
    known = Known(1)
    found = exchange_by_route(
        known.flats[0],
        known.route,
        known.indices,
        known.metas,
        dp_rank=0,
        dp_size=1,
        window_size=SLOTS,
        local=SIZE,
        dp_group_nccl=None,
    )
    canonical = [
        sorted(range(slot * SIZE, (slot + 1) * SIZE), key=lambda index: known.route[index][2])
        for slot in range(SLOTS)
    ]
    assert [checked(batch) for batch in found] == canonical


def test_plain_values_travel_in_the_metadata() -> None:
    known = Known(2)
    plans = [known.prepare(rank) for rank in range(2)]
    (first, second) = known.reassemble(1, _emulated(plans, 1))
    assert_same(first["names"], microbatch(checked(first))["names"])
    assert len(second["names"]) == SIZE


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"local": 3}, "slot 0: 4 samples arrived, 3 were expected"),
        ({"window_size": 1}, "the plan names slot 1 in a window of 1"),
        ({"plan": {"recv_schedule": {}}}, "the samples end at byte 0 of"),
        ({"plan": {"local_samples": []}}, "slot 0: . samples arrived, 4 were expected"),
    ],
)
def test_reassembly_refuses_what_does_not_match_the_plan(
    changes: dict[str, Any], text: str
) -> None:
    known = Known(2)
    received = _emulated([known.prepare(rank) for rank in range(2)], 0)
    with pytest.raises(RuntimeError, match=text):
        known.reassemble(0, received, **changes)


def test_reassembly_refuses_too_few_bytes_and_wrong_positions() -> None:
    known = Known(2)
    plan = known.prepare(0)
    received = _emulated([plan, known.prepare(1)], 0)
    with pytest.raises(RuntimeError, match=r"recv_buf has \d+ bytes, and recv_splits are \d+"):
        known.reassemble(0, received[:-8])
    twice = [plan.local_samples[0], *plan.local_samples[:-1]]
    with pytest.raises(RuntimeError, match=r"slot 0: the plan has canonical position \d twice"):
        known.reassemble(0, received, plan={"local_samples": twice})
    moved = [place._replace(canonical_pos=place.canonical_pos + 1) for place in plan.local_samples]
    schedule = {
        peer: [place._replace(canonical_pos=place.canonical_pos + 1) for place in places]
        for peer, places in plan.recv_schedule.items()
    }
    changes = {"local_samples": moved, "recv_schedule": schedule}
    with pytest.raises(RuntimeError, match="are not those of one rank, a block of 4"):
        known.reassemble(0, received, plan=changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"window_size": 1}, r"route\[8\] has dst_slot 1; it must be in \[0, 1\)"),
        ({}, "dp_group_nccl is None; 2 ranks need a group"),
        ({"dp_rank": 2}, r"dp_rank is 2; it must be in \[0, 2\)"),
        ({"local": 0}, "local is 0; a rank must own at least one"),
    ],
)
def test_exchange_by_route_checks_its_arguments_before_any_collective(
    changes: dict[str, Any], text: str
) -> None:
    known = Known(2)
    settings: dict[str, Any] = {
        "dp_rank": 0,
        "dp_size": 2,
        "window_size": SLOTS,
        "local": SIZE,
        "dp_group_nccl": None,
    }
    if "window_size" in changes:
        settings["dp_group_nccl"] = object()  # never looked at
    with pytest.raises(ValueError, match=text):
        exchange_by_route(
            known.flats[0], known.route, known.indices, known.metas, **settings | changes
        )
