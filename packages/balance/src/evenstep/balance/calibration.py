"""Calibration: the coefficients of a cost model from measured steps.

    fit = calibrate([step_features(lengths) for lengths in lengths_of_each_step], seconds)
    fixed_s, linear, quadratic = fit.coefficients
    cost = SequenceLoad(linear=linear, quadratic=quadratic)

Measure one rank's own compute, before it waits for others. Where only the time of the whole step is
known, use the features of the rank with the heaviest load: that is whose time it was.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

from evenstep.balance.calibration_solver import (
    Row,
    dependent_column,
    leverages,
    nonnegative_least_squares,
)

# 1.4826 x the median absolute residual estimates the standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826
# A step is an outlier beyond this many of them; one in 16,000 normal residuals is.
_OUTLIER_SIGMAS = 4.0
# Residuals below this share of the typical step are rounding, and never make an outlier.
_ROUNDING = 1e-9
# Both iterations settle within a few rounds; these only bound them.
_MAX_ABSOLUTE_ROUNDS = 50
_MAX_REJECTION_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted cost model, and how well it describes the steps it was fitted to.

    The errors are taken over the steps that were kept; the outliers are listed, not hidden.

    Attributes:
        coefficients: Seconds per unit of each feature, >= 0, in the order of the features.
        num_steps: Steps that were given.
        outliers: Indices of the steps that were left out of the fit, ascending.
        rms_error_s: Root of the mean squared residual, in seconds.
        mean_relative_error: Mean of |predicted - measured| / measured.
        worst_relative_error: The largest of them.
        explained: Share of the variance of the seconds that the fit explains (R squared). It is
            at most 1, and near or below 0 where the features say nothing about the time.
    """

    coefficients: tuple[float, ...]
    num_steps: int
    outliers: tuple[int, ...]
    rms_error_s: float
    mean_relative_error: float
    worst_relative_error: float
    explained: float

    def predict(self, features: Row) -> float:
        """Return the predicted seconds of a step with these features.

        Raises:
            ValueError: The number of features is not that of the fit.
        """
        if len(features) != len(self.coefficients):
            raise ValueError(
                f"features={features!r} must have {len(self.coefficients)} values, "
                "as many as the fit has coefficients"
            )
        return math.fsum(map(mul, self.coefficients, features))


def step_features(lengths: Iterable[int]) -> tuple[float, float, float]:
    """Return (1, sum of L, sum of L * L) of the sequences of one step.

    Their coefficients are the fixed seconds per step, and `linear` and `quadratic` of a
    `SequenceLoad`.
    """
    exact = list(lengths)
    return 1.0, float(sum(exact)), float(sum(length * length for length in exact))


def calibrate(features: Sequence[Row], seconds: Row) -> Calibration:
    """Fit non-negative coefficients to measured steps, leaving out the few that do not belong.

    The result is the non-negative least-squares fit of the steps that were kept. Which ones these
    are is decided first from a fit of least absolute residuals, which a slow first step or a pause
    of the garbage collector hardly moves, and then from the fit itself until the choice stands. A
    step is left out if its residual exceeds four times the typical one both in seconds and relative
    to its prediction; the second condition keeps long steps, whose noise is naturally larger. A
    step unlike the kept ones is given the wider margin that its prediction deserves.

    Up to a quarter of the steps may be too slow or too fast by any factor, if the remaining ones
    show each feature large and small. Each round takes O(steps x coefficients**2), and there are
    about twenty; the result is the same on every platform with IEEE doubles.

    Sources: least absolute residuals by reweighted least squares, Schlossmacher 1973 (JASA 68);
    the scale from the median absolute residual, Hampel 1974 (JASA 69).

    Args:
        features: One row per step, of finite values >= 0, for example
            `step_features(lengths)`. A feature that is always 1 stands for a fixed time per step.
        seconds: The measured time of each step, positive and finite.

    Raises:
        ValueError: The numbers of steps differ, there are fewer steps than features, rows have
            different lengths, a value is out of range, or the steps do not tell the features apart.
    """
    columns = _checked_columns(features, seconds)
    coefficients = _least_absolute(columns, seconds)
    kept = list(range(len(seconds)))
    for _ in range(_MAX_REJECTION_ROUNDS):
        choice = _steps_that_belong(columns, seconds, coefficients, kept)
        kept_columns = [[column[i] for i in choice] for column in columns]
        if dependent_column(kept_columns) is not None:
            break
        coefficients = nonnegative_least_squares(kept_columns, [seconds[i] for i in choice])
        if choice == kept:
            break
        kept = choice
    return _report(columns, seconds, coefficients, kept)


