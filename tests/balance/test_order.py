"""The contract's permutation, against a naive implementation of its definition."""

import math
import random
import warnings
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenstep.balance import balanced_index_order

costs_and_groups = st.integers(1, 9).flatmap(
    lambda k: st.tuples(
        st.integers(0, 12).flatmap(
            lambda size: st.lists(
                st.one_of(
                    st.integers(0, 4),  # many ties and zeros
                    st.floats(0, 1e12, allow_nan=False),
                    st.sampled_from([0.1, 0.2, 0.3, 1e9]),  # sums that round; one giant
                ),
                min_size=size * k,
                max_size=size * k,
            )
        ),
        st.just(k),
    )
)


def by_definition(costs: list[float], n_groups: int) -> list[int]:
    size = len(costs) // n_groups
    groups: list[list[int]] = [[] for _ in range(n_groups)]
    totals = [0.0] * n_groups
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        g = min((g for g in range(n_groups) if len(groups[g]) < size), key=lambda g: (totals[g], g))
        groups[g].append(i)
        totals[g] += costs[i]
    return [i for group in groups for i in group]


@settings(max_examples=150, deadline=None)
@given(costs_and_groups)
@example(([0.0] * 12, 4))
@example(([7.0] * 12, 3))
@example(([1e300] + [1.0] * 11, 4))
def test_equals_the_definition(case: tuple[list[float], int]) -> None:
    costs, n_groups = case
    assert balanced_index_order(costs, n_groups) == by_definition(costs, n_groups)


def test_equals_the_definition_on_thousands_of_inputs() -> None:
    rng = random.Random(1)
    pools: list[list[float]] = [[0, 1, 2], [0.1, 0.2, 0.3, 0.7], [5.0], [1.0, 1e15, 3.0]]
    for _ in range(4000):
        n_groups, size = rng.randint(1, 6), rng.randint(1, 5)
        pool = rng.choice([*pools, [rng.random() for _ in range(20)]])
        costs = rng.choices(pool, k=n_groups * size)
        assert balanced_index_order(costs, n_groups) == by_definition(costs, n_groups)


def test_equals_the_definition_on_a_large_input() -> None:
    rng = random.Random(5)
    costs = [round(rng.lognormvariate(7, 1)) * 1.5 for _ in range(1024)]
    assert balanced_index_order(costs, 128) == by_definition(costs, 128)


def test_golden_permutations() -> None:
    assert balanced_index_order([5, 1, 4, 2, 3, 3], 2) == [0, 5, 1, 2, 4, 3]
    assert balanced_index_order([1, 1, 1, 1], 2) == [0, 2, 1, 3]
    assert balanced_index_order([0, 0, 9, 0], 2) == [2, 3, 0, 1]
    assert balanced_index_order([], 3) == []
    assert balanced_index_order([2.0, 1.0], 1) == [0, 1]


def test_numbers_of_other_types_count_as_their_float64_value() -> None:
    third = float(Fraction(1, 3))
    given: list[Any] = [Fraction(1, 3), True, 2, 0.5]
    assert balanced_index_order(given, 2) == balanced_index_order([third, 1.0, 2.0, 0.5], 2)


def test_integers_are_exact_up_to_2_to_the_53() -> None:
    assert balanced_index_order([2**53 - 1, 2**53], 2) == [1, 0]
    with pytest.raises(ValueError, match=r"costs\[1\] is the integer 9007199254740993, beyond"):
        balanced_index_order([1, 2**53 + 1], 2)
    with pytest.raises(ValueError, match=r"costs\[0\] is the integer 10+, beyond 2\*\*53"):
        balanced_index_order([10**400, 1], 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1, -0.5, "3", None, 1j])
def test_bad_costs_are_named(bad: float) -> None:
    with pytest.raises(ValueError, match=r"costs\[2\] is .*; a cost must be a finite real number"):
        balanced_index_order([1.0, 2.0, bad, 3.0], 2)


def test_a_fraction_beyond_float64_is_named() -> None:
    huge: Any = Fraction(10**400, 3)
    with pytest.raises(ValueError, match=r"costs\[0\] is Fraction\(10+, 3\); a cost must be"):
        balanced_index_order([huge, 2], 2)


@pytest.mark.parametrize("costs", [{3.0, 1.0}, frozenset([3.0, 1.0]), {0: 3.0, 1: 1.0}, None, 3.0])
def test_what_has_no_order_is_refused(costs: Any) -> None:
    kind = type(costs).__name__
    with pytest.raises(ValueError, match=f"costs is a {kind}; .* in the samples' order, pass a li"):
        balanced_index_order(costs, 2)


def test_a_cost_may_carry_a_gradient() -> None:
    torch = pytest.importorskip("torch")
    costs = torch.tensor([1.0, 3.0], requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert balanced_index_order([*costs], 2) == [1, 0]
        assert balanced_index_order(costs, 2) == [1, 0]


def test_a_total_beyond_float64_is_refused() -> None:
    with pytest.raises(ValueError, match="costs add up to more than float64 can hold"):
        balanced_index_order([1e308] * 4, 2)


@pytest.mark.parametrize("n_groups", [0, -2])
def test_n_groups_must_be_positive(n_groups: int) -> None:
    with pytest.raises(ValueError, match=f"n_groups is {n_groups}; it must be an integer >= 1"):
        balanced_index_order([1.0, 2.0], n_groups)


def test_n_groups_must_be_an_integer() -> None:
    with pytest.raises(ValueError, match=r"n_groups is 2\.0; it must be an integer >= 1"):
        balanced_index_order([1.0, 2.0], 2.0)  # type: ignore[arg-type]  # the mistake under test


def test_n_groups_must_divide() -> None:
    with pytest.raises(ValueError, match=r"n_groups is 4, but must divide .* 206 \(2 would be"):
        balanced_index_order([1.0] * 206, 4)
