"""Plans as moves: pure, for all ranks at once."""

import random
from array import array
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import Route, RouteColumns, plan_route
from evenstep.exchange import Moves, Patience, PayloadGroup, Placement, plan_moves
from evenstep.exchange.payload import Payload


def _moves(
    deliveries: list[tuple[int, Route]] | RouteColumns,
    holders: list[tuple[int, int]],
    nbytes: list[int],
    world_size: int,
) -> list[Moves]:
    return [
        plan_moves(
            deliveries,
            holders=torch.tensor(holders, dtype=torch.int64).view(-1, 2),
            nbytes=torch.tensor(nbytes, dtype=torch.int64),
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]


def test_two_ranks_swap_a_sample_and_keep_one() -> None:
    route = [Route(0, 0, 1), Route(0, 1, 3), Route(0, 1, 2), Route(0, 0, 0)]
    first, second = _moves(
        [*enumerate(route)], [(0, 0), (0, 1), (1, 0), (1, 1)], [8, 16, 24, 40], 2
    )
    assert first.kept == (Placement(0, 1, 0),)
    assert first.sends == ((), (Placement(0, 3, 1),))
    assert first.receives == ((), (Placement(0, 0, 1),))
    assert (first.send_splits, first.recv_splits) == ((0, 16), (0, 40))
    assert (second.send_splits, second.recv_splits) == ((40, 0), (16, 0))
    assert first.shift_peaks == second.shift_peaks == (0, 40)
    assert first.peak_total == second.peak_total == 40
    assert first.digest == second.digest


@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
def test_large_windows_are_planned_as_small_ones_are(hosts: list[int] | None) -> None:
    columns = plan_route([[float(i % 7) for i in range(24)] for _ in range(30)], 3, 3)
    holders = torch.tensor([[j // 8, 8 * slot + j % 8] for slot in range(30) for j in range(24)])
    nbytes = 8 * torch.arange(len(holders))

    def plan(rank: int, columns: RouteColumns = columns) -> Moves:
        return plan_moves(
            columns, holders=holders, nbytes=nbytes, rank=rank, world_size=3, hosts=hosts
        )

    by_operators = [plan(rank) for rank in range(3)]
    broken = columns._replace(owner_rank=array("q", [3, *columns.owner_rank[1:]]))
    with pytest.raises(RuntimeError, match="owner ranks 0 to 3 in a group of 3"):
        plan(0, broken)
    with mock.patch("evenstep.exchange.moves._FEW", len(holders)):
        assert [plan(rank) for rank in range(3)] == by_operators
        with pytest.raises(RuntimeError, match="owner ranks 0 to 3 in a group of 3"):
            plan(0, broken)


@pytest.mark.parametrize("name", ["dst_slot", "owner_rank", "canonical_pos"])
@pytest.mark.parametrize("change", [1, -1])
def test_columns_of_unequal_length_are_refused(name: str, change: int) -> None:
    columns = plan_route([[1.0] * 4], 2, 2)
    column = getattr(columns, name)
    broken = columns._replace(**{name: (column + column)[: len(column) + change]})
    with pytest.raises(RuntimeError, match=r"columns have \[.*\] entries"):
        _moves(broken, [(0, 0), (0, 1), (1, 0), (1, 1)], [8] * 4, 2)


@pytest.mark.parametrize(("held", "sizes"), [((3, 2), 4), ((4, 2), 3), ((4, 3), 4), ((4,), 4)])
def test_holders_and_sizes_of_other_shapes_are_refused(held: tuple[int, ...], sizes: int) -> None:
    columns = plan_route([[1.0] * 4], 2, 2)
    with pytest.raises(ValueError, match=r"holders is \[.*\] and nbytes"):
        plan_moves(
            columns,
            holders=torch.zeros(held, dtype=torch.int64),
            nbytes=torch.zeros(sizes, dtype=torch.int64),
            rank=0,
            world_size=2,
        )


def test_the_digest_tells_plans_sizes_and_holders_apart() -> None:
    route = [(0, Route(0, 0, 0)), (1, Route(0, 1, 1))]
    there, sizes = [(0, 0), (1, 0)], [8, 16]
    digests = [
        _moves(*of, 2)[0].digest
        for of in (
            (route, there, sizes),
            (route, [(1, 0), (0, 0)], sizes),
            (route, [(0, 0), (0, 1)], sizes),  # another holder of the second
            (route, [(0, 0), (1, 1)], sizes),  # another local index
            (route, there, [16, 8]),
            ([(0, Route(0, 1, 0)), (1, Route(0, 0, 1))], there, sizes),
            ([(0, Route(0, 0, 0)), (1, Route(1, 1, 1))], there, sizes),  # another slot
            ([(0, Route(0, 0, 0)), (1, Route(0, 1, 2))], there, sizes),  # another position
            ([(1, Route(0, 0, 0)), (0, Route(0, 1, 1))], there[::-1], sizes[::-1]),  # another index
        )
    ]
    assert len({*digests}) == len(digests)
    assert {len(digest) for digest in digests} == {8}


def test_one_sample_over_the_network_counts() -> None:
    moves = plan_moves(
        [*enumerate([Route(0, 0, 0), Route(0, 1, 1), Route(0, 0, 2)])],
        holders=torch.tensor([[0, 1], [1, 0], [1, 1]], dtype=torch.int32),
        nbytes=torch.tensor([8, 16, 24], dtype=torch.int32),
        rank=0,
        world_size=2,
    )
    assert (moves.kept, moves.receives[1]) == ((Placement(0, 0, 1),), (Placement(0, 2, 1),))
    assert (moves.recv_splits, moves.shift_peaks, moves.peak_total) == ((0, 24), (0, 24), 24)


def test_what_stays_is_in_order_of_place() -> None:
    route = [Route(0, 0, 2), Route(0, 0, 0), Route(0, 0, 1)]
    (moves,) = _moves([*enumerate(route)], [(0, 0), (0, 1), (0, 2)], [8, 8, 8], 1)
    assert moves.kept == (Placement(0, 0, 1), Placement(0, 1, 2), Placement(0, 2, 0))


def test_an_empty_window_moves_nothing() -> None:
    for moves in _moves([], [], [], 3):
        assert moves.kept == ()
        assert moves.send_splits == moves.recv_splits == moves.shift_peaks == (0, 0, 0)
        assert moves.peak_total == 0


@pytest.mark.parametrize("strategy", ["lpt", "least_move"])
def test_columns_give_the_moves_of_their_routes(strategy: str) -> None:
    rng = random.Random(0)
    columns = plan_route(
        [[rng.random() for _ in range(12)] for _ in range(2)], 4, 2, strategy=strategy
    )
    holders = [(j // 6, 6 * slot + j % 6) for slot in range(2) for j in range(12)]
    nbytes = [8 * rng.randrange(9) for _ in holders]
    assert _moves(columns, holders, nbytes, 2) == _moves(
        [*enumerate(columns.routes())], holders, nbytes, 2
    )


def test_columns_of_another_window_are_refused() -> None:
    for per_slot, said in ((2, "covers 2 samples of 4"), (6, "samples 0 to 5; there are 4")):
        with pytest.raises(RuntimeError, match=said):
            _moves(plan_route([[1.0] * per_slot], 2, 2), [(0, 0)] * 4, [8] * 4, 2)


def test_a_sample_may_go_to_several_ranks() -> None:
    deliveries = [(0, Route(0, rank, rank)) for rank in range(3)]
    moves = _moves(deliveries, [(1, 0)], [8], 3)
    assert moves[1].kept == (Placement(0, 1, 0),)
    assert moves[1].send_splits == (8, 0, 8)
    assert [m.recv_splits[1] for m in moves] == [8, 0, 8]


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(1, 6),
    counts=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    seed=st.integers(0, 1000),
)
def test_all_ranks_together_move_every_sample_once(
    world_size: int, counts: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    holders = [(rank, local) for rank in range(world_size) for local in range(counts[rank])]
    rng.shuffle(holders)
    nbytes = [8 * rng.randrange(5) for _ in holders]
    deliveries = [
        (index, Route(rng.randrange(3), rng.randrange(world_size), index))
        for index in range(len(holders))
    ]
    moves = _moves(deliveries, holders, nbytes, world_size)
    arrived = []
    for rank, mine in enumerate(moves):
        arrived += [(place, rank) for place in mine.kept]
        for peer, other in enumerate(moves):
            assert mine.sends[peer] == other.receives[rank]
            assert mine.sends[peer] == tuple(sorted(mine.sends[peer]))
            assert mine.send_splits[peer] == other.recv_splits[rank]
            assert mine.shift_peaks[(peer - rank) % world_size] >= mine.send_splits[peer]
            arrived += [(place, rank) for place in mine.receives[peer]]
        assert mine.peak_total >= max(sum(mine.send_splits), sum(mine.recv_splits))
        assert (mine.digest, mine.shift_peaks) == (moves[0].digest, moves[0].shift_peaks)
    expected = [
        (Placement(slot, position, holders[index][1]), owner)
        for index, (slot, owner, position) in deliveries
    ]
    assert sorted(arrived) == sorted(expected)


@pytest.mark.parametrize(
    ("deliveries", "told"),
    [
        ([(0, Route(0, 0, 0))], "covers 1 samples of 2; look at global index 1"),
        ([(0, Route(0, 0, 0)), (1, Route(0, 2, 1))], "owner ranks 0 to 2 in a group of 2"),
        ([(0, Route(0, -1, 0)), (1, Route(0, 0, 1))], "owner ranks -1 to 0 in a group of 2"),
        ([(0, Route(0, 0, 0)), (2, Route(0, 0, 1))], "names samples 0 to 2; there are 2"),
        (
            [(0, Route(0, 1, 0)), (1, Route(0, 0, 1)), (0, Route(0, 1, 2))],
            "delivers a sample twice to one rank",
        ),
    ],
)
def test_a_broken_plan_is_refused(deliveries: list[tuple[int, Route]], told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        _moves(deliveries, [(0, 0), (1, 0)], [8, 8], 2)


def test_nothing_arrives_where_the_samples_are() -> None:
    group, device = PayloadGroup(None), torch.device("meta")
    group.device = device
    (_, moves) = _moves([(0, Route(0, 1, 0))], [(0, 0)], [0], 2)
    payload = Payload(group, [], [], moves, device=device)
    payload.launch()
    assert payload.wait(Patience()).device == device
