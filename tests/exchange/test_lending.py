"""Samples that ranks of one node copy from where they lie in each other's memory."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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
from evenstep.exchange.node import VARIABLE, Node, _is_readable_in_place, _shown
from evenstep.exchange.peer_memory import read_memory
from evenstep.exchange.shared_region import Handle, MappedRegion
from evenstep.serialize import LaidOutSample, sample_layout
from tests.exchange.samples import agreed, exchange_over_world, round_robin
from tests.harness import RankPools, spawn
from tests.serialize.samples import InPlace, filled, same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is of Linux")

CPU = torch.device("cpu")
GARBAGE = 0xA5


def _buffer(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)


# read_memory


def test_pieces_of_any_size_are_read() -> None:
    sizes = [0, 1, (1 << 20) + 1, 3 << 20, *range(3000)]  # more than one call takes
    source = filled(torch.uint8, sum(sizes))
    found = _buffer(16 + len(source))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    to, of = found.data_ptr() + 16, source.data_ptr()
    copies = [(to + at, of + at, n) for at, n in zip(starts, sizes, strict=True)]
    read_memory(os.getpid(), copies[::-1])
    assert found[:16].eq(GARBAGE).all()
    assert torch.equal(found[16:], source)


def test_nothing_is_read_at_once() -> None:
    read_memory(os.getpid(), [])


def test_the_memory_of_another_process_is_read() -> None:
    code = "import ctypes; b = ctypes.create_string_buffer(b'theirs'); "
    code += "print(ctypes.addressof(b), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as peer:
        assert peer.stdout is not None
        found = _buffer(6)
        read_memory(peer.pid, [(found.data_ptr(), int(peer.stdout.readline()), 6)])
        peer.communicate(b"\n")
    assert bytes(found.tolist()) == b"theirs"


def test_what_cannot_be_read_is_an_error_of_the_system() -> None:
    found, source = _buffer(16), filled(torch.uint8, 8)
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), [(found.data_ptr(), 8, 8)])
    good = (found.data_ptr(), source.data_ptr(), 8)
    with pytest.raises(OSError, match="only 8 bytes of 16"):
        read_memory(os.getpid(), [good, (found.data_ptr() + 8, 8, 8)])
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    with pytest.raises(ProcessLookupError):
        read_memory(ended.pid, [good])


def test_a_system_without_the_call_lends_nothing() -> None:
    with ExitStack() as kept:
        card, _ = _shown(kept)
        assert _is_readable_in_place(card)
        with mock.patch("evenstep.exchange.peer_memory._readv", None):
            assert not _is_readable_in_place(card)
        with mock.patch.dict(os.environ, {VARIABLE: "packed"}):
            assert not _is_readable_in_place(_shown(kept)[0])


# One process plays both ranks.


def _flat(rank: int, index: int) -> dict[str, Any]:
    wide = filled(torch.int16, 3, 5 + index, seed=rank)
    return {
        "ids": filled(torch.int64, 1, 4 + index, seed=10 * rank + index),
        "nothing": None,
        "rows": wide[:, 1 : 3 + index],  # three rows a step apart
        "scalar": torch.tensor(float(index)),
        "void": torch.empty(0, 2),
    }


def _ids(sample: Mapping[str, Any]) -> Any:
    return sample["ids"]


def _samples(rank: int, count: int) -> list[LaidOutSample]:
    return [InPlace(_flat(rank, index), is_pageable=True) for index in range(count)]


@dataclass
class Ranks:
    """Two ranks of a node, each with samples for the other.

    Attributes:
        nodes: By rank.
        handovers: By rank.
        expected: By rank, the samples that come to it.
    """

    nodes: list[Node]
    handovers: list[Handover]
    expected: list[list[Mapping[str, Any]]]

    def take(self, rank: int) -> None:
        messages = [memoryview(handover.message) for handover in self.handovers]
        self.handovers[rank].take(messages)


def _ranks(
    of_rank: Sequence[Sequence[Mapping[str, Any]]] | None = None, *, lends: bool = True
) -> Ranks:
    samples = of_rank or [_samples(0, 4), _samples(1, 4)]
    agreements = agreed(
        [Offer(samples=own, slot_counts=[len(own)], costs=[1.0] * len(own)) for own in samples]
    )
    moves = [
        plan_moves(
            round_robin(agreement),
            holders=agreement.holders,
            nbytes=agreement.nbytes,
            rank=rank,
            world_size=2,
            hosts=(0, 0),
        )
        for rank, agreement in enumerate(agreements)
    ]
    out = [
        [agreement.samples[place.local_idx] for place in moves[rank].sends[1 - rank]]
        for rank, agreement in enumerate(agreements)
    ]
    nodes = [
        Node(rank=rank, hosts=(0, 0), ranks=(0, 1), processes=(os.getpid(),) * 2, lends=lends)
        for rank in range(2)
    ]
    layouts = [[sample_layout(flat) for flat in of_rank] for of_rank in out]
    handovers = [
        Handover(
            nodes[rank],
            out[rank],
            layouts[rank],
            moves[rank],
            arriving={1 - rank: layouts[1 - rank]},
            device=CPU,
        )
        for rank in range(2)
    ]
    return Ranks(nodes, handovers, [[{**flat} for flat in out[1 - rank]] for rank in range(2)])


def _lent(ranks: Ranks) -> list[bool]:
    return [Handle.decode(memoryview(each.message)).lends for each in ranks.handovers]


def _dicts(samples: Any) -> list[dict[str, Any]]:
    return [{key: sample[key] for key in sample} for sample in samples]


@pytest.mark.parametrize("borrow", [True, False])
def test_lent_samples_are_what_they_were(borrow: bool) -> None:
    ranks = _ranks()
    assert _lent(ranks) == [True, True]
    assert [handover.packed_nbytes for handover in ranks.handovers] == [0, 0]
    for rank, handover in enumerate(ranks.handovers):
        ranks.take(rank)
        found = [*handover.samples_from(1 - rank, borrow=borrow)]
        assert [sample.is_pageable for sample in found] == [False] * 2
        assert [len(sample) for sample in found] == [5, 5]
        assert [sorted(sample.keys()) for sample in found] == [sorted(_flat(0, 0))] * 2
        assert [sample.layout for sample in found] == [
            sample_layout(flat) for flat in ranks.expected[rank]
        ]
        assert all(
            same(sample[key], flat[key])
            for sample, flat in zip(_dicts(found), ranks.expected[rank], strict=True)
            for key in flat
        )
        with pytest.raises(KeyError):
            found[0]["absent"]


def test_what_was_copied_stays() -> None:
    ranks = _ranks()
    ranks.take(1)
    found = [*ranks.handovers[1].samples_from(0, borrow=False)]
    expected = [{k: v if v is None else v.clone() for k, v in f.items()} for f in ranks.expected[1]]
    for flat in ranks.expected[1]:
        flat["ids"].fill_(-1)  # the sender's
    ranks.handovers[1].release()
    assert all(
        same(sample["ids"], flat["ids"]) for sample, flat in zip(found, expected, strict=True)
    )


def test_a_lender_waits_until_its_samples_are_copied() -> None:
    ranks = _ranks()
    lender, reader = ranks.handovers
    with pytest.raises(ExchangeTimeoutError, match="rank 1 took no part in moving samples"):
        lender.wait(Patience(timeout_s=0.3))
    ranks.take(1)
    with pytest.raises(ExchangeTimeoutError, match="rank 1 took no part in moving samples"):
        lender.wait(Patience(timeout_s=0.3))
    reader.release()
    lender.wait(Patience(timeout_s=20.0))


def test_what_was_lent_is_given_back_before_what_was_packed() -> None:
    for lends in (True, False):
        ranks = _ranks(lends=lends)
        ranks.take(0)
        ranks.take(1)
        lender, reader = ranks.handovers
        found = reader.samples_from(0, borrow=True)
        reader.give_back()
        lender.wait(Patience(timeout_s=20.0))
        assert lender._region is not None
        assert lender._region.is_free == lends
        if not lends:
            assert [sample["ids"].tolist() for sample in _dicts(found)] == [
                flat["ids"].tolist() for flat in ranks.expected[1]
            ]
        reader.release()
        assert lender._region.is_free


def test_a_signal_s_handler_may_release_while_samples_are_given_back() -> None:
    ranks = _ranks()
    ranks.take(1)
    lender, reader = ranks.handovers
    done = MappedRegion.done

    def interrupted(region: MappedRegion, number: int) -> None:
        done(region, number)
        with mock.patch.object(MappedRegion, "done", done):
            reader.release()

    with mock.patch.object(MappedRegion, "done", interrupted):
        reader.give_back()
    lender.wait(Patience(timeout_s=20.0))


def test_a_reader_that_is_dropped_is_done() -> None:
    ranks = _ranks()
    ranks.take(1)
    samples = ranks.handovers[1].samples_from(0, borrow=True)
    ranks.handovers.pop()
    gc.collect()
    ranks.handovers[0].wait(Patience(timeout_s=20.0))
    assert samples


def test_a_reader_that_has_ended_is_lost() -> None:
    ranks = _ranks()
    ranks.take(1)
    with (
        mock.patch.object(Node, "has_ended", return_value=True),
        pytest.raises(PeerLostError, match=r"rank 1 .*the process has ended"),
    ):
        ranks.handovers[0].wait(Patience(timeout_s=20.0))


def test_bytes_that_were_given_up_are_not_served() -> None:
    ranks = _ranks()
    ranks.take(1)
    first, second = ranks.handovers[1].samples_from(0, borrow=True)
    assert first["ids"] is not None
    ranks.handovers[0] = ranks.handovers[1]  # an error, say, has ended what rank 0 did
    gc.collect()
    with pytest.raises(PeerLostError, match="given up its samples") as caught:
        second["ids"]
    assert caught.value.ranks == (0,)
    with pytest.raises(PeerLostError, match="given up its samples"):
        ranks.handovers[1].samples_from(0, borrow=False)


def test_a_lender_that_ends_while_it_is_read_is_lost() -> None:
    ranks = _ranks()
    ranks.take(1)
    sample = next(iter(ranks.handovers[1].samples_from(0, borrow=True)))
    with (
        mock.patch.object(Node, "has_ended", return_value=True),
        pytest.raises(PeerLostError, match="rank 0") as caught,
    ):
        sample["ids"]
    assert caught.value.ranks == (0,)


def test_memory_that_cannot_be_read_any_more_is_an_error() -> None:
    ranks = _ranks()
    ranks.take(1)
    sample = next(iter(ranks.handovers[1].samples_from(0, borrow=True)))
    with (
        mock.patch("evenstep.exchange.loan.read_memory", side_effect=PermissionError("no")),
        pytest.raises(ExchangeError, match=r"cannot read the memory of rank 0 .*no.*=packed"),
    ):
        sample["ids"]


def test_a_lender_without_memory_is_lost_before_its_process_has_ended() -> None:
    ranks = _ranks()
    ranks.take(1)
    sample = next(iter(ranks.handovers[1].samples_from(0, borrow=True)))
    with (
        mock.patch("evenstep.exchange.loan.read_memory", side_effect=ProcessLookupError),
        pytest.raises(PeerLostError, match="rank 0") as caught,
    ):
        sample["ids"]
    assert caught.value.ranks == (0,)


AT_EXIT = """
import atexit

