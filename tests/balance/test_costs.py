"""Cost models: the formulas against counts made by hand, tables, and what is refused."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.balance import (
    SequenceLoad,
    TableCost,
    encoder_cost,
    evaluate_costs,
    transformer_cost,
)


def test_classic_layer_is_24_h_squared_per_token() -> None:
    cost = transformer_cost(hidden_size=4096, passes=1)
    assert cost.linear == 24 * 4096**2
    assert cost.quadratic == 2 * 4096


def test_narayanan_layer_forward_and_backward() -> None:
    # arXiv:2104.04473: 24 B s h^2 + 4 B s^2 h forward, twice as much backward, attention full.
    h, s, layers = 1024, 2048, 24
    cost = transformer_cost(hidden_size=h, num_layers=layers, causal=False)
    assert cost(s) == 3 * layers * (24 * s * h**2 + 4 * s**2 * h)


def test_logits_are_counted_once() -> None:
    without = transformer_cost(hidden_size=512, num_layers=6)
    with_logits = transformer_cost(hidden_size=512, num_layers=6, vocab_size=32000)
    assert with_logits.linear - without.linear == 6 * 512 * 32000
    assert with_logits.quadratic == without.quadratic


@given(hidden_size=st.integers(1, 32768), causal=st.booleans())
def test_same_shape_as_the_load_of_packing(hidden_size: int, causal: bool) -> None:
    cost = transformer_cost(hidden_size=hidden_size, causal=causal)
    load = SequenceLoad.from_hidden_size(hidden_size, causal=causal)
    assert Fraction(cost.quadratic) / Fraction(cost.linear) == Fraction(load.quadratic)


def test_own_weights_and_attention_width() -> None:
    cost = transformer_cost(
        hidden_size=2560, num_layers=36, params_per_layer=100, attention_dim=4096, passes=1
    )
    assert (cost.linear, cost.quadratic) == (2 * 100 * 36, 2 * 4096 * 36)


def test_encoder_attends_in_both_directions() -> None:
    cost = encoder_cost(hidden_size=1280, num_layers=32, passes=1)
    assert (cost.linear, cost.quadratic) == (24 * 1280**2 * 32, 4 * 1280 * 32)


def test_windowed_layers_are_linear() -> None:
    cost = encoder_cost(
        hidden_size=1280, num_layers=32, windowed_layers=28, window_patches=64, passes=1
    )
    assert cost.quadratic == 4 * 1280 * 4
    assert cost.linear == 24 * 1280**2 * 32 + 4 * 1280 * 64 * 28


def test_passes_scale_both_terms() -> None:
    frozen, trained = (encoder_cost(hidden_size=64, passes=p) for p in (1, 3))
    assert trained(100) == 3 * frozen(100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be an integer >= 1"),
        ({"hidden_size": 8, "num_layers": 1.5}, "num_layers is 1.5; it must be an integer"),
        ({"hidden_size": 8, "params_per_layer": -1}, "params_per_layer is -1"),
        ({"hidden_size": 8, "attention_dim": 0}, "attention_dim is 0"),
        ({"hidden_size": 8, "vocab_size": -5}, "vocab_size is -5"),
        ({"hidden_size": 8, "passes": 0}, "passes is 0; it must be positive and finite: 3 with"),
        ({"hidden_size": 8, "passes": math.nan}, "passes is nan"),
    ],
)
def test_transformer_refuses(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformer_cost(**arguments)  # type: ignore[arg-type]  # wrong values on purpose


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 4, "windowed_layers": 5}, "windowed_layers is 5; it must be in 0 .. num_l"),
        ({"num_layers": 4, "windowed_layers": -1}, "windowed_layers is -1"),
        ({"num_layers": 4, "windowed_layers": 2}, "window_patches is None; windowed_layers=2 need"),
        ({"windowed_layers": 1, "window_patches": 0}, "window_patches is 0; it must be an integer"),
        ({"passes": math.inf}, "passes is inf"),
    ],
)
def test_encoder_refuses(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder_cost(hidden_size=8, **arguments)


def test_table_draws_straight_lines() -> None:
    table = TableCost({4000: 10.0, 1000: 1.0, 2000: 3.0})
    assert [table(n) for n in (1000, 1500, 2000, 3000, 4000)] == [1.0, 2.0, 3.0, 6.5, 10.0]
    assert repr(table) == "TableCost({1000: 1.0, 2000: 3.0, 4000: 10.0})"


def test_table_with_one_point_knows_one_length() -> None:
    with pytest.raises(ValueError, match=r"points\[1\] is 10+; it must be finite"):
        TableCost({1: 10**400})
    table = TableCost({0: 2})
    assert table(0) == 2.0
    with pytest.raises(ValueError, match=r"length is 1; it must lie within the table, 0 \.\. 0"):
        table(1)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ({}, "points is empty; give at least one length"),
        ({-1: 1.0}, "a length in points is -1"),
        ({1: -1.0}, r"points\[1\] is -1.0; it must be finite and >= 0"),
        ({1: math.nan}, r"points\[1\] is nan"),
    ],
)
def test_table_refuses_points(points: dict[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableCost(points)


@pytest.mark.parametrize("length", [999, 2001, math.nan])
def test_table_guesses_nothing_outside(length: int) -> None:
    with pytest.raises(ValueError, match=r"must lie within the table, 1000 \.\. 2000: measure"):
        TableCost({1000: 1.0, 2000: 2.0})(length)


@given(st.dictionaries(st.integers(0, 10**6), st.floats(0, 1e12), min_size=2), st.data())
def test_table_stays_between_its_neighbours(points: dict[int, float], data: st.DataObject) -> None:
    length = data.draw(st.integers(min(points), max(points)))
    below = max(n for n in points if n <= length)
    above = min(n for n in points if n >= length)
    low, high = sorted((points[below], points[above]))
    assert low <= TableCost(points)(length) <= high * (1 + 1e-15)


def test_any_function_is_a_model() -> None:
    assert evaluate_costs(lambda length: length**2, [1, 2, 3]) == [1.0, 4.0, 9.0]
    assert evaluate_costs(SequenceLoad(linear=1, quadratic=1), [3]) == [12.0]


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_costs_are_checked_with_the_index(wrong: float) -> None:
    with pytest.raises(ValueError, match="sample 1: the model says that length 7 costs"):
        evaluate_costs(lambda length: wrong if length == 7 else 1.0, [5, 7])


def test_a_model_that_refuses_names_the_sample() -> None:
    with pytest.raises(ValueError, match="sample 2: length is 9; it must lie within the table"):
        evaluate_costs(TableCost({1: 1.0, 2: 2.0}), [1, 2, 9])


def test_other_errors_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        evaluate_costs(lambda length: 1 / length, [1, 0])


def test_lengths_without_an_order_and_costs_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths is a set; it must hold one entry per sample"):
        evaluate_costs(float, {3, 1})
    with pytest.raises(ValueError, match=r"sample 1: .*too large"):
        evaluate_costs(lambda length: 10**length, [3, 400])
