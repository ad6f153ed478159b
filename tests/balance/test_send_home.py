"""Placements and the way home: loads follow every exchange, and the limit is kept."""

from itertools import combinations
from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance.placement import CROSSING, MAX_SUBSETS, Exchange, Placement
from evenstep.balance.send_home import _way_home, send_home

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


def best_way_home(placement: Placement, i: int, limit: float, most: int) -> float:
    """Return what the best exchange of the smallest size that saves, with sample `i`, saves."""
    here, home = placement.group_of[i], placement.homes[i]
    groups = [[j for _, j in members] for members in placement.members]
    for size in range(1, most + 1):
        savings = [0.0]
        for given_here in combinations(groups[here], size):
            for given_home in combinations(groups[home], size):
                trial = Placement(
                    placement.costs, placement.homes, groups, placement.groups_per_node
                )
                trial.apply(Exchange(here, given_here, home, given_home))
                if i in given_here and max(trial.loads[here], trial.loads[home]) <= limit:
                    savings.append(placement.price() - trial.price())
        if max(savings) > 0:
            return max(savings)
    return 0.0


@pytest.mark.parametrize("groups_per_node", [3, 2])
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=12, max_size=12),
    st.permutations(range(12)),
    st.integers(0, 9),
)
def test_the_best_way_home_is_found(
    groups_per_node: int, costs: list[int], order: list[int], slack: int
) -> None:
    groups = [order[0:4], order[4:8], order[8:12]]
    homes = [i // 4 for i in range(12)]
    placement = Placement([float(cost) for cost in costs], homes, groups, groups_per_node)
    limit = max(placement.loads) + slack + 1e-3  # by which sums that round are not above it
    for i in order:
        if placement.group_of[i] == homes[i]:
            continue
        expected, before = best_way_home(placement, i, limit, 3), placement.price()
        if exchange := _way_home(placement, i, limit, 3):
            trial = Placement(placement.costs, homes, groups, groups_per_node)
            trial.apply(exchange)
            assert before - trial.price() == expected
            assert max(trial.loads) <= limit
        else:
            assert expected == 0.0


@pytest.mark.parametrize(
    ("costs", "homes", "groups_per_node"),
    [
        # Company that is nearly all of what there is room for.
        ([10.0, 1.99, 4.995, 4.995], [1, 2, 1, 1], None),
        # More of it, because what comes in return goes home, too.
        ([10.0, 3.99, 1.0, 10.99], [1, 2, 0, 1], None),
        # The same, of two that go home in return.
        ([10.0, 5.9, 0.05, 1.0, 1.0, 11.95], [1, 2, 2, 0, 0, 1], None),
        # More still, because other company comes home from another node.
        ([1.0, 10.0, 1.4, 3.3, 3.3, 3.3], [2, 2, 1, 2, 2, 2], 2),
    ],
)
def test_company_goes_along_as_long_as_anything_is_saved(
    costs: list[float], homes: list[int], groups_per_node: int | None
) -> None:
    half = len(costs) // 2
    home = homes[0]
    groups: list[range] = [range(0)] * 3
    groups[0], groups[home] = range(half), range(half, 2 * half)
    placement = Placement(costs, homes, groups, groups_per_node)
    exchange = _way_home(placement, 0, sum(costs[:half]) * (1 + 1e-8), 3)
    assert exchange is not None
    assert {*exchange.given} == {*range(half)}
    assert {*exchange.taken} == {*range(half, 2 * half)}
    before = placement.price()
    placement.apply(exchange)
    assert placement.price() < before
