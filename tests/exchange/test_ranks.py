"""Living ranks: what arrives, and how ranks fail together and go on."""

import gc
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from evenstep.exchange import (
    Agreement,
    ExchangeError,
    Offer,
    Patience,
    SampleExchange,
)
from tests.exchange.samples import (
    exchange_over_world,
    gloo_group,
    offer_of,
    on_machine,
    over_network,
    round_robin,
    sample,
    shown,
)
from tests.harness import RankPools

Told = tuple[str, str]
"""Type and text of an exception."""


def _told(work: Callable[[], object]) -> Told:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - what it is, is the question
        return type(error).__name__, str(error)
    return "", ""


def _window(exchange: SampleExchange, offer: Offer, plan: Any = round_robin) -> list[Any]:
    transfer = exchange.prepare(exchange.agree(lambda: offer), plan)
    transfer.launch()
    return [(slot, position, shown(flat)) for slot, position, flat in transfer.wait()]


def _expected(offers: Sequence[Offer], rank: int) -> list[Any]:
    """What `round_robin` brings to `rank`, by definition."""
    index, arrived = 0, []
    for slot in range(max(len(offer.slot_counts) for offer in offers)):
        position = 0
        for offer in offers:
            counts = offer.slot_counts
            for i in range(counts[slot] if slot < len(counts) else 0):
                if index % len(offers) == rank:
                    flat = offer.samples[sum(counts[:slot]) + i]
                    arrived.append((slot, position, shown(flat)))
                index, position = index + 1, position + 1
    return arrived


COUNTS: tuple[list[int], ...] = ([3, 2], [], [0, 4, 1])  # ragged, and a rank that brings nothing


WAYS: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    "memory": lambda _rank: nullcontext(),
    "network": lambda _rank: over_network(),
    "memory but for one rank": lambda rank: over_network() if rank == 1 else nullcontext(),
    "memory within two nodes": lambda rank: on_machine(b"first" if rank < 2 else b"second"),
}


def _windows(
    rank: int, world_size: int, way: str, chunk_bytes: int
) -> tuple[list[list[Any]], tuple[int, ...]]:
    exchange = exchange_over_world(rank, world_size, chunk_bytes=chunk_bytes)
    with WAYS[way](rank):
        windows = [_window(exchange, offer_of(rank, COUNTS[(rank + w) % 3])) for w in range(4)]
    return windows, exchange._node.hosts


@pytest.mark.parametrize(
    ("way", "chunk_bytes", "hosts"),
    [
        ("memory", 1 << 30, (0, 0, 0)),
        ("network", 1 << 30, (0, 1, 2)),
        ("network", 40, (0, 1, 2)),
        ("memory but for one rank", 1 << 30, (0, 1, 0)),
        ("memory within two nodes", 40, (0, 0, 2)),
    ],
)
def test_windows_arrive_whole_whatever_the_way(
    ranks: RankPools, way: str, chunk_bytes: int, hosts: tuple[int, ...]
) -> None:
    arrived, found = zip(*ranks(3).run(_windows, way, chunk_bytes), strict=True)
    assert found == (hosts,) * 3
    for w in range(4):
        offers = [offer_of(rank, COUNTS[(rank + w) % 3]) for rank in range(3)]
        assert [mine[w] for mine in arrived] == [_expected(offers, rank) for rank in range(3)]


def test_one_rank_needs_no_group() -> None:
    exchange = SampleExchange(rank=0, world_size=1, control_group=None, payload_group=None)
    exchange.compare_settings()
    offer = offer_of(0, [3, 1])
    assert _window(exchange, offer) == _expected([offer], 0)
    with pytest.raises(ValueError, match="control group is needed for 2 ranks; got None"):
        SampleExchange(rank=0, world_size=2, control_group=None, payload_group=None)
    with pytest.raises(ValueError, match="chunk_bytes is 7; it must be at least 8"):
        SampleExchange(rank=0, world_size=1, control_group=None, payload_group=None, chunk_bytes=7)
    with pytest.raises(ValueError, match="timeout_s is 0; it must be a positive number"):
        Patience(timeout_s=0)


def _stay(agreement: Agreement) -> Any:
    from evenstep.balance import Route

    return [(i, Route(0, rank, i)) for i, (rank, _) in enumerate(agreement.holders.tolist())]


def _all_to_rank_1(agreement: Agreement) -> Any:
    from evenstep.balance import Route

    return [(i, Route(0, 1, i)) for i in range(len(agreement.holders))]


def _first_to_all(agreement: Agreement) -> Any:
    from evenstep.balance import Route

    everywhere = [(0, Route(0, rank, 0)) for rank in range(len(agreement.reports))]
    return everywhere + [(i, Route(0, 2, i)) for i in range(1, len(agreement.holders))]


