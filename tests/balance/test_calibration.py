"""Calibration: known coefficients come back, outliers do not spoil them, bad steps are refused."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import Calibration, SequenceLoad, calibrate, step_features
from evenstep.balance.calibration_solver import dependent_column, nonnegative_least_squares

TRUTH = (0.05, 4e-6, 3e-10)


def measured_steps(
    count: int, *, truth: Sequence[float] = TRUTH, noise: float = 0.0, seed: int = 0
) -> tuple[list[tuple[float, float, float]], list[float]]:
    """Steps of a few sequences each, whose lengths have a heavy tail."""
    rng = random.Random(seed)
    features = [
        step_features(int(rng.lognormvariate(7.3, 0.8)) for _ in range(rng.randint(2, 8)))
        for _ in range(count)
    ]
    seconds = [
        math.fsum(c * f for c, f in zip(truth, row, strict=True)) * (1 + rng.gauss(0, noise))
        for row in features
    ]
    return features, seconds


def worst_difference(
    left: Calibration, right: Calibration, features: Sequence[Sequence[float]]
) -> float:
    """The largest relative difference of two fits' predictions."""
    return max(abs(left.predict(row) / right.predict(row) - 1) for row in features)


def test_features_of_a_step() -> None:
    assert step_features([3, 4]) == (1.0, 7.0, 25.0)
    assert step_features(iter([])) == (1.0, 0.0, 0.0)


def test_features_are_exact_sums_rounded_once() -> None:
    assert step_features([2**40, 1])[2] == float(2**80 + 1)


def test_exact_steps_give_the_coefficients_back() -> None:
    features, seconds = measured_steps(30)
    fit = calibrate(features, seconds)
    assert fit.coefficients == pytest.approx(TRUTH, rel=1e-6)
    assert (fit.num_steps, fit.outliers) == (30, ())
    assert fit.worst_relative_error < 1e-9
    assert fit.explained == pytest.approx(1.0)


def test_the_fit_becomes_a_cost_model() -> None:
    _, linear, quadratic = calibrate(*measured_steps(30)).coefficients
    cost = SequenceLoad(linear=linear, quadratic=quadratic)
    assert cost(10_000) == pytest.approx(4e-6 * 1e4 + 3e-10 * 1e8, rel=1e-6)


def test_reported_errors_are_those_of_the_noise() -> None:
    features, seconds = measured_steps(500, noise=0.03)
    fit = calibrate(features, seconds)
    # E|N(0, s)| = s sqrt(2 / pi)
    assert fit.mean_relative_error == pytest.approx(0.03 * math.sqrt(2 / math.pi), rel=0.1)
    residuals = [fit.predict(f) - s for f, s in zip(features, seconds, strict=True)]
    kept = [r for i, r in enumerate(residuals) if i not in fit.outliers]
    assert fit.rms_error_s == pytest.approx(math.sqrt(sum(r * r for r in kept) / len(kept)))
    assert worst_difference(fit, calibrate(*measured_steps(500)), features) < 0.03


