"""Draws: disjoint whole blocks, in the order of the input or shuffled by a seed."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.balance.cli.draws import choose_draws
from evenstep.balance.cli.errors import InputError
from evenstep.balance.cli.figures import Spread, rank_totals, ratio, step_time


@given(
    count=st.integers(1, 300),
    size=st.integers(1, 20),
    max_draws=st.integers(0, 30),
    seed=st.none() | st.integers(0, 5),
)
def test_no_number_is_drawn_twice(count: int, size: int, max_draws: int, seed: int | None) -> None:
    values = array("d", range(count))
    if count < size:
        return
    draws = choose_draws(values, size, max_draws=max_draws, seed=seed, what="")
    drawn = [number for draw in draws for number in draw]
    assert len(drawn) == len(set(drawn)) == len(draws) * size
    assert sorted(values) == list(range(count))
    assert len(draws) == min(count // size, max_draws or count)
    if seed is None:
        assert drawn == sorted(drawn)


def test_draws_are_spread_over_the_input() -> None:
    draws = choose_draws(array("d", range(100)), 10, max_draws=5, seed=None, what="")
    assert list(draws.starts) == [0, 20, 40, 60, 80]
    assert draws.describe() == "5 of 10 steps, evenly spaced, in the order of the input"


def test_all_draws() -> None:
    draws = choose_draws(array("d", range(25)), 10, max_draws=0, seed=None, what="")
    assert [draw[0] for draw in draws] == [0.0, 10.0]
    assert draws.describe() == "2 steps, in the order of the input"


def test_a_seed_gives_the_same_shuffle_everywhere() -> None:
    draws = choose_draws(array("d", range(10)), 5, max_draws=0, seed=7, what="")
    assert [list(draw) for draw in draws] == [[3, 2, 7, 0, 1], [6, 5, 8, 4, 9]]
    assert draws.describe() == "2 steps, shuffled, seed 7"


def test_too_little_input() -> None:
    with pytest.raises(InputError, match=r"it has 3 numbers, but one step takes 4 \(2 x 2\)"):
        choose_draws(array("d", [1, 2, 3]), 4, max_draws=0, seed=None, what="2 x 2")


def test_spread() -> None:
    assert Spread.of(list(range(1, 101))) == Spread(50.5, 95, 100)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_ratio_of_nothing_is_balanced() -> None:
    assert ratio(0.0, 0.0) == 1.0
    assert ratio(3.0, 2.0) == 1.5


def test_step_time_by_synchronisation() -> None:
    loads = [[1.0, 4.0], [3.0, 2.0]]
    assert step_time(loads, "microbatch") == 7.0
    assert step_time(loads, "step") == 6.0
    assert rank_totals(loads) == [4.0, 6.0]