def _odd_routes(rank: int, world_size: int) -> list[list[list[Any]]]:
    exchange = exchange_over_world(rank, world_size)
    empty = Offer(samples=[{"none": None}], slot_counts=[1], costs=[0.0])
    return [
        _window(exchange, offer_of(rank, [2]), _stay),
        _window(exchange, offer_of(rank, [2]), _all_to_rank_1),
        _window(exchange, offer_of(rank, [2]), _first_to_all),
        _window(exchange, offer_of(rank, [])),
        _window(exchange_over_world(rank, world_size), empty),
    ]


def test_nothing_to_send_on_some_or_all_sides(ranks: RankPools) -> None:
    stay, to_one, everywhere, nothing, no_bytes = zip(*ranks(3).run(_odd_routes), strict=True)
    all_samples = [
        (0, 2 * rank + i, shown(offer_of(rank, [2]).samples[i]))
        for rank in range(3)
        for i in (0, 1)
    ]
    assert stay == tuple(all_samples[2 * rank : 2 * rank + 2] for rank in range(3))
    assert to_one == ([], all_samples, [])
    assert everywhere == ([all_samples[0]], [all_samples[0]], all_samples)
    assert nothing == ([], [], [])
    assert no_bytes == tuple([(0, rank, {"none": None})] for rank in range(3))


def _failures(rank: int, world_size: int) -> list[Told]:
    """Rank 1 fails in every way that its own code can; the same exchange goes on after each."""
    exchange = exchange_over_world(rank, world_size)
    me = rank == 1

    def failing_offer() -> Offer:
        if me:
            raise LookupError("the loader is broken: " + "\u00e4" * 5000)
        return offer_of(rank, [1])

    def failing_plan(agreement: Agreement) -> Any:
        if me:
            raise ArithmeticError("no plan")
        return round_robin(agreement)

    def failing_check(arriving: Sequence[Any], layouts: Sequence[Any]) -> None:
        assert len(arriving) == len(layouts) > 0
        if me:
            raise ValueError("these do not fit together")

    def cost_fails_at(index: int) -> Offer:
        costs = [1.0] * 5
        if me:
            costs[index] = float("nan")
        return replace(offer_of(rank, [5]), costs=costs)

    told = [_told(lambda: exchange.agree(failing_offer)) for _ in range(2)]
    told += [_told(partial(exchange.agree, partial(cost_fails_at, i))) for i in (0, 2, 4)]
    told.append(_told(lambda: _window(exchange, offer_of(rank, [2]), failing_plan)))
    agreement = exchange.agree(lambda: offer_of(rank, [2]))
    told.append(_told(lambda: exchange.prepare(agreement, round_robin, check=failing_check)))
    assert len(_window(exchange, offer_of(rank, [2]))) == 2
    return told


def test_one_rank_fails_and_all_do_in_the_same_round(ranks: RankPools) -> None:
    results = ranks(3).run(_failures)
    own = [*results[1]]
    assert [kind for kind, _ in own] == [
        *["LookupError"] * 2,
        *["ValueError"] * 3,
        "ArithmeticError",
        "ValueError",
    ]
    assert [text[:27] for _, text in own[2:5]] == [
        f"the cost of sample {i} is nan"[:27] for i in (0, 2, 4)
    ]
    for peers in (results[0], results[2]):
        for (kind, text), (own_kind, own_text) in zip(peers, own, strict=True):
            assert kind == "PeerFailedError"
            assert re.match(rf"failed while .*\w on rank 1: {own_kind}: ", text)
            assert own_text[:100] in text
        assert "more characters on that rank" in peers[0][1]
        assert [text.split(" on rank")[0] for _, text in peers] == [
            *["failed while agreeing on a window"] * 5,
            *["failed while committing to a plan"] * 2,
        ]


def _mismatches(rank: int, world_size: int) -> dict[str, Told]:
    told = {}

    def other_plan(agreement: Agreement) -> Any:
        deliveries = round_robin(agreement)
        if rank == 2:
            deliveries[0], deliveries[3] = (0, deliveries[3][1]), (3, deliveries[0][1])
        return deliveries

    exchange = exchange_over_world(rank, world_size)
    told["plan"] = _told(lambda: _window(exchange, offer_of(rank, [2]), other_plan))
    agreement = exchange.agree(lambda: offer_of(rank, [2]))
    if rank == 1:
        agreement.nbytes[agreement.holders[:, 0] != 1] += (
            8  # rank 1 would send or expect other bytes than its peers
        )
    told["splits"] = _told(lambda: exchange.prepare(agreement, round_robin))
    extra = {**sample(rank, 0), **({"extra": sample(0, 0)["ids"]} if rank == 2 else {})}
    told["schema"] = _told(
        lambda: exchange.agree(lambda: Offer(samples=[extra], slot_counts=[1], costs=[1.0]))
    )
    assert len(_window(exchange, offer_of(rank, [2]))) == 2  # ranks are still in step
    settings = {"n_groups": 6, "cost": "patches" if rank == 0 else "tokens"}
    told["settings"] = _told(exchange_over_world(rank, 3, settings=settings).compare_settings)
    late = exchange_over_world(rank, 3, settings=settings)
    told["fingerprint"] = _told(lambda: late.agree(lambda: offer_of(rank, [1])))
    assert _told(lambda: late.agree(lambda: offer_of(rank, [1]))) == told["fingerprint"]
    fewer = exchange_over_world(rank, 3, settings={"a": 1} if rank else {})
    told["sets"] = _told(fewer.compare_settings)
    calls = exchange_over_world(rank, world_size)
    told["calls"] = _told(
        calls.compare_settings if rank == 0 else lambda: calls.agree(lambda: offer_of(rank, [1]))
    )
    return told


