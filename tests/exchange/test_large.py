"""More than 2 GiB in one split, for real: 7 GB of memory and a minute, so only when asked for."""

import os
from contextlib import nullcontext
from functools import partial

import pytest

from evenstep.balance import Route
from evenstep.exchange import Agreement, Offer
from tests.exchange.samples import exchange_over_world, over_network
from tests.harness import RankPools

NBYTES = (2 << 30) + (200 << 20)


def _to_rank_1(_agreement: Agreement) -> list[tuple[int, Route]]:
    return [(0, Route(0, 1, 0))]


def _large_sample(rank: int, world_size: int, *, network: bool) -> list[tuple[int, int, int]]:
    import torch

    exchange = exchange_over_world(rank, world_size)
    samples = [{"bytes": torch.zeros(NBYTES, dtype=torch.uint8)}] if rank == 0 else []
    if rank == 0:
        samples[0]["bytes"][-1] = 7
        samples[0]["bytes"][1 << 31] = 5
    offer = Offer(samples=samples, slot_counts=[len(samples)], costs=[1.0] * len(samples))
    with over_network() if network else nullcontext():
        transfer = exchange.prepare(exchange.agree(lambda: offer), _to_rank_1)
    transfer.launch()
    arrived = [arrival.sample["bytes"] for arrival in transfer.wait()]
    return [(t.numel(), int(t[1 << 31]), int(t[-1])) for t in arrived]  # type: ignore[union-attr, index, arg-type] # a tensor


@pytest.mark.skipif(
    "EVENSTEP_LARGE_TESTS" not in os.environ, reason="needs 7 GB; set EVENSTEP_LARGE_TESTS"
)
@pytest.mark.parametrize("network", [True, False])
def test_one_split_of_more_than_2_gib(ranks: RankPools, *, network: bool) -> None:
    work = partial(_large_sample, network=network)
    assert ranks(2).run(work, deadline_s=170.0) == [[], [(NBYTES, 5, 7)]]
