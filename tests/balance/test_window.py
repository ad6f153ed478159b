"""Windows: every strategy keeps the counts, says what it reached, and may cross slots if told."""

import random
from collections import Counter
from collections.abc import Sequence
from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import (
    LeastMove,
    Refined,
    Strategy,
    assert_intra_no_cross_slot,
    build_window_route,
    plan_route,
    plan_window,
)

STRATEGIES: list[str | Strategy] = [
    "lpt",
    "refined",
    "least_move",
    Refined(scope="window"),
    Refined(scope="window", synchronize="step"),
    LeastMove(scope="window"),
    LeastMove(scope="window", synchronize="step", ranks_per_node=2),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_columns_hold_the_route(strategy: str | Strategy) -> None:
    costs = window(3, 16)
    columns = plan_route(costs, 4, 2, strategy=strategy)
    route = build_window_route(costs, 4, 2, strategy=strategy)
    assert columns.routes() == route
    assert [*zip(*columns, strict=True)] == [tuple(entry) for entry in route]
    assert [column.typecode for column in columns] == ["q", "q", "q"]


def long_costs(n: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [float(min(126527, round(rng.lognormvariate(8.89, 1.05)))) for _ in range(n)]


def window(n_slots: int, per_slot: int, seed: int = 0) -> list[list[float]]:
    return [long_costs(per_slot, 10 * seed + s) for s in range(n_slots)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 6)]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.data(),
)
def test_every_slot_and_rank_keeps_its_count(
    strategy: str | Strategy, grid: tuple[int, int], n_slots: int, size: int, data: st.DataObject
) -> None:
    n_groups, dp_size = grid
    per_slot = n_groups * size
    one = st.lists(
        st.one_of(st.integers(0, 4), st.floats(0, 1e5)), min_size=per_slot, max_size=per_slot
    )
    costs = data.draw(st.lists(one, min_size=n_slots, max_size=n_slots))
    plan = plan_window(costs, n_groups, dp_size, strategy=strategy)
    assert plan.route == build_window_route(costs, n_groups, dp_size, strategy=strategy)
    places = Counter((r.dst_slot, r.canonical_pos) for r in plan.route)
    assert places == Counter((s, p) for s in range(n_slots) for p in range(per_slot))
    for entry in plan.route:
        assert entry.owner_rank == entry.canonical_pos * dp_size // per_slot
    if isinstance(strategy, str):
        assert_intra_no_cross_slot(plan.route, per_slot)
    flat = [cost for slot in costs for cost in slot]
    for s in range(n_slots):
        for rank in range(dp_size):
            held = [flat[g] for g, r in enumerate(plan.route) if r[:2] == (s, rank)]
            assert plan.loads[s][rank] == fsum(held)
    assert plan.lower_bound <= plan.max_load * (1 + 1e-12)
    assert 0 <= plan.moved_share <= 1


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_an_empty_window(strategy: str | Strategy) -> None:
    plan = plan_window([], 2, 2, strategy=strategy)
    assert (plan.route, plan.max_load, plan.lower_bound, plan.gap) == ([], 0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_crossing_slots_pays_where_a_giant_rules_its_slot(seed: int) -> None:
    costs = window(4, 8 * 16, seed)
    within = plan_window(costs, 16, 16, strategy="refined")
    across = plan_window(costs, 16, 16, strategy=Refined(scope="window"))
    assert across.max_load < within.max_load * 0.97
    assert across.gap < 0.03
    step = plan_window(costs, 16, 16, strategy=Refined(scope="window", synchronize="step"))
    assert step.gap < 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_least_move_across_slots_never_costs_more_than_lpt(seed: int) -> None:
    costs = window(3, 64, seed)
    lpt = plan_window(costs, 8, 8)
    plan = plan_window(costs, 8, 8, strategy=LeastMove(scope="window"))
    assert plan.max_load <= lpt.max_load
    assert plan.moved_share < lpt.moved_share / 2


class Reversed:
    """A strategy of the caller's own: blocks of the reversed sample order."""

    scope = "slot"
    synchronize = "microbatch"

    def window(
        self, costs_per_slot: Sequence[Sequence[float]], n_groups: int
    ) -> list[list[list[int]]]:
        n = len(costs_per_slot[0])
        return [
            [
                list(range(s * n + n - 1 - g, s * n + n - 2 - g - n // n_groups + 1, -1))
                for g in range(0, n, n // n_groups)
            ]
            for s in range(len(costs_per_slot))
        ]


def test_a_strategy_of_ones_own() -> None:
    strategy: Strategy = Reversed()  # type: ignore[assignment]  # str, where Literal is expected
    route = build_window_route([[1.0, 2.0, 3.0, 4.0]] * 2, 2, 2, strategy=strategy)
    assert [r.canonical_pos for r in route] == [3, 2, 1, 0] * 2


class Broken(Reversed):
    def __init__(self, groups: list[list[list[int]]]) -> None:
        self.groups = groups

    def window(
        self, costs_per_slot: Sequence[Sequence[float]], n_groups: int
    ) -> list[list[list[int]]]:
        del costs_per_slot, n_groups
        return self.groups


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[[0, 1], [2, 2]]], "placed sample 2 twice or beyond the 4 samples"),
        ([[[0, 1], [2, 4]]], "placed sample 4 twice or beyond the 4 samples"),
        ([[[0, 1, 2], [3]]], r"returned groups of \[3, 1\] samples .*must return 2 groups of 2"),
        ([[[0, 1]]], r"returned groups of \[2\] samples \(1 groups\); it must return 2 groups"),
    ],
)
def test_broken_plans_are_found_where_they_are_made(
    groups: list[list[list[int]]], message: str
) -> None:
    strategy: Strategy = Broken(groups)  # type: ignore[assignment]  # str for Literal, as above
    with pytest.raises(RuntimeError, match=message):
        build_window_route([[1.0, 2.0, 3.0, 4.0]], 2, 2, strategy=strategy)
