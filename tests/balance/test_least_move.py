"""Least move: the limit is kept, little moves, homes and nodes are respected."""

import random
from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import GroupPlan, LeastMove, plan_groups, plan_window


def image_costs(n: int, seed: int) -> list[float]:
    """Return costs of samples with 0 to 3 images of a heavy-tailed size."""
    rng = random.Random(seed)
    return [
        fsum(round(rng.lognormvariate(9, 0.8)) for _ in range(rng.randint(0, 3))) for _ in range(n)
    ]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda k: st.tuples(
            st.integers(1, 6).flatmap(
                lambda m: st.lists(
                    st.one_of(st.integers(0, 5), st.floats(0, 1e4), st.just(1e6)),
                    min_size=m * k,
                    max_size=m * k,
                )
            ),
            st.just(k),
        )
    ),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 0.0, 0.1]),
)
def test_keeps_counts_and_limit(
    case: tuple[list[float], int], ranks_per_node: int | None, tolerance: float | None
) -> None:
    costs, n_groups = case
    strategy = LeastMove(tolerance=tolerance, ranks_per_node=ranks_per_node)
    plan = plan_groups(costs, n_groups, strategy=strategy)
    assert sorted(i for group in plan.groups for i in group) == list(range(len(costs)))
    assert {len(group) for group in plan.groups} == {len(costs) // n_groups}
    limit = plan_groups(costs, n_groups, strategy="lpt").max_load
    if tolerance is not None:
        refined = plan_groups(costs, n_groups).max_load
        limit = max(refined, plan.lower_bound * (1 + tolerance) * (1 + 1e-12))
    assert plan.max_load <= limit


def test_balanced_samples_stay_where_they_are() -> None:
    plan = plan_groups([3.0, 1.0, 2.0, 2.0, 1.0, 3.0], 3, strategy="least_move")
    assert plan.groups == ((0, 1), (2, 3), (4, 5))
    assert plan.moved_share == 0


def test_golden_plan_moves_the_one_sample_that_must_move() -> None:
    assert plan_groups([64, 40, 24, 0], 2, strategy="least_move") == GroupPlan(
        groups=((0, 3), (1, 2)),
        loads=(64.0, 64.0),
        max_load=64.0,
        lower_bound=64.0,
        gap=0.0,
        moved_share=40 / 128,
    )


def test_homes_may_be_given() -> None:
    homes = [0, 1, 0, 1]
    plan = plan_groups([5.0, 5.0, 1.0, 1.0], 2, strategy="least_move", homes=homes)
    assert plan.groups == ((0, 2), (1, 3))
    assert plan.moved_share == 0


@pytest.mark.parametrize("n_groups", [8, 32])
def test_a_quarter_moves_where_lpt_moves_nearly_all(n_groups: int) -> None:
    least, lpt = [], []
    for seed in range(5):
        costs = image_costs(8 * n_groups, seed)
        least.append(plan_groups(costs, n_groups, strategy="least_move").moved_share or 0.0)
        lpt.append(plan_groups(costs, n_groups, strategy="lpt").moved_share or 0.0)
    assert fsum(least) / 5 < 0.33
    assert fsum(least) < fsum(lpt) / 2.5


def test_nodes_halve_the_cost_that_crosses() -> None:
    def crossing(plan: GroupPlan, costs: list[float]) -> float:
        return fsum(
            costs[i] for g, group in enumerate(plan.groups) for i in group if i // 64 != g // 8
        )

    plain = near = 0.0
    for seed in range(4):
        costs = image_costs(512, seed)
        plain += crossing(plan_groups(costs, 64, strategy="least_move"), costs)
        near += crossing(plan_groups(costs, 64, strategy=LeastMove(ranks_per_node=8)), costs)
    assert near <= plain / 2


def test_modules_of_different_dp_size_agree() -> None:
    slots = [image_costs(48, 1), image_costs(48, 2)]
    wide, narrow = (plan_window(slots, 6, dp, strategy="least_move").route for dp in (6, 2))
    assert [r.canonical_pos for r in wide] == [r.canonical_pos for r in narrow]
    assert [r.owner_rank // 3 for r in wide] == [r.owner_rank for r in narrow]


def test_a_giant_gets_the_smallest_company() -> None:
    # LPT reaches the bound 100 + 1 + 2, so the giant's group has exactly one allowed content.
    costs = [100.0, 30, 30, 20, 20, 20, 1, 40, 40, 2, 30, 30]
    plan = plan_groups(costs, 4, strategy="least_move")
    giant = next(group for group in plan.groups if 0 in group)
    assert giant == (0, 6, 9)


def test_an_excess_of_rounding_ends() -> None:
    # No share of the smallest float is smaller: a swap that takes nothing off passed for progress.
    tiny = 5e-324
    costs = [3 * tiny, 0.0, 3 * tiny, tiny, tiny, 0.0]
    plan = plan_groups(costs, 2, strategy="least_move")
    assert plan.max_load <= plan_groups(costs, 2, strategy="lpt").max_load
