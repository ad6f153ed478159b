"""Plans of groups: properties of every strategy, the exact optimum on small inputs, bad input."""

import random
from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import (
    GroupPlan,
    LeastMove,
    Lpt,
    Refined,
    Sizes,
    balanced_index_order,
    plan_groups,
)
from evenstep.balance.bounds import max_load_bound
from tests.balance.oracle import best_max_load

cost = st.one_of(st.integers(0, 9), st.floats(0, 1e6, allow_nan=False), st.just(1e9))


@st.composite
def even_costs(draw: st.DrawFn) -> tuple[list[float], int]:
    n_groups = draw(st.integers(1, 6))
    n = n_groups * draw(st.integers(0, 6))
    return draw(st.lists(cost, min_size=n, max_size=n)), n_groups


def check_plan(plan: GroupPlan, costs: list[float], n_groups: int) -> None:
    assert len(plan.groups) == n_groups
    assert sorted(i for group in plan.groups for i in group) == list(range(len(costs)))
    assert plan.loads == tuple(fsum(costs[i] for i in group) for group in plan.groups)
    assert plan.max_load == max(plan.loads)
    assert plan.lower_bound <= plan.max_load
    assert plan.gap >= 0


def lognormal(n: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [float(round(rng.lognormvariate(7, 1.05))) for _ in range(n)]


@settings(max_examples=80, deadline=None)
@given(even_costs(), st.sampled_from(["lpt", "refined", "least_move"]))
def test_equal_counts_under_every_strategy(case: tuple[list[float], int], strategy: str) -> None:
    costs, n_groups = case
    plan = plan_groups(costs, n_groups, strategy=strategy)
    check_plan(plan, costs, n_groups)
    assert {len(group) for group in plan.groups} == {len(costs) // n_groups}
    assert plan.max_load <= plan_groups(costs, n_groups, strategy="lpt").max_load
    assert plan.moved_share is not None
    assert 0 <= plan.moved_share <= 1


@settings(max_examples=80, deadline=None)
@given(st.lists(cost, max_size=24), st.integers(1, 6))
def test_unequal_counts(costs: list[float], n_groups: int) -> None:
    plan = plan_groups(costs, n_groups, sizes="within_one")
    check_plan(plan, costs, n_groups)
    sizes = [len(group) for group in plan.groups]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert plan.moved_share is None
    check_plan(plan_groups(costs, n_groups, sizes="free"), costs, n_groups)
    if len(costs) >= n_groups:
        most = -(-len(costs) // n_groups) + 1
        plan = plan_groups(costs, n_groups, sizes=Sizes(least=1, most=most))
        check_plan(plan, costs, n_groups)
        assert all(1 <= len(group) <= most for group in plan.groups)


@pytest.mark.parametrize(
    ("n", "n_groups", "sizes"), [(9, 4, (3, 2, 2, 2)), (206, 4, (52, 52, 51, 51))]
)
def test_counts_within_one_put_the_larger_groups_first(
    n: int, n_groups: int, sizes: tuple[int, ...]
) -> None:
    plan = plan_groups(lognormal(n, 2), n_groups, sizes="within_one")
    assert tuple(map(len, plan.groups)) == sizes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("n", "n_groups"), [(8, 2), (12, 3), (12, 4)])
def test_refined_is_within_one_percent_of_the_optimum(n: int, n_groups: int, seed: int) -> None:
    costs = lognormal(n, 100 * n + seed)
    size = n // n_groups
    optimum = best_max_load(costs, n_groups, size, size)
    plan = plan_groups(costs, n_groups)
    assert plan.lower_bound <= optimum * (1 + 1e-9)
    assert optimum * (1 - 1e-9) <= plan.max_load <= optimum * 1.01


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("least", [0, 1, 2])
def test_free_counts_are_within_three_percent_of_the_optimum(seed: int, least: int) -> None:
    costs = lognormal(11, seed)
    optimum = best_max_load(costs, 3, least, 11)
    plan = plan_groups(costs, 3, sizes=Sizes(least=least))
    assert plan.lower_bound <= optimum * (1 + 1e-9)
    assert optimum * (1 - 1e-9) <= plan.max_load <= optimum * 1.03


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=6, max_size=6), st.integers(1, 3))
def test_the_bound_is_one(costs: list[float], n_groups: int) -> None:
    for least in range(6 // n_groups + 1):
        optimum = best_max_load(costs, n_groups, least, 6)
        assert max_load_bound(costs, n_groups, least) <= optimum + 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_many_samples_come_within_a_thousandth_of_the_bound(seed: int) -> None:
    for n, n_groups in ((64, 8), (256, 8), (512, 64)):
        assert plan_groups(lognormal(n, seed), n_groups).gap < 1e-3
        assert plan_groups(lognormal(n, seed), n_groups, sizes="free").gap < 1e-3


def test_lpt_groups_are_those_of_the_contract() -> None:
    costs = lognormal(24, 3)
    plan = plan_groups(costs, 4, strategy=Lpt())
    assert [i for group in plan.groups for i in group] == balanced_index_order(costs, 4)


def test_golden_plan() -> None:
    assert plan_groups([8, 7, 6, 5, 4, 3, 2, 1], 2) == GroupPlan(
        groups=((0, 3, 4, 7), (1, 2, 5, 6)),
        loads=(18.0, 18.0),
        max_load=18.0,
        lower_bound=18.0,
        gap=0.0,
        moved_share=0.5,
    )


def test_no_cost_at_all_is_balanced() -> None:
    plan = plan_groups([0.0] * 6, 3)
    assert (plan.max_load, plan.lower_bound, plan.gap, plan.moved_share) == (0, 0, 0, 0)


def test_a_tolerance_ends_the_search_early() -> None:
    costs = lognormal(64, 9)
    assert plan_groups(costs, 8, strategy=Refined(tolerance=1)).groups == tuple(
        tuple(group) for group in plan_groups(costs, 8, strategy="lpt").groups
    )


class TestBadInput:
    def test_counts(self) -> None:
        with pytest.raises(ValueError, match=r"206 \(2 would be left over\).*sizes='within_one'"):
            plan_groups([1.0] * 206, 4)
        with pytest.raises(ValueError, match="n_groups is 0; it must be an integer >= 1"):
            plan_groups([1.0], 0, sizes="free")

    @pytest.mark.parametrize("sizes", [Sizes(least=4), Sizes(least=1, most=2)])
    def test_sizes_that_cannot_be_kept(self, sizes: Sizes) -> None:
        with pytest.raises(ValueError, match="9 samples in 3 groups cannot keep it: that takes"):
            plan_groups([1.0] * 9, 3, sizes=sizes)

    def test_unknown_sizes(self) -> None:
        with pytest.raises(ValueError, match="sizes is 'even'; it must be 'equal', 'within_one'"):
            plan_groups([1.0], 1, sizes="even")  # type: ignore[arg-type]  # the mistake under test

    @pytest.mark.parametrize("strategy", ["lpt", LeastMove()])
    def test_strategies_without_unequal_counts(self, strategy: str) -> None:
        with pytest.raises(ValueError, match="only 'refined' divides into groups of unequal"):
            plan_groups([1.0] * 9, 4, strategy=strategy, sizes="within_one")

    def test_homes(self) -> None:
        with pytest.raises(ValueError, match="homes has 1 entries, but costs 2"):
            plan_groups([1.0, 2.0], 2, homes=[0])
        with pytest.raises(ValueError, match=r"homes\[1\] is 2; it must be a group, 0 \.\. 1"):
            plan_groups([1.0, 2.0], 2, homes=[0, 2])
        with pytest.raises(ValueError, match="homes puts 2 samples into group 0, but least_move"):
            plan_groups([1.0, 2.0], 2, strategy="least_move", homes=[0, 0])

    @pytest.mark.parametrize(
        ("strategy", "message"),
        [
            (Refined(tolerance=-1), "tolerance is -1; it must be a share from 0 to 1"),
            (LeastMove(tolerance=5), "tolerance is 5; .* 0.05 for 5 % above it"),
            (Refined(tolerance=float("nan")), "tolerance is nan; it must be a share"),
            (LeastMove(ranks_per_node=0), "ranks_per_node is 0; it must be an integer >= 1"),
            (Refined(scope="batch"), "scope is 'batch'; it must be 'slot' or 'window'"),  # type: ignore[arg-type]  # the mistake under test
            (LeastMove(synchronize="never"), "synchronize is 'never'; it must be one of"),  # type: ignore[arg-type]  # the mistake under test
        ],
    )
    def test_settings(self, strategy: Refined | LeastMove, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            plan_groups([1.0, 2.0], 2, strategy=strategy)