@pytest.mark.parametrize("factor", [0.2, 3.0, 10.0, 1000.0])
@pytest.mark.parametrize("count", [20, 100])
@pytest.mark.parametrize("seed", range(5))
def test_a_handful_of_outliers_does_not_spoil_the_fit(factor: float, count: int, seed: int) -> None:
    features, seconds = measured_steps(count, noise=0.02, seed=seed)
    spoiled = {0, 1, 2, count // 2, count - 1}  # first steps, and pauses later on
    belong = [i for i in range(count) if i not in spoiled]
    without = calibrate([features[i] for i in belong], [seconds[i] for i in belong])
    for index in spoiled:
        seconds[index] *= factor
    fit = calibrate(features, seconds)
    assert spoiled <= set(fit.outliers)
    assert len(fit.outliers) <= len(spoiled) + count // 20
    assert worst_difference(fit, without, [features[i] for i in belong]) < 0.03


def test_a_constant_pause_is_found_too() -> None:
    features, seconds = measured_steps(50, noise=0.01)
    for index in (7, 23, 41):
        seconds[index] += 1.0
    assert {7, 23, 41} <= set(calibrate(features, seconds).outliers)


def test_coefficients_never_turn_negative() -> None:
    # Time falls as the second feature grows: the best that is allowed is not to use it.
    features = [(1.0, float(x)) for x in range(1, 9)]
    fit = calibrate(features, [10.0 - x for x in range(1, 9)])
    assert fit.coefficients == pytest.approx((5.5, 0.0))
    assert fit.coefficients[1] == 0.0
    assert fit.explained == pytest.approx(0.0)


def test_steps_of_equal_seconds() -> None:
    fit = calibrate([(1.0,), (1.0,), (1.0,)], [2.0, 2.0, 2.0])
    assert fit.coefficients == pytest.approx((2.0,))
    assert fit.explained == 0.0


def test_same_steps_same_fit() -> None:
    steps = measured_steps(40, noise=0.05)
    assert calibrate(*steps) == calibrate(*steps)


@pytest.mark.parametrize(
    ("features", "seconds", "message"),
    [
        ([], [], "features has 0 steps of 0 values; measure at least as many steps"),
        ([(1.0, 2.0)], [1.0], "features has 1 steps of 2 values"),
        ([()], [1.0], "features has 1 steps of 0 values"),
        ([(1.0,), (1.0,)], [1.0], "features has 2 steps and seconds 1"),
        ([(1.0,), (1.0, 2.0)], [1.0, 1.0], r"features\[1\] has 2 values, features\[0\] has 1"),
        ([(1.0,), (-2.0,)], [1.0, 1.0], r"features\[1\]=\(-2.0,\) must hold finite values >= 0"),
        ([(1.0,), (math.nan,)], [1.0, 1.0], r"features\[1\]=\(nan,\) must hold finite"),
        ([(1.0,), (2.0,)], [1.0, 0.0], r"seconds\[1\]=0.0 must be positive and finite"),
        ([(1.0,), (2.0,)], [math.inf, 1.0], r"seconds\[0\]=inf must be positive and finite"),
        ([(1.0, 2.0), (2.0, 4.0)], [1.0, 2.0], "feature 1 is zero or a combination of the feat"),
        ([(0.0, 2.0), (0.0, 4.0)], [1.0, 2.0], "feature 0 is zero or a combination"),
    ],
)
def test_bad_steps_are_refused(
    features: list[tuple[float, ...]], seconds: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(features, seconds)


def test_predict_checks_the_number_of_features() -> None:
    fit = calibrate([(1.0,), (2.0,)], [1.0, 2.0])
    with pytest.raises(ValueError, match="must have 1 values"):
        fit.predict((1.0, 2.0))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], list[float], list[float]]:
    size = draw(st.integers(1, 5))
    count = draw(st.integers(size, 12))
    rng = random.Random(draw(st.integers(0, 2**32)))
    scales = [10.0 ** rng.randint(-6, 6) for _ in range(size)]
    columns = [[rng.random() * scale for _ in range(count)] for scale in scales]
    targets = [rng.gauss(0.3, 1.0) for _ in range(count)]
    return columns, targets, [rng.random() + 0.01 for _ in range(count)]


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_solver_meets_the_optimality_conditions(
    problem: tuple[list[list[float]], list[float], list[float]],
) -> None:
    """Karush-Kuhn-Tucker: x >= 0, and no allowed step goes downhill."""
    columns, targets, weights = problem
    if dependent_column(columns) is not None:
        return
    solution = nonnegative_least_squares(columns, targets, weights)
    residuals = [
        t - math.fsum(x * column[i] for x, column in zip(solution, columns, strict=True))
        for i, t in enumerate(targets)
    ]
    size = math.sqrt(math.fsum(w * t * t for w, t in zip(weights, targets, strict=True)))
    for x, column in zip(solution, columns, strict=True):
        norm = math.sqrt(math.fsum(w * c * c for w, c in zip(weights, column, strict=True)))
        gradient = math.fsum(
            w * c * r for w, c, r in zip(weights, column, residuals, strict=True)
        ) / (norm * size)
        assert x >= 0
        assert gradient < 1e-5
        assert x == 0 or abs(gradient) < 1e-5


def test_dependent_columns_are_named() -> None:
    assert dependent_column([[1.0, 1.0], [1.0, 2.0]]) is None
    assert dependent_column([[1.0, 1.0], [2.0, 2.0]]) == 1
    assert dependent_column([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 2.0, 1.0]]) == 2
    assert dependent_column([[1.0, 2.0], [0.0, 0.0]]) == 1
