"""Placements and the way home: loads follow every exchange, and the limit is kept."""

from itertools import combinations
from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance.placement import CROSSING, MAX_SUBSETS, Exchange, Placement
from evenstep.balance.send_home import send_home

COSTS = [10.0, 1.0, 7.0, 4.0]
HOMES = [1, 0, 0, 1]


def test_two_for_two_go_home_where_one_for_one_breaks_the_limit() -> None:
    placement = Placement(COSTS, HOMES, [[0, 1], [2, 3]], None)
    send_home(placement, 11.5, most=1)
    assert placement.group_of == [0, 0, 1, 1]
    assert placement.price() == 17.0
    send_home(placement, 11.5, most=2)
    assert placement.group_of == [1, 1, 0, 0]
    assert placement.price() == 5.0


def test_everyone_goes_home_where_the_limit_allows() -> None:
    placement = Placement(COSTS, HOMES, [[0, 1], [2, 3]], None)
    send_home(placement, 14.5, most=1)
    assert placement.group_of == HOMES
    assert placement.price() == 0.0


def test_an_exchange_updates_loads_and_their_order() -> None:
    placement = Placement(COSTS, HOMES, [[0, 1], [2, 3]], None)
    placement.apply(Exchange(0, (0,), 1, (3,)))
    assert placement.members == [[(1.0, 1), (4.0, 3)], [(7.0, 2), (10.0, 0)]]
    assert placement.loads == [5.0, 17.0]
    assert placement.rising == [(5.0, 0), (17.0, 1)]
    assert placement.changes == [1, 1]


@pytest.mark.parametrize(("group", "weight"), [(0, 0.0), (1, 10.0), (2, 10.0 * CROSSING)])
def test_leaving_the_node_weighs_more(group: int, weight: float) -> None:
    placement = Placement([10.0, 1.0, 1.0, 1.0], [0, 1, 2, 3], [[0], [1], [2], [3]], 2)
    assert placement.weight(0, group) == weight


def test_subsets_rise_by_cost() -> None:
    placement = Placement([5.0, 1.0, 2.0, 9.0], [0, 0, 1, 1], [[0, 1, 2], [3]], None)
    costs, away, samples = placement.subsets(0, 2)
    assert costs == [3.0, 6.0, 7.0]
    assert away == [2.0, 0.0, 2.0]
    assert samples == [(1, 2), (1, 0), (2, 0)]


def test_long_lists_of_subsets_are_not_made() -> None:
    n = next(n for n in range(2, 100) if n * (n - 1) // 2 > MAX_SUBSETS)
    placement = Placement([1.0] * n, [0] * n, [range(n)], None)
    assert list(placement.sizes(0, 3)) == [1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=12, max_size=12), st.permutations(range(12)))
def test_no_exchange_is_left_that_saves(costs: list[int], order: list[int]) -> None:
    groups = [order[0:4], order[4:8], order[8:12]]
    values = [float(cost) for cost in costs]
    placement = Placement(values, [i // 4 for i in range(12)], groups, None)
    before, limit = placement.price(), max(placement.loads) + 0.5
    send_home(placement, limit, most=3)
    assert placement.price() <= before
    found = [[i for _, i in members] for members in placement.members]
    assert sorted(i for group in found for i in group) == list(range(12))
    assert all(fsum(values[i] for i in group) <= limit for group in found)
    for one, other in combinations(range(3), 2):
        for given_one in found[one]:
            for given_other in found[other]:
                trial = Placement(values, placement.homes, found, None)
                trial.apply(Exchange(one, (given_one,), other, (given_other,)))
                assert max(trial.loads) > limit or trial.price() >= placement.price()
