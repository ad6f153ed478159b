"""Time one rank's share of a window for groups of 8 to 4096 ranks, without any network.

Times are of the one thread's processor time, so that other load on the machine counts little. The
control messages of all ranks are generated and handed over as if they had arrived; everything
else is what a rank runs: decode and compare them, plan, derive moves and splits, decode the shapes
of its own samples. Prints the machine, then one line of JSON per figure, and per group size how
each figure grew with the number of samples: an exponent of 1 is linear.
"""

import math
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import Row, report, row
from benchmarks.workloads import receipt_patches, receipts_samples
from evenstep.balance import plan_route
from evenstep.exchange import Agreement, Moves, Offer, collection_paused, plan_moves
from evenstep.exchange.offer_wire import SchemaAnnouncer, SchemaTable
from evenstep.exchange.schemas import check_same_schema
from evenstep.serialize import SampleLayout, sample_layout

WORLD_SIZES = (8, 64, 512, 1024, 4096)
SLOTS, SAMPLES = 8, 8  # micro-batches per window, and samples in each of them on every rank
TARGET_RANKS, TARGET_MS, TARGET_MB = 1024, 250.0, 200.0
RANK = 3
ROUNDS = 5


class Share(NamedTuple):
    """Processor seconds of one rank, by step."""

    decode: float
    costs: float
    plan: float
    moves: float
    layouts: float


def receipts_layouts(rng: random.Random) -> list[SampleLayout]:
    """Return layouts of receipts samples, to draw from."""
    layouts = []
    for images in receipts_samples(64, rng, receipt_patches()):
        text = torch.empty(1, 2048, dtype=torch.int64)
        sample: dict[str, torch.Tensor | None] = {
            "input_ids": text,
            "labels": text,
            "loss_mask": torch.empty(1, 2048),
            "attention_mask": torch.empty(1, 2048, dtype=torch.bool),
            "position_ids": torch.empty(3, 1, 2048, dtype=torch.int64),
            "vision.hidden_states": torch.empty(sum(images), 1176, device="meta"),
            "vision.grid_thw": torch.empty(len(images), 3, dtype=torch.int64),
        }
        layouts.append(sample_layout(sample))
    return layouts


def messages(world_size: int, rng: random.Random) -> list[memoryview]:
    """Return every rank's offer, in the steady state: the schema was announced before."""
    known = receipts_layouts(rng)
    encoded = []
    for _ in range(world_size):
        layouts = rng.choices(known, k=SLOTS * SAMPLES)
        offer = Offer(
            samples=[{}] * len(layouts),
            slot_counts=[SAMPLES] * SLOTS,
            costs=[layout.nbytes + rng.random() for layout in layouts],
        )
        encoded.append(memoryview(SchemaAnnouncer().encode(offer, layouts)))
    return encoded


def share(received: list[memoryview]) -> tuple[Share, Moves]:
    """Do one rank's work on the received messages of all."""
    world_size = len(received)
    ticks = [time.thread_time()]

    def tick() -> None:
        ticks.append(time.thread_time())

    reports = tuple(SchemaTable().decode(message, rank) for rank, message in enumerate(received))
    check_same_schema([report.schemas for report in reports])
    tick()
    agreement = Agreement(
        reports=reports,
        offer=Offer(samples=[], slot_counts=[], costs=[]),
        samples=[],
        layouts=[],
    )
    costs = [agreement.costs_of_slot(slot) for slot in range(agreement.num_slots)]
    tick()
    route = plan_route(costs, world_size, world_size)
    tick()
    moves = plan_moves(
        route,
        holders=agreement.holders,
        nbytes=agreement.nbytes,
        rank=RANK,
        world_size=world_size,
    )
    tick()
    for peer, places in enumerate(moves.receives):
        for place in places:
            agreement.reports[peer].layout(place.local_idx)
    tick()
    return Share(*[end - start for start, end in pairwise(ticks)]), moves


def figures_of(world_size: int) -> dict[str, tuple[float, str]]:
    """Return the figures of one group size: value and unit by name."""
    received = messages(world_size, random.Random(world_size))
    with collection_paused():  # as the exchange does
        shares = [share(received)[0] for _ in range(ROUNDS + 1)][1:]
    best = min(shares, key=sum)
    tracemalloc.start()
    _, moves = share(received)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, moves.sends)) + len(moves.kept) == SLOTS * SAMPLES
    control = sum(map(len, received))
    return {
        "planning, one rank": (1e3 * statistics.median(map(sum, shares)), "ms"),
        "planning, best of the rounds": (1e3 * sum(best), "ms"),
        **{f"of it: {name}": (1e3 * seconds, "ms") for name, seconds in best._asdict().items()},
        "memory while planning": (peak / 1e6, "MB"),
        "control bytes received": (control / 1e6, "MB"),
        "control bytes per sample": (control / (world_size * SLOTS * SAMPLES), "bytes"),
    }


def figures() -> Iterator[Row]:
    before: dict[str, float] = {}
    for world_size in WORLD_SIZES:
        case = f"{world_size} ranks x {SLOTS} slots x {SAMPLES} samples"
        target = world_size == TARGET_RANKS
        grown = math.log(world_size / before.get("", world_size / 2))
        before[""] = world_size
        for name, (value, unit) in figures_of(world_size).items():
            exponent = math.log(value / before[name]) / grown if before.get(name) else None
            limits = {"planning, one rank": TARGET_MS, "memory while planning": TARGET_MB}
            yield row(
                name,
                case,
                value,
                target=limits.get(name) if target else None,
                unit=unit,
                exponent=None if exponent is None else round(exponent, 2),
            )
            before[name] = value


if __name__ == "__main__":
    report(__doc__ or "", figures)