def _checked_columns(features: Sequence[Row], seconds: Row) -> list[list[float]]:
    if len(features) != len(seconds):
        raise ValueError(
            f"features has {len(features)} steps and seconds {len(seconds)}; "
            "each step needs its features and its time"
        )
    width = len(features[0]) if features else 0
    if width == 0 or len(features) < width:
        raise ValueError(
            f"features has {len(features)} steps of {width} values; "
            "measure at least as many steps as there are coefficients, better ten times as many"
        )
    for index, (row, second) in enumerate(zip(features, seconds, strict=True)):
        if len(row) != width:
            raise ValueError(f"features[{index}] has {len(row)} values, features[0] has {width}")
        if not all(0 <= value < math.inf for value in row):
            raise ValueError(f"features[{index}]={row!r} must hold finite values >= 0")
        if not 0 < second < math.inf:
            raise ValueError(f"seconds[{index}]={second!r} must be positive and finite")
    columns = [[float(row[j]) for row in features] for j in range(width)]
    if (dependent := dependent_column(columns)) is not None:
        raise ValueError(
            f"feature {dependent} is zero or a combination of the features before it in every "
            "step, so its coefficient cannot be told; measure steps that differ in it, or drop it"
        )
    return columns


def _predict_all(columns: Sequence[Row], coefficients: Row) -> list[float]:
    return [math.fsum(map(mul, coefficients, row)) for row in zip(*columns, strict=True)]


def _residuals(columns: Sequence[Row], seconds: Row, coefficients: Row) -> list[float]:
    predictions = _predict_all(columns, coefficients)
    return [abs(p - second) for p, second in zip(predictions, seconds, strict=True)]


def _least_absolute(columns: Sequence[Row], seconds: Row) -> list[float]:
    """Return x >= 0 near the least sum of absolute residuals: each round divides by the last."""
    floor = _ROUNDING * _median(seconds)
    coefficients = nonnegative_least_squares(columns, seconds)
    loss = math.inf
    for _ in range(_MAX_ABSOLUTE_ROUNDS):
        residuals = _residuals(columns, seconds, coefficients)
        previous, loss = loss, math.fsum(residuals)
        if loss >= previous * (1 - 1e-6):
            break
        weights = [1 / max(residual, floor) for residual in residuals]
        coefficients = nonnegative_least_squares(columns, seconds, weights)
    return coefficients


def _steps_that_belong(
    columns: Sequence[Row], seconds: Row, coefficients: Row, kept: Sequence[int]
) -> list[int]:
    predictions = _predict_all(columns, coefficients)
    # In units of what a prediction from the kept steps may miss by.
    residuals = [
        abs(prediction - second) / math.sqrt(1 + leverage)
        for prediction, second, leverage in zip(
            predictions, seconds, leverages(columns, kept), strict=True
        )
    ]
    rounding_s = _ROUNDING * _median(seconds)
    relative = [
        residual / max(prediction, rounding_s)
        for residual, prediction in zip(residuals, predictions, strict=True)
    ]
    limit_s = max(_OUTLIER_SIGMAS * _MAD_TO_SIGMA * _median(residuals), rounding_s)
    limit_relative = max(_OUTLIER_SIGMAS * _MAD_TO_SIGMA * _median(relative), _ROUNDING)
    return [
        index
        for index, (residual, share) in enumerate(zip(residuals, relative, strict=True))
        if residual <= limit_s or share <= limit_relative
    ]


def _report(
    columns: Sequence[Row], seconds: Row, coefficients: Row, kept: list[int]
) -> Calibration:
    residuals = _residuals(columns, seconds, coefficients)
    squares = math.fsum(residuals[i] ** 2 for i in kept)
    relative = [residuals[i] / seconds[i] for i in kept]
    mean = math.fsum(seconds[i] for i in kept) / len(kept)
    variance = math.fsum((seconds[i] - mean) ** 2 for i in kept)
    return Calibration(
        coefficients=tuple(coefficients),
        num_steps=len(seconds),
        outliers=tuple(sorted(set(range(len(seconds))) - set(kept))),
        rms_error_s=math.sqrt(squares / len(kept)),
        mean_relative_error=math.fsum(relative) / len(kept),
        worst_relative_error=max(relative),
        explained=1 - squares / variance if variance else 0.0,
    )


def _median(values: Sequence[float]) -> float:
    """Return the middle value, the upper one of two; `statistics` is slow to import."""
    return sorted(values)[len(values) // 2]
