"""Rounds between the processes of one machine: sockets, who connects, and what may go wrong."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, cast
from unittest import mock

import pytest
import torch.distributed as dist

from evenstep.exchange import (
    ExchangeError,
    ExchangeTimeoutError,
    Patience,
    PeerLostError,
    ProtocolError,
    SampleExchange,
)
from evenstep.exchange import local_channel as module
from evenstep.exchange.local_channel import _HEAD, _PART_BYTES, LocalChannel
from evenstep.exchange.local_links import Links, _name
from tests.exchange.samples import exchange_over_world, offer_of, over_network, round_robin
from tests.harness import RankPools

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SEQPACKET is of Linux")

GROUP = cast("dist.ProcessGroup", None)
DOING = "testing"


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    with mock.patch.object(module, "check_alive"):
        yield


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _channels(num_ranks: int) -> list[LocalChannel]:
    ends: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for one, other in combinations(range(num_ranks), 2):
        ends[one][other], ends[other][one] = _pair()
    return [LocalChannel(rank, ends[rank]) for rank in range(num_ranks)]


def _gather(channel: LocalChannel, message: bytes, timeout_s: float = 20.0) -> list[bytes]:
    found = channel.gather(message, GROUP, Patience(timeout_s=timeout_s), doing=DOING)
    return [bytes(view) for view in found]


def _at_once(works: list[Callable[[], Any]]) -> list[Any]:
    """Run each in a thread of its own."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        results[index] = works[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def _message(rank: int, number: int, nbytes: int) -> bytes:
    return (bytes([rank + 1, number + 1]) * (nbytes // 2 + 1))[:nbytes]


SIZES = [1, _PART_BYTES - 1, _PART_BYTES, _PART_BYTES + 1, 3 * _PART_BYTES, 2_000_000, 7]


def test_messages_of_any_size_reach_all_in_rank_order() -> None:
    def rounds(rank: int, channel: LocalChannel) -> list[list[bytes]]:
        return [
            _gather(channel, _message(rank, number, SIZES[(number + rank) % len(SIZES)]))
            for number in range(len(SIZES))
        ]

    channels = _channels(3)
    told = _at_once([lambda r=r, c=c: rounds(r, c) for r, c in enumerate(channels)])  # type: ignore[misc]
    expected = [
        [_message(rank, number, SIZES[(number + rank) % len(SIZES)]) for rank in range(3)]
        for number in range(len(SIZES))
    ]
    assert told == [expected] * 3


class _Interrupting:
    """A connection whose calls do what they do, and then are interrupted at one of them."""

    def __init__(self, connection: socket.socket, at: int) -> None:
        self._connection, self._left = connection, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt

    def send(self, *args: Any) -> int:
        sent = self._connection.send(*args)
        self._count()
        return sent

    def recv(self, *args: Any) -> bytes:
        data = self._connection.recv(*args)
        self._count()
        return data


def test_an_interrupt_behind_any_call_loses_nothing() -> None:
    sizes, at, interrupted = [10, 5 * _PART_BYTES, 20, 1], 0, True
    while interrupted:
        at, interrupted = at + 1, False
        here, there = _pair()
        channel = LocalChannel(0, {1: cast("Any", _Interrupting(here, at))})
        other = LocalChannel(1, {0: there})

        def play(channel: LocalChannel = channel) -> list[list[bytes]]:
            nonlocal interrupted
            found = []
            for number, nbytes in enumerate(sizes):
                try:
                    found.append(_gather(channel, _message(0, number, nbytes)))
                except KeyboardInterrupt:
                    interrupted = True
                    found.append(_gather(channel, _message(0, number, nbytes)))
            return found

        def answer(other: LocalChannel = other) -> list[list[bytes]]:
            return [_gather(other, _message(1, n, nbytes)) for n, nbytes in enumerate(sizes)]

        expected = [[_message(rank, n, nb) for rank in range(2)] for n, nb in enumerate(sizes)]
        assert _at_once([play, answer]) == [expected] * 2
    assert at > 4 * len(sizes)


@pytest.mark.parametrize("unread", [False, True])
def test_what_a_peer_sent_before_its_end_is_heard(unread: bool) -> None:
    here, there = _pair()
    channel = LocalChannel(0, {1: here})
    if unread:  # else this rank's message is not even sent when the peer ends
        with pytest.raises(ExchangeTimeoutError):
            _gather(channel, b"first", timeout_s=0.1)
    there.send(_HEAD.pack(1, 4, 0) + b"last")
    there.close()
    assert _gather(channel, b"first") == [b"first", b"last"]
    with pytest.raises(PeerLostError, match=r"rank 1 while testing.*its end of the connection"):
        _gather(channel, b"second")


def test_a_peer_that_ends_in_the_middle_is_lost() -> None:
    here, there = _pair()
    channel = LocalChannel(0, {1: here})
    there.send(_HEAD.pack(1, 8, 0) + b"half")
    there.close()
    with pytest.raises(PeerLostError) as caught:
        _gather(channel, b"whole")
    assert caught.value.ranks == (1,)


def test_a_peer_whose_process_has_ended_is_lost_though_its_connection_lives() -> None:
    here, there = _pair()  # `there` is in a child that a rank has forked, say
    channel = LocalChannel(0, {1: here})
    channel.has_ended = lambda peer: peer == 1
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="the process has ended"):
        _gather(channel, b"x")
    assert time.monotonic() - started < 2.0
    there.close()


def test_a_peer_that_does_not_come_is_named_at_the_timeout() -> None:
    here, there = _pair()
    channel = LocalChannel(0, {1: here})
    with pytest.raises(ExchangeTimeoutError) as caught:
        _gather(channel, b"x" * 5_000_000, timeout_s=0.3)  # more than a socket holds
    assert caught.value.ranks == (1,)
    there.close()


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"short", "sent a packet of 5 bytes"),
        (_HEAD.pack(2, 1, 0) + b"x", "sent byte 0 of round 2 out of turn"),
        (_HEAD.pack(1, 9, 4) + b"x", "sent byte 4 of round 1 out of turn"),
        (_HEAD.pack(1, 1, 0) + b"xy", "announced a message of 1 bytes"),
        (_HEAD.pack(1, 0, 0), "announced a message of 0 bytes"),
        (_HEAD.pack(1, 1 << 60, 0) + b"x", f"announced a message of {1 << 60} bytes"),
    ],
)
def test_what_is_no_message_is_refused(packet: bytes, why: str) -> None:
    here, there = _pair()
    channel = LocalChannel(0, {1: here})
    there.send(packet)
    with pytest.raises(ProtocolError, match=f"rank 1 {why} in testing"):
        _gather(channel, b"x")
    there.close()


