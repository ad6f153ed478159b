"""Memory that ranks of one machine share: regions, who shares them, and what may go wrong."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from evenstep.exchange import (
    ExchangeError,
    ExchangeTimeoutError,
    Offer,
    Patience,
    PeerLostError,
    plan_moves,
)
from evenstep.exchange.handover import Handover
from evenstep.exchange.node import Node, _Card, _hosts, _is_readable, _shown
from evenstep.exchange.shared_region import Handle, MappedRegion, Region
from tests.exchange.samples import agreed, exchange_over_world, offer_of, round_robin, shown
from tests.harness import RankPools

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is of Linux")

A, B = b"a" * 16, b"b" * 16


def _node(processes: Sequence[int] | None = None) -> Node:
    """Rank 0 of two ranks that are both this process."""
    pids = tuple(processes or [os.getpid()] * 2)
    return Node(rank=0, hosts=(0, 0), ranks=(0, 1), processes=pids)


def _filled(node: Node, nbytes: int) -> tuple[Region, int]:
    """A region with content that rank 1 has heard of."""
    region, number = node.region(nbytes)
    region.fill(number, [0, nbytes]).fill_(number % 251)
    region.is_committed = True
    return region, number


def _other_end(region: Region) -> MappedRegion:
    return MappedRegion(os.getpid(), region.handle, num_ranks=2, place=1)


def test_content_passes_from_one_process_to_another() -> None:
    region, number = _filled(_node(), 24)
    assert region.late(number) == [1]
    mapped = _other_end(region)
    content = mapped.take(number, 24)
    assert content.tolist() == [number] * 24
    assert region.late(number) == []
    assert not region.is_free
    mapped.done(number)
    assert region.is_free


def test_every_rank_gets_its_own_part() -> None:
    region = Region(64, 3)
    region.fill(5, [8, 0, 16]).copy_(torch.arange(24))
    for place, expected in ((0, [*range(8)]), (2, [*range(8, 24)])):
        mapped = MappedRegion(os.getpid(), region.handle, num_ranks=3, place=place)
        assert mapped.take(5, len(expected)).tolist() == expected
    assert region.late(5) == []


def test_who_was_done_with_replaced_content_is_not_late() -> None:
    region, number = _filled(_node(), 24)
    _other_end(region).done(number)
    region.fill(number + 1, [0, 8])
    assert region.late(number) == []
    assert region.late(number + 1) == [1]


def test_a_region_is_used_again_once_its_readers_are_done() -> None:
    node = _node()
    first, number = _filled(node, 1000)
    second, _ = _filled(node, 1000)
    assert second is not first  # its reader still reads
    _other_end(first).done(number)
    assert _filled(node, 900)[0] is first
    assert len(node._regions) == 2


def test_content_that_nobody_heard_of_does_not_keep_a_region() -> None:
    node = _node()
    region, number = node.region(1000)
    region.fill(number, [0, 1000])  # and then the commitment fails
    assert node.region(1000)[0] is region


def test_regions_that_are_outgrown_are_given_up() -> None:
    node = _node()
    for power in range(20, 26):
        region, number = _filled(node, 1 << power)
        _other_end(region).done(number)
    assert [known.capacity for known in node._regions] == [1 << 25]
    for _ in range(4000):  # small windows from now on
        region, number = _filled(node, 1 << 20)
        _other_end(region).done(number)
    assert sum(known.capacity for known in node._regions) < 1 << 24


def test_another_file_in_its_place_is_a_lost_peer() -> None:
    region, _ = _filled(_node(), 24)
    stale = region.handle._replace(identity=region.handle.identity ^ 1)
    with pytest.raises(PeerLostError, match="lost the connection to rank 1 while moving samples"):
        _node().mapped(1, stale)


def test_a_process_that_has_ended_is_a_lost_peer() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    node = _node([os.getpid(), ended.pid])
    ended.wait()
    assert not node.has_ended(0)
    assert node.has_ended(1)
    with pytest.raises(PeerLostError, match="rank 1"):
        node.mapped(1, Handle(1, 1, 4096, 3, lends=False))


def test_who_died_while_it_was_watched_is_noticed() -> None:
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    node = _node([os.getpid(), running.pid])
    assert not node.has_ended(1)
    running.kill()
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped yet
    assert node.has_ended(1)
    running.communicate()


@pytest.mark.parametrize(
    ("machines", "unread", "hosts"),
    [
        ([A, A, A], None, (0, 0, 0)),
        ([A, B, A, B], None, (0, 1, 0, 1)),
        ([A, A, B, B], (1, 0), (0, 1, 2, 2)),  # rank 1 cannot read rank 0
        ([A, None, A], None, (0, 1, 0)),
        ([None, None], None, (0, 1)),
    ],
)
def test_a_node_is_whoever_can_read_each_other(
    machines: list[bytes | None], unread: tuple[int, int] | None, hosts: tuple[int, ...]
) -> None:
    cards = [_Card(name or bytes(16), 7 if name else 0, 3, 0, bytes(16)) for name in machines]
    reached = [
        {
            peer
            for peer, name in enumerate(machines)
            if name and name == machines[rank] and (rank, peer) != unread
        }
        for rank in range(len(machines))
    ]
    assert _hosts(cards, reached) == hosts


def _handover(node: Node) -> Handover:
    """What rank 0 hands over to rank 1."""
    agreement = agreed([offer_of(0, [2]), offer_of(1, [2])])[0]
    moves = plan_moves(
        round_robin(agreement),
        holders=agreement.holders,
        nbytes=agreement.nbytes,
        rank=0,
        world_size=2,
        hosts=(0, 0),
    )
    outgoing = [place.local_idx for place in moves.sends[1]]
    return Handover(
        node,
        [agreement.samples[i] for i in outgoing],
        [agreement.layouts[i] for i in outgoing],
        moves,
        arriving={1: []},
        device=torch.device("cpu"),
    )


def test_a_rank_that_does_not_take_its_samples_is_named() -> None:
    with pytest.raises(ExchangeTimeoutError, match="rank 1 took no part in moving samples"):
        _handover(_node()).wait(Patience(timeout_s=0.3))


def test_a_rank_that_ends_before_it_took_its_samples_is_lost() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    handover = _handover(_node([os.getpid(), ended.pid]))
    ended.wait()
    with pytest.raises(PeerLostError, match=r"rank 1 .*the process has ended") as caught:
        handover.wait(Patience(timeout_s=20.0))
    assert caught.value.ranks == (1,)


def test_a_rank_may_end_as_soon_as_it_took_its_samples() -> None:
    node = _node()
    handover = _handover(node)
    region, handle = node._regions[0], Handle.decode(memoryview(handover.message))

    def ends(_place: int) -> bool:
        _other_end(region).take(handle.content, 0)
        return True

    with mock.patch.object(node, "has_ended", ends):
        handover.wait(Patience(timeout_s=20.0))


@pytest.mark.parametrize("missing", ["memfd_create", "pidfd_open"])
def test_a_python_without_the_calls_shares_nothing(missing: str) -> None:
    with mock.patch.object(os, missing, side_effect=AttributeError), ExitStack() as kept:
        card, _ = _shown(kept)
    assert card.process == 0


def test_what_cannot_be_read_is_not_of_this_node() -> None:
    with ExitStack() as kept:
        card, _ = _shown(kept)
        assert _is_readable(card, card)
        assert not _is_readable(card._replace(secret=bytes(16)), card)
        pipe, other = os.pipe()  # reading it would wait for ever
        assert not _is_readable(card._replace(descriptor=pipe), card)
        os.close(pipe)
        os.close(other)
    assert not _is_readable(card, card)  # closed by now


def test_a_mapping_that_fails_here_blames_nobody_else() -> None:
    region, _ = _filled(_node(), 24)
    with (
        mock.patch("mmap.mmap", side_effect=OSError("no memory")),
        pytest.raises(ExchangeError, match=r"cannot map \d+ bytes of rank 1: no memory"),
    ):
        _node().mapped(1, region.handle)


def test_mappings_of_regions_that_were_given_up_are_dropped() -> None:
    owner, reader = _node(), _node()
    for power in range(20, 26):
        region, number = _filled(owner, 1 << power)
        reader.mapped(1, region.handle)
        _other_end(region).done(number)
    assert len(reader._mapped) == 1


def _many_windows(rank: int, world_size: int) -> dict[str, Any]:
    exchange = exchange_over_world(rank, world_size)

    def window(count: int) -> Any:
        offer = offer_of(rank, [count])
        transfer = exchange.prepare(exchange.agree(lambda: offer), round_robin)
        transfer.launch()
        return transfer

    def fails(*_: object) -> None:
        raise OSError("no room" if rank == 1 else "not reached")

    kept = window(5).wait()
    before = shown([tuple(arrival) for arrival in kept])
    for turn in range(6):
        with window(3 + turn % 2).borrowed() as arrivals:
            assert all(arrival.sample for arrival in arrivals)
        given_up = exchange.prepare(exchange.agree(partial(offer_of, rank, [4])), round_robin)
        given_up.launch()
        given_up.settle()
        with pytest.raises((OSError, RuntimeError), match="no room"):
            exchange.prepare(
                exchange.agree(partial(offer_of, rank, [4])),
                round_robin,
                check=fails if rank == 1 else None,
            )
    return {
        "unchanged": shown([tuple(arrival) for arrival in kept]) == before,
        "regions": len(exchange._node._regions),
        "mapped": len(exchange._node._mapped),
    }


def test_what_arrived_stays_and_memory_is_used_again(ranks: RankPools) -> None:
    for seen in ranks(3).run(_many_windows):
        assert seen["unchanged"]
        assert seen["regions"] <= 2  # one, and one while a peer still reads
        assert seen["mapped"] <= 4  # those of the two peers


def _given(offer: Offer) -> Offer:
    return offer


def _no_bytes(rank: int, world_size: int) -> list[Any]:
    arrived = []
    for empty in (None, torch.empty(0)):
        exchange = exchange_over_world(rank, world_size)
        offer = Offer(samples=[{"x": empty}] * 3, slot_counts=[3], costs=[1.0] * 3)
        transfer = exchange.prepare(exchange.agree(partial(_given, offer)), round_robin)
        transfer.launch()
        with transfer.borrowed() as arrivals:
            arrived.append([shown(arrival.sample) for arrival in arrivals])
    return arrived


def test_samples_without_bytes_arrive(ranks: RankPools) -> None:
    expected = [[shown({"x": empty})] * 3 for empty in (None, torch.empty(0))]
    assert ranks(3).run(_no_bytes) == [expected] * 3


def _dropped(rank: int, world_size: int) -> int:
    exchange = exchange_over_world(rank, world_size)
    for _ in range(5):
        transfer = exchange.prepare(exchange.agree(partial(offer_of, rank, [3])), round_robin)
        transfer.launch()
        del transfer
    return len(exchange._node._regions)


def test_windows_that_are_dropped_give_their_memory_back(ranks: RankPools) -> None:
    assert max(ranks(3).run(_dropped)) <= 2


def _descriptors(rank: int, world_size: int) -> tuple[int, int]:
    import gc

    import torch.distributed as dist

    counts = []
    for _ in range(2):
        exchange = exchange_over_world(rank, world_size)
        for _ in range(3):
            transfer = exchange.prepare(exchange.agree(partial(offer_of, rank, [3])), round_robin)
            transfer.launch()
            transfer.wait()
        group = exchange._control_group
        dist.barrier()
        dist.destroy_process_group(group)
        dist.destroy_process_group(exchange.payload._group)
        del exchange, transfer, group
        gc.collect()
        counts.append(len([*Path("/proc/self/fd").iterdir()]))
    return counts[0], counts[1]


def test_no_descriptor_is_left_of_a_destroyed_group(ranks: RankPools) -> None:
    for first, second in ranks(3).run(_descriptors):
        assert second <= first
