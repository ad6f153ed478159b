"""The parts of packing: bounds, bisection, and the search for fewer bins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance.packing_bisect import lowest_level
from evenstep.balance.packing_bounds import fewest_bins
from evenstep.balance.packing_exact import search_bins
from evenstep.balance.packing_fill import fill_bins, longest_of_load, split_costliest
from evenstep.balance.packing_load import SequenceLoad
from evenstep.balance.packing_problem import PackingProblem
from evenstep.balance.packing_refine import even_out
from tests.balance.packing_oracle import packings


def problem(
    lengths: list[int], capacity: int, *, num_ranks: int = 1, max_sequences: int | None = None
) -> PackingProblem:
    return PackingProblem.checked(
        lengths,
        capacity=capacity,
        load=SequenceLoad.from_hidden_size(8),
        num_ranks=num_ranks,
        multiple=1,
        max_sequences=max_sequences,
        synchronize="microbatch",
    )


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    max_sequences=st.none() | st.integers(1, 3),
)
def test_fewest_bins_is_a_bound_and_the_search_is_exact(
    lengths: list[int], max_sequences: int | None
) -> None:
    asked = problem(lengths, 12, max_sequences=max_sequences)
    fewest = min(
        len(bins)
        for bins in packings(lengths, capacity=12, num_ranks=1, max_sequences=max_sequences)
    )
    assert fewest_bins(asked) <= fewest <= len(fill_bins(asked))
    found = search_bins(asked, fewest)
    assert found is not None
    assert len(found) == fewest
    assert search_bins(asked, fewest - 1) is None if fewest > 1 else True


def test_long_sequences_tighten_the_bound_of_bins() -> None:
    assert fewest_bins(problem([60, 60, 60], 100)) == 3
    assert fewest_bins(problem([70, 70, 35, 35, 35], 100)) == 4  # 245 tokens would fit in three


@pytest.mark.parametrize(("linear", "quadratic"), [(3, 0), (0, 5), (49152, 1), (7, 11)])
@given(load=st.integers(0, 10**24))
def test_longest_of_load(linear: int, quadratic: int, load: int) -> None:
    length = longest_of_load(load, linear, quadratic)
    assert (linear + quadratic * length) * length <= load
    assert (linear + quadratic * (length + 1)) * (length + 1) > load


def test_a_level_limits_the_load_of_bins() -> None:
    asked = problem([10, 10, 10, 10], 40)
    assert len(fill_bins(asked)) == 1
    assert len(fill_bins(asked, 2 * asked.loads[0])) == 2
    assert len(fill_bins(asked, 0)) == 4  # the longest may always stand alone
    assert len(fill_bins(asked, 0, max_bins=2)) == 3  # one more, and it stops


def test_splitting_halves_the_costliest() -> None:
    asked = problem([8, 4, 4, 1], 20)
    assert split_costliest(asked, [[0, 1, 2], [3]], 3) == [[0], [3], [1, 2]]


def test_lowest_level_finds_the_first_that_succeeds() -> None:
    tried: list[int] = []

    def attempt(level: int) -> int | None:
        tried.append(level)
        return level if level >= 777 else None

    assert lowest_level(attempt, guess=600, enough=10**6, precision=10**6) == (777, 777)
    assert max(tried) < 10**6
    assert lowest_level(attempt, guess=5, enough=700, precision=100) is None


def test_evening_out_keeps_the_capacity() -> None:
    asked = problem([6, 5, 5, 2], 11)
    assert even_out(asked, [[[0, 1]], [[2, 3]]]) == [[[3, 0]], [[1, 2]]]
    tight = problem([6, 2, 3, 3, 2], 8)  # to give 2 for nothing or to swap 6 would break it
    assert even_out(tight, [[[0, 1]], [[2, 3, 4]]]) == [[[1, 0]], [[4, 2, 3]]]