def test_only_the_ranks_processes_are_let_in() -> None:
    secret = os.urandom(16)
    links = Links(0, [secret, b""], [-1, os.getpid()])
    links.listen()
    name = _name(secret)
    code = (
        "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        f"s.connect({name!r}); print(flush=True); input()"
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert stranger.stdout is not None
    stranger.stdout.readline()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
        own.connect(name)
        channel = links.finish([memoryview(b"1")] * 2)
        assert channel is not None
        own.send(_HEAD.pack(1, 8, 0) + b"it is me")
        assert _gather(channel, b"good") == [b"good", b"it is me"]
        assert own.recv(100) == _HEAD.pack(1, 4, 0) + b"good"
    stranger.communicate(b"\n", timeout=20)


def test_a_connection_that_cannot_be_taken_is_an_error_here() -> None:
    links = Links(0, [os.urandom(16), b""], [-1, os.getpid()])
    links.listen()
    with pytest.raises(ExchangeError, match=r"cannot take the connections of its node: .*ulimit"):
        links.finish([memoryview(b"1")] * 2)


def test_a_message_that_is_too_long_is_refused_on_every_rank() -> None:
    def told(channel: LocalChannel, nbytes: int) -> str:
        with pytest.raises(ProtocolError) as caught:
            _gather(channel, bytes(nbytes))
        return str(caught.value)

    with mock.patch.object(module, "MAX_MESSAGE_BYTES", 1000):
        one, other = _channels(2)
        said = _at_once([lambda: told(one, 10), lambda: told(other, 1001)])
    assert said[0] == said[1]
    assert said[0].startswith("rank 1 announced a message of 1001 bytes in testing")


def test_a_large_message_takes_no_longer_than_its_bytes() -> None:
    channels = _channels(2)
    message = bytes(40_000_000)
    started = time.thread_time_ns(), time.monotonic()
    found = _at_once([lambda c=c: _gather(c, message) for c in channels])  # type: ignore[misc]
    assert found == [[message] * 2] * 2
    assert time.monotonic() - started[1] < 3.0


def test_what_was_sent_before_a_timeout_is_what_was_said() -> None:
    one, other = _channels(2)
    with pytest.raises(ExchangeTimeoutError):
        _gather(one, b"before", timeout_s=0.1)
    assert _gather(other, b"late") == [b"before", b"late"]
    assert _gather(one, b"after") == [b"before", b"late"]


# spawned ranks


_AS_IS: Any = contextlib.nullcontext()


def _window(rank: int, exchange: Any) -> int:
    offer = offer_of(rank, [3])
    transfer = exchange.prepare(exchange.agree(lambda: offer), round_robin)
    transfer.launch()
    return len(transfer.wait())


def _kinds(rank: int, world_size: int) -> list[tuple[str, int]]:
    def kind_of(exchange: SampleExchange) -> tuple[str, int]:
        served = sum(_window(rank, exchange) for _ in range(3))
        channels = exchange._rounds._channels
        assert channels is not None
        return type(channels.current).__name__, served

    exchanges = [exchange_over_world(rank, world_size) for _ in range(4)]
    found = [kind_of(exchanges[0])]
    with over_network():
        found.append(kind_of(exchanges[1]))
    with mock.patch.object(Links, "connect", return_value=(None, b"0")) if rank == 1 else _AS_IS:
        found.append(kind_of(exchanges[2]))
    with mock.patch.object(Links, "listen") if rank == world_size - 1 else _AS_IS:
        found.append(kind_of(exchanges[3]))
    return found


def test_a_group_inside_a_node_leaves_gloo_if_all_are_connected(ranks: RankPools) -> None:
    for found in ranks(3).run(_kinds, deadline_s=60.0):
        assert [kind for kind, _ in found] == ["LocalChannel", "Channel", "Channel", "Channel"]
        assert {served for _, served in found} == {9}


def _interrupted(rank: int, world_size: int, where: str) -> tuple[str, float]:
    exchange = exchange_over_world(rank, world_size)
    waits = [0]
    wait = Patience.wait

    def interrupted(self: Patience, *args: Any, **more: Any) -> None:
        waits[0] += 1
        if waits[0] == (3 if where == "meeting" else 4):  # behind an offer, and maybe a meeting
            raise KeyboardInterrupt
        wait(self, *args, **more)

    patched: Any = mock.patch.object(Patience, "wait", interrupted)
    if where in {"connect", "_accept"}:
        patched = mock.patch.object(Links, where, side_effect=KeyboardInterrupt)
    alone = where == "meeting" and rank == 0
    with patched if rank == 1 else over_network() if alone else _AS_IS:
        started = time.monotonic()
        try:
            _window(rank, exchange)
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt too
            if rank == 1:
                exchange.leave(error)
            return type(error).__name__, time.monotonic() - started
    return "", 0.0


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("meeting", "PeerFailedError"),
        ("connect", "PeerFailedError"),
        ("waiting", "PeerFailedError"),  # for the others to connect
        ("_accept", "PeerLostError"),
    ],
)
def test_who_is_interrupted_while_meeting_tells_its_peers(
    ranks: RankPools, where: str, told: str
) -> None:
    found = ranks(3).run(_interrupted, where, deadline_s=60.0)
    assert [kind for kind, _ in found] == [told, "KeyboardInterrupt", told]
    assert max(took for _, took in found) < 5.0


def _fails_to_read(rank: int, world_size: int) -> list[str]:
    exchange = exchange_over_world(rank, world_size)
    found = []
    broken = mock.patch("evenstep.exchange.node._is_readable", side_effect=MemoryError("full"))
    with broken if rank == 1 else _AS_IS:
        try:
            _window(rank, exchange)
        except Exception as error:  # noqa: BLE001 - of any kind
            found.append(type(error).__name__)
    found.append(str(_window(rank, exchange)))
    return found


def test_ranks_are_in_step_after_one_could_not_meet(ranks: RankPools) -> None:
    told = ranks(3).run(_fails_to_read, deadline_s=60.0)
    assert told == [["PeerFailedError", "3"], ["MemoryError", "3"], ["PeerFailedError", "3"]]