def read():
    try:
        sample["ids"]
    except PeerLostError as error:
        print(error)

atexit.register(read)  # the first to be registered runs last
from evenstep.exchange import PeerLostError
from tests.exchange.test_lending import _ranks
ranks = _ranks()
ranks.take(1)
sample = next(iter(ranks.handovers[1].samples_from(0, borrow=True)))
sample["ids"]
"""


def test_a_process_that_ends_gives_up_what_it_lends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120, check=True
    )
    assert "given up its samples" in ended.stdout


def _mixed() -> list[Mapping[str, Any]]:
    lendable = _samples(0, 4)
    return [*lendable[:3], {**lendable[3]}]


def _unlike(**how: bool) -> list[LaidOutSample]:
    return [*_samples(0, 2), *[InPlace(_flat(0, index), **how) for index in range(2, 4)]]


@pytest.mark.parametrize(
    "samples",
    [
        _mixed(),
        _unlike(is_pageable=False),
        _unlike(is_pageable=True, is_cpu=False),
        [InPlace({"void": torch.empty(0)}, is_pageable=True)] * 4,
    ],
    ids=["dict", "page-locked", "device", "without bytes"],
)
def test_what_cannot_be_lent_is_packed(samples: list[Mapping[str, Any]]) -> None:
    ranks = _ranks([samples, _samples(1, 4)])
    message = ranks.handovers[0].message
    assert not (message and Handle.decode(memoryview(message)).lends)
    ranks.take(1)
    found = _dicts(ranks.handovers[1].samples_from(0, borrow=True))
    assert all(
        same(sample[key], flat[key])
        for sample, flat in zip(found, ranks.expected[1], strict=True)
        for key in flat
    )


def test_a_node_that_may_not_read_packs() -> None:
    assert _lent(_ranks(lends=False)) == [False, False]


def test_large_samples_are_packed_where_threads_copy_faster() -> None:
    large = [InPlace({"x": filled(torch.uint8, 1 << 21)}, is_pageable=True)] * 4
    for threads, lent in ((1, True), (2, False)):
        with mock.patch("torch.get_num_threads", return_value=threads):
            assert _lent(_ranks([large, large])) == [lent] * 2


# Ranks that are processes.


def _offer(rank: int, count: int) -> Offer:
    return Offer(samples=_samples(rank, count), slot_counts=[count], costs=[1.0] * count)


def _given(offer: Offer) -> Offer:
    return offer


def _windows(rank: int, world_size: int, packs: int) -> list[Any]:
    """Exchange windows; return which rank lends, and the ids that arrived."""
    with mock.patch.dict(os.environ, {VARIABLE: "packed"} if rank == packs else {}):
        exchange = exchange_over_world(rank, world_size)
        seen: list[Any] = []
        for count in (3, 6):
            offer = _offer(rank, count)
            transfer = exchange.prepare(exchange.agree(partial(_given, offer)), round_robin)
            transfer.launch()
            with transfer.borrowed() as arrivals:
                if rank == world_size - 1:
                    time.sleep(0.2)  # meanwhile the others are done
                seen.append([_ids(arrival.sample).tolist() for arrival in arrivals])
            for sample in offer.samples:
                _ids(sample).fill_(-1)  # as a loader that uses its memory again
    return [exchange._node.lends, seen]


@pytest.mark.parametrize("packs", [-1, 1], ids=["lent", "packed"])
def test_every_rank_gets_what_the_others_had(ranks: RankPools, packs: int) -> None:
    results = ranks(3).run(_windows, packs)
    assert [lends for lends, _ in results] == [packs < 0] * 3
    for rank, (_, seen) in enumerate(results):
        for count, arrived in zip((3, 6), seen, strict=True):
            everything = [_flat(source, i)["ids"] for source in range(3) for i in range(count)]
            assert arrived == [ids.tolist() for ids in everything[rank::3]]


def _fails_while_it_has_borrowed(rank: int, world_size: int) -> Any:
    exchange = exchange_over_world(rank, world_size)
    transfer = exchange.prepare(exchange.agree(partial(_offer, rank, 3)), round_robin)
    transfer.launch()
    try:
        with transfer.borrowed() as arrivals:
            if rank == 0:
                raise KeyError("this rank's own")
            time.sleep(0.2)
            return [_ids(arrival.sample).tolist() for arrival in arrivals]
    except KeyError as error:
        return str(error)


def test_who_fails_itself_still_lends(ranks: RankPools) -> None:
    first, *others = ranks(3).run(_fails_while_it_has_borrowed)
    assert first == '"this rank\'s own"'
    assert [len(arrived) for arrived in others] == [3, 3]


def _gives_up(rank: int, world_size: int, how: str) -> str:
    """Rank 0 waits for its readers no longer, and writes to what it lent; rank 1 comes late."""
    patience = Patience(timeout_s=0.3 if rank == 0 else 20.0)
    exchange = exchange_over_world(rank, world_size, patience=patience)
    offer = _offer(rank, 3)
    transfer = exchange.prepare(exchange.agree(partial(_given, offer)), round_robin)
    transfer.launch()
    if rank == 0 and how == "settle":
        transfer.settle(grace_s=0.1)
    elif rank == 0:
        with pytest.raises(ExchangeTimeoutError, match="rank 1"):
            transfer.wait()
    else:
        time.sleep(1.0)
        with transfer.borrowed() as arrivals, pytest.raises(PeerLostError) as caught:
            _dicts(arrival.sample for arrival in arrivals)
        return str(caught.value)
    for sample in offer.samples:
        _ids(sample).fill_(-1)
    return ""


@pytest.mark.parametrize("how", ["settle", "timeout"])
def test_nobody_gets_what_is_not_lent_any_more(ranks: RankPools, how: str) -> None:
    _, error = ranks(2).run(_gives_up, how)
    assert "rank 0 while moving samples" in error
    assert "given up its samples" in error


def _dies(rank: int, world_size: int) -> list[str]:
    exchange = exchange_over_world(rank, world_size)
    transfer = exchange.prepare(exchange.agree(partial(_offer, rank, 3)), round_robin)
    transfer.launch()
    if rank == 2:
        time.sleep(0.5)  # until all have taken what it lends
        os._exit(7)
    seen = []
    started = time.monotonic()
    try:
        with transfer.borrowed() as arrivals:
            time.sleep(1.0)
            _dicts(arrival.sample for arrival in arrivals)
    except PeerLostError as error:
        seen = [f"{error.ranks} {time.monotonic() - started < 5}"]
    return seen


def test_a_lender_that_dies_is_lost_on_all_at_once() -> None:
    outcomes = spawn(_dies, 3, cleanup=False)
    assert [outcome.result for outcome in outcomes[:2]] == [["(2,) True"]] * 2
    assert outcomes[2].exit_code == 7
