"""Assignments and routes: the grid shared by modules of different DP size, and bad input."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import (
    Route,
    assert_intra_no_cross_slot,
    balanced_assignment,
    balanced_index_order,
    build_window_route,
    intra_route,
    window_cost_spread,
)

COSTS = [[9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 80.0]]


def test_golden_route() -> None:
    assert balanced_assignment([5, 1, 4, 2, 3, 3], 2, 2) == [
        (0, 0), (0, 2), (1, 3), (1, 5), (1, 4), (0, 1),
    ]  # fmt: skip
    assert build_window_route([[1.0, 9.0], [9.0, 9.0]], 2, 2) == [
        (0, 1, 1), (0, 0, 0), (1, 0, 0), (1, 1, 1),
    ]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([(4, 2, 4), (4, 1, 4), (6, 2, 3)]),
    st.integers(1, 4).flatmap(
        lambda m: st.lists(st.floats(0, 99), min_size=12 * m, max_size=12 * m)
    ),
)
def test_modules_of_different_dp_size_agree(grid: tuple[int, int, int], costs: list[float]) -> None:
    n_groups, *dp_sizes = grid
    order = balanced_index_order(costs, n_groups)
    for dp_size in (*dp_sizes, n_groups, 1):
        assignment = balanced_assignment(costs, n_groups, dp_size)
        assert [order[position] for _, position in assignment] != [] or not costs
        for sample, (owner, position) in enumerate(assignment):
            assert order[position] == sample
            assert owner == position * dp_size // len(costs)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.sampled_from([(4, 1), (4, 2), (6, 3), (1, 1)]), st.data())
def test_route_of_a_window_is_the_routes_of_its_slots(
    n_slots: int, grid: tuple[int, int], data: st.DataObject
) -> None:
    n_groups, dp_size = grid
    n = 2 * n_groups
    slot = st.lists(st.floats(0, 99), min_size=n, max_size=n)
    costs = data.draw(st.lists(slot, min_size=n_slots, max_size=n_slots))
    route = build_window_route(costs, n_groups, dp_size)
    expected = [
        entry
        for s in range(n_slots)
        for entry in intra_route(balanced_assignment(costs[s], n_groups, dp_size), src_slot=s)
    ]
    assert route == expected
    assert all(isinstance(entry, Route) for entry in route)
    assert_intra_no_cross_slot(route, n)
    assert set(Counter((r.dst_slot, r.owner_rank) for r in route).values()) == {n // dp_size}


def test_an_empty_window_has_an_empty_route() -> None:
    assert build_window_route([], 2, 2) == []
    assert build_window_route([[], []], 2, 1) == []
    assert window_cost_spread([], [], 2) == []


def test_spread_says_what_balancing_did() -> None:
    route = build_window_route(COSTS, 2, 2)
    first, second = window_cost_spread(COSTS, route, 2)
    assert (first["before_max"], first["before_min"]) == (20.0, 20.0)
    assert (first["after_max"], first["after_min"]) == (20.0, 20.0)
    assert (second["before_max"], second["before_min"]) == (98.0, 10.0)
    assert (second["after_max"], second["after_min"]) == (86.0, 22.0)
    assert second["remote"] == sum(r.owner_rank != g // 4 for g, r in enumerate(route[8:]))


def test_a_sample_that_changes_its_slot_is_found() -> None:
    route = [(0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 1, 1)]
    assert_intra_no_cross_slot(route, 0)
    with pytest.raises(RuntimeError, match=r"route\[1\] sends a sample of slot 0 to slot 1"):
        assert_intra_no_cross_slot(route, 2)
    with pytest.raises(ValueError, match="b_global is -1; it must be an integer >= 0"):
        assert_intra_no_cross_slot(route, -1)


@pytest.mark.parametrize(
    ("n_groups", "dp_size", "message"),
    [
        (3, 3, "n_groups is 3, but must divide the number of samples, 8"),
        (4, 3, "dp_size is 3, but must divide n_groups, 4; n_groups is the least common multiple"),
        (4, 0, "dp_size is 0; it must be an integer >= 1"),
        (0, 1, "n_groups is 0; it must be an integer >= 1"),
    ],
)
def test_counts_that_do_not_divide(n_groups: int, dp_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_window_route(COSTS, n_groups, dp_size)
    with pytest.raises(ValueError, match=message):
        balanced_assignment(COSTS[0], n_groups, dp_size)


def test_slots_of_unequal_size_are_refused() -> None:
    message = r"costs_per_slot\[1\] has 4 samples, but slot 0 has 2; every micro-batch"
    with pytest.raises(ValueError, match=message):
        build_window_route([[1.0, 2.0], [1.0] * 4], 2, 2)


def test_the_bad_cost_is_named_with_its_slot() -> None:
    with pytest.raises(ValueError, match=r"costs_per_slot\[1\]\[0\] is nan; a cost must be"):
        build_window_route([[1.0, 2.0], [float("nan"), 1.0]], 2, 2)


def test_bad_arguments_of_the_small_functions() -> None:
    with pytest.raises(ValueError, match="src_slot is -1; it must be an integer >= 0"):
        intra_route([(0, 0)], src_slot=-1)
    with pytest.raises(ValueError, match="route has 1 entries, but costs_per_slot 8 samples"):
        window_cost_spread(COSTS[:1], [(0, 0, 0)], 2)
    with pytest.raises(ValueError, match=r"route\[0\] names slot 0 and rank 5, outside of 1 slots"):
        window_cost_spread([[1.0]], [(0, 5, 0)], 1)
    with pytest.raises(ValueError, match="strategy is 'best'; it must be one of"):
        build_window_route(COSTS, 2, 2, strategy="best")