def test_what_must_agree_and_does_not_raises_on_all(ranks: RankPools) -> None:
    results = ranks(3).run(_mismatches)
    assert results[0] == results[1] == results[2]
    expected = {
        "plan": ("MismatchError", "rank 2 came to another plan than rank 0"),
        "splits": ("MismatchError", "rank 1 came to another plan than rank 0"),
        "schema": ("MismatchError", "field 'extra' is missing on rank 0 and 1-dim torch.int64 on"),
        "settings": ("MismatchError", "rank 0 has cost = 'patches', rank 1 has cost = 'tokens'"),
        "fingerprint": ("MismatchError", "rank 0 has cost = 'patches', rank 1 has cost = 'tokens'"),
        "sets": ("MismatchError", "ranks must be set alike|ranks have different sets"),
        "calls": ("ProtocolError", "the ranks made different calls"),
    }
    assert results[0].keys() == expected.keys()
    for name, (kind, text) in expected.items():
        assert results[0][name][0] == kind, name
        assert re.search(text, results[0][name][1]), results[0][name]


def _ends(rank: int, world_size: int) -> dict[str, Any]:
    """The end of data is seen by all; then one rank leaves, or is slow, or stops waiting."""
    import torch.distributed as dist

    seen: dict[str, Any] = {}
    exchange = exchange_over_world(rank, world_size)
    agreement = exchange.agree(lambda: offer_of(rank, [1], exhausted=rank == 2))
    seen["exhausted"] = [report.exhausted for report in agreement.reports]
    if rank == 0:
        time.sleep(1.0)  # slow, and no error
    seen["slow"] = len(_window(exchange, offer_of(rank, [1])))
    if rank == 1:
        exchange.leave()
        exchange.leave()
    else:
        seen["left"] = _told(lambda: exchange.agree(lambda: offer_of(rank, [1])))
        exchange.leave()  # all know that it is over: nobody waits
    second = exchange_over_world(rank, world_size)
    agreement = second.agree(lambda: offer_of(rank, [1]))
    if rank == 1:
        second.leave(RuntimeError("out of disk"))
    else:
        seen["left in the middle"] = _told(lambda: second.prepare(agreement, round_robin))
    stopping = Patience(timeout_s=60.0, should_stop=lambda: rank == 1)
    stopped = exchange_over_world(rank, world_size, patience=stopping)
    if rank == 1:
        started = time.monotonic()
        seen["stopped"] = _told(lambda: stopped.agree(lambda: offer_of(rank, [1])))
        seen["again"] = _told(lambda: stopped.agree(lambda: offer_of(rank, [1])))
        seen["stop_s"] = time.monotonic() - started
    dist.barrier()
    if rank != 1:
        stopped.agree(lambda: offer_of(rank, [1]))  # its message had been sent
    return seen


def test_ranks_end_leave_and_stop(ranks: RankPools) -> None:
    first, second, third = ranks(3).run(_ends)
    for seen in (first, second, third):
        assert seen["exhausted"] == [False, False, True]
        assert seen["slow"] == 1
    assert (
        first["left"]
        == third["left"]
        == (
            "PeerFailedError",
            LEFT,
        )
    )
    assert (
        first["left in the middle"]
        == third["left in the middle"]
        == (
            "PeerFailedError",
            "failed while committing to a plan on rank 1: RuntimeError: out of disk",
        )
    )
    assert second["stopped"][0] == "ExchangeStoppedError"
    assert second["again"] == second["stopped"]
    assert second["stop_s"] < 10


LEFT = (
    "failed while agreeing on a window on rank 1: ExchangeStoppedError: this rank has left the "
    "exchange"
)


