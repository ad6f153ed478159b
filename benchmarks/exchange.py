"""Time `exchange_window` against a bare all-to-all of the same bytes, on 2 and 4 ranks over Gloo.

Prints the machine, then one line of JSON per figure. A ratio is the median over rounds of (time of
the one / time of the other), both timed in each round; a time is that of the slowest rank. The bare
collective sends what the contract's plan (LPT) sends, between buffers that exist already. Here all
ranks share one machine, so ranks copy samples from each other's memory, where the kernel allows it,
or hand them over in shared memory (EVENSTEP_SHARED_MEMORY=packed in the environment); with
EVENSTEP_SHARED_MEMORY=0 they go over Gloo as the bare collective does. The key
`processor` is the same ratio of processor time, summed over the ranks: other load on the machine,
which makes whoever works more wait more, counts little in it.

The rows "donated" are of batches that are given away (`donate=True`): a micro-batch whose samples
all stay is not copied, which in the draw for W = 1 is that of one rank of four, with least move.

The rows "with streaming stores" are of ranks, bare collective included, that start with the setting
of glibc that docs/exchange.md ("Large copies") names; the others are as the machine comes.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import Row, report, row
from benchmarks.workloads import receipt_patches, receipts_samples
from evenstep.balance import Route, build_window_route
from evenstep.exchange import Agreement, Moves, Offer, SampleExchange
from evenstep.exchange.offer_wire import SchemaAnnouncer
from evenstep.reorder_buffer import SampleCost, exchange_window, split_microbatch
from tests.harness import RankPools

MicroBatch: TypeAlias = dict[str, object]

SEED = 0
LENGTH = 2048
PATCH_FEATURES = 1176
ROUNDS = 21
STREAMING = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x200000"}
FRAME_BYTES = 8 + 28  # length and header of a message
DONATED = ", donated"
COST = SampleCost(encoder_cost_weight=1.0, language_cost_weight=0.1)


class Case(NamedTuple):
    """A window of one rank: its form, and what its exchange may cost."""

    name: str
    window_size: int
    samples: int
    """Per micro-batch and rank."""
    max_merged_tokens: int
    """Of an image. With 256, 16 samples hold the 122 MB that targets.md names."""
    targets: dict[str, float]
    """Largest time / bare, by strategy."""


RECEIPTS = {"lpt": 1.6, "least_move": 0.7, f"least_move{DONATED}": 0.7}
CASES = (
    Case("receipts, W = 1", 1, 8, 256, RECEIPTS),
    Case("receipts, W = 4", 4, 8, 256, RECEIPTS),
    Case("text only, W = 4", 4, 32, 1, {"lpt": 3.0}),
)


def microbatch(rng: random.Random, case: Case) -> tuple[MicroBatch, torch.Tensor]:
    """Return one micro-batch of the receipts workload, and its images per sample."""
    patches = receipt_patches(max_merged_tokens=case.max_merged_tokens)
    images = receipts_samples(case.samples, rng, patches)
    grid = [[1, 1, n] for sample in images for n in sample]
    total = sum(n for _, _, n in grid)
    batch: MicroBatch = {
        "input_ids": torch.randint(32000, (case.samples, LENGTH)),
        "labels": torch.randint(32000, (case.samples, LENGTH)),
        "loss_mask": torch.ones(case.samples, LENGTH),
        "attention_mask": torch.ones(case.samples, LENGTH, dtype=torch.bool),
        "position_ids": torch.arange(LENGTH).repeat(3, case.samples, 1),
        "modality_inputs": {
            "images": {
                "encoder": {
                    "hidden_states": torch.randn(total, PATCH_FEATURES),
                    "grid_thw": torch.tensor(grid, dtype=torch.int64).reshape(-1, 3),
                }
            }
        },
    }
    return batch, torch.tensor([len(sample) for sample in images])


class Timing(NamedTuple):
    """One round."""

    seconds: float
    """Of the slowest rank."""
    processor_seconds: float
    """Of all ranks."""


def ratios(rounds: Sequence[Timing], bare: Sequence[Timing], field: int) -> list[float]:
    """Return the ratio of each round to the bare one beside it."""
    return [ours[field] / other[field] for ours, other in zip(rounds, bare, strict=True)]


class Bench:
    """One rank's window, with everything that a round times."""

    def __init__(self, rank: int, world_size: int, case: Case) -> None:
        rng = random.Random(SEED + rank)
        drawn = [microbatch(rng, case) for _ in range(case.window_size)]
        self._counts = {id(batch): counts for batch, counts in drawn}
        self.batches = [batch for batch, _ in drawn]
        self.rank, self.world_size, self.case = rank, world_size, case
        self.control = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        self.payload = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        self.metadata_bytes = 0.0
        self.moves = self._plan()
        self._sent = torch.ones(sum(self.moves.send_splits) // 8, dtype=torch.int64)
        self._received = torch.ones(sum(self.moves.recv_splits) // 8, dtype=torch.int64)

    def bare(self) -> None:
        """Move the bytes of the contract's plan, and do nothing else."""
        dist.all_to_all_single(
            self._received,
            self._sent,
            [nbytes // 8 for nbytes in self.moves.recv_splits],
            [nbytes // 8 for nbytes in self.moves.send_splits],
            group=self.payload,
        )

    def window(self, name: str) -> list[MicroBatch]:
        """Exchange the window with the strategy of this name, as a user does."""
        return exchange_window(
            self.batches,
            dp_rank=self.rank,
            dp_size=self.world_size,
            n_groups=self.world_size,
            cost_of=COST,
            dp_group_gloo=self.control,
            dp_group_nccl=self.payload,
            image_count_of=lambda batch: self._counts[id(batch)],
            strategy=name.removesuffix(DONATED),
            donate=name.endswith(DONATED),
        )

    def timed(self, work: Callable[[], object]) -> "Timing":
        """Time one round; every rank calls this."""
        dist.barrier()
        start, processor_start = time.perf_counter(), time.process_time()
        result = work()
        seconds = torch.tensor(time.perf_counter() - start)
        processor_seconds = torch.tensor(time.process_time() - processor_start)
        del result
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        dist.all_reduce(processor_seconds)
        return Timing(float(seconds), float(processor_seconds))

    def _plan(self) -> Moves:
        """Return the contract's moves, and count the bytes that a rank tells others per sample."""
        flats = [
            split_microbatch(batch, cu_img=[0, *accumulate(self._counts[id(batch)].tolist())])
            for batch in self.batches
        ]
        offer = Offer(
            samples=[flat for slot in flats for flat in slot],
            slot_counts=[len(slot) for slot in flats],
            costs=[COST(flat) for slot in flats for flat in slot],
        )
        exchange = SampleExchange(
            rank=self.rank,
            world_size=self.world_size,
            control_group=self.control,
            payload_group=self.payload,
        )

        def plan(agreement: Agreement) -> "enumerate[Route]":
            costs = [agreement.costs_of_slot(slot) for slot in range(agreement.num_slots)]
            return enumerate(build_window_route(costs, self.world_size, self.world_size))

        agreement = exchange.agree(lambda: offer)
        announcer = SchemaAnnouncer()
        announcer.encode(offer, agreement.layouts)
        announcer.mark_announced()  # as from the second window on
        transfer = exchange.prepare(agreement, plan)
        messages = len(announcer.encode(offer, agreement.layouts)) + len(transfer.commitment)
        self.metadata_bytes = (messages + 2 * FRAME_BYTES) / len(offer.samples)
        return transfer.moves


def measure(rank: int, world_size: int, case: Case) -> dict[str, object]:
    bench = Bench(rank, world_size, case)
    names = [*case.targets]
    rounds: dict[str, list[Timing]] = {name: [] for name in ("bare", *names)}
    for _ in range(ROUNDS + 1):
        rounds["bare"].append(bench.timed(bench.bare))
        for name in names:
            rounds[name].append(bench.timed(partial(bench.window, name)))
    return {
        "rounds": {name: values[1:] for name, values in rounds.items()},
        "sent": sum(bench.moves.send_splits),
        "metadata": bench.metadata_bytes,
    }


def figures() -> Iterator[Row]:
    yield from figures_of(CASES, world_sizes=(2, 4))
    receipts = [case for case in CASES if "receipts" in case.name]
    with mock.patch.dict(os.environ, STREAMING):
        yield from figures_of(receipts, world_sizes=(4,), setting=" with streaming stores")


def figures_of(
    cases: Sequence[Case], *, world_sizes: Sequence[int], setting: str = ""
) -> Iterator[Row]:
    pools = RankPools()  # their ranks start with the environment of now
    try:
        for world_size in world_sizes:
            for case in cases:
                results = pools(world_size).run(measure, case, deadline_s=600.0)
                rounds = results[0]["rounds"]
                megabytes = round(sum(result["sent"] for result in results) / 1e6, 1)
                where = f"{case.name}, {world_size} ranks{setting}"
                for name, target in case.targets.items():
                    wall = ratios(rounds[name], rounds["bare"], 0)
                    processor = ratios(rounds[name], rounds["bare"], 1)
                    yield row(
                        f"exchange_window, {name} / bare all_to_all_single",
                        where,
                        statistics.median(wall),
                        target=target if world_size == 4 else None,
                        unit="ratio",
                        best=round(min(wall), 3),
                        processor=round(statistics.median(processor), 3),
                        bare_ms=round(1e3 * min(rounds["bare"]).seconds, 1),
                        megabytes=megabytes,
                    )
                sent = max(result["metadata"] for result in results)
                yield row("metadata sent per sample", where, sent, target=64.0, unit="bytes")
    finally:
        pools.close()


if __name__ == "__main__":
    report(__doc__ or "", figures)