def _missing(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 2 takes no part: by the exchange's timeout, and by a shorter one of the group."""
    import torch.distributed as dist

    logs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())  # type: ignore[method-assign] # a sink
    logging.getLogger("evenstep.exchange").addHandler(handler)
    late = exchange_over_world(rank, world_size, patience=Patience(timeout_s=1.0))
    group = gloo_group(timeout=timedelta(seconds=1))
    short = SampleExchange(
        rank=rank, world_size=world_size, control_group=group, payload_group=group
    )
    told = {}
    if rank < 2:
        told["timeout"] = _told(lambda: late.agree(lambda: offer_of(rank, [1])))
        told["group"] = _told(lambda: short.agree(lambda: offer_of(rank, [1])))
    logging.getLogger("evenstep.exchange").removeHandler(handler)
    dist.barrier()
    if rank == 2:  # at last; nobody's collective shall be left over at the exit
        late.agree(lambda: offer_of(rank, [1]))
    return {**told, "logs": logs}


def test_a_rank_that_takes_no_part_is_named_at_the_timeout(ranks: RankPools) -> None:
    first, second, _ = ranks(3).run(_missing)
    for seen in (first, second):
        kind, text = seen["timeout"]
        assert kind == "ExchangeTimeoutError"
        assert text.startswith("rank 2 took no part in agreeing on a window within 1 s (timeout_s)")
        assert re.match("agreeing on a window: rank 2 has kept the others waiting", seen["logs"][0])
        assert seen["group"][0] == "ExchangeTimeoutError"
        assert "the timeout of the process group, shorter than timeout_s" in seen["group"][1]


def _forked(rank: int, world_size: int) -> int:
    exchange = exchange_over_world(rank, world_size)
    _window(exchange, offer_of(rank, [1]))
    child = os.fork()
    if child == 0:
        told = _told(lambda: exchange.agree(lambda: offer_of(rank, [1])))
        os._exit(0 if told[0] == "ExchangeError" and "by fork()" in told[1] else 1)
    _, status = os.waitpid(child, 0)
    assert len(_window(exchange, offer_of(rank, [1]))) == 1  # the parent goes on
    return os.waitstatus_to_exitcode(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this platform")
def test_a_forked_copy_refuses_to_work(ranks: RankPools) -> None:
    assert ranks(3).run(_forked) == [0, 0, 0]


def _large_round(rank: int, world_size: int) -> int:
    exchange = exchange_over_world(rank, world_size)
    sizes = [3000, 2, 400, 1]
    return sum(len(_window(exchange, offer_of(rank, [size]))) for size in sizes)


def test_messages_grow_and_shrink(ranks: RankPools) -> None:
    assert ranks(3).run(_large_round) == [3403] * 3


def _opens_another(rank: int, world_size: int) -> Told:
    control, payload = gloo_group(), gloo_group()
    exchange = partial(
        SampleExchange,
        rank=rank,
        world_size=world_size,
        control_group=control,
        payload_group=payload,
    )
    first = exchange()
    first.compare_settings()
    for size in (3, 3000, 3):  # long frames, then shorter ones
        first.agree(partial(offer_of, rank, [size]))
    if rank == 1:
        return _told(exchange(settings={"a": 2}).compare_settings)
    return _told(lambda: first.agree(lambda: offer_of(rank, [3])))


def test_another_exchange_on_a_group_in_use_is_told_and_kills_nobody(ranks: RankPools) -> None:
    for kind, text in ranks(3).run(_opens_another):
        assert kind == "ProtocolError"
        assert "the ranks made different calls" in text


def _freed(rank: int, world_size: int) -> bool:
    import torch.distributed as dist

    control = gloo_group()
    exchange = SampleExchange(
        rank=rank, world_size=world_size, control_group=control, payload_group=control
    )
    exchange.compare_settings()
    reference = weakref.ref(control)
    dist.destroy_process_group(control)
    del exchange, control
    gc.collect()
    return reference() is None


def test_a_destroyed_group_is_freed(ranks: RankPools) -> None:
    assert ranks(3).run(_freed) == [True] * 3


def _destroyed(rank: int, world_size: int) -> Told:
    import torch.distributed as dist

    control, payload = gloo_group(), gloo_group()
    exchange = SampleExchange(
        rank=rank, world_size=world_size, control_group=control, payload_group=payload
    )
    with over_network():
        transfer = exchange.prepare(exchange.agree(lambda: offer_of(rank, [3])), round_robin)
    dist.destroy_process_group(payload)
    return _told(transfer.launch)


def test_a_destroyed_group_is_a_clear_error(ranks: RankPools) -> None:
    for kind, text in ranks(3).run(_destroyed):
        assert kind == "ExchangeError"
        assert "destroyed while or before moving samples; shut the exchange down before" in text


def test_errors_have_one_base_class() -> None:
    from evenstep import exchange

    for name in exchange.__all__:
        value = getattr(exchange, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, ExchangeError)
            assert issubclass(value, RuntimeError)
