"""Non-negative least squares for a handful of coefficients, in pure Python.

The problem is to find x >= 0 that minimises the weighted sum of (row . x - target)**2. It is
solved on the normal equations, whose size is the number of coefficients, after scaling every
column to length one. That squares the condition number, which is harmless here: the features of
steps are few and `dependent_column` finds those that do not differ.
"""

import math
from collections.abc import Sequence
from operator import mul
from typing import TypeAlias

Row: TypeAlias = Sequence[float]
Matrix: TypeAlias = list[list[float]]

# The part of a unit column that the columns before it must leave unexplained, squared. Rounding
# leaves about 1e-16, and below 1e-10 the coefficients would be mostly noise.
_INDEPENDENT = 1e-10

# Gradients below this, on unit columns and a unit target, are rounding.
_STATIONARY = 1e-12

# As in other implementations of the method: it hardly ever needs two.
_ROUNDS_PER_COLUMN = 3


def dependent_column(columns: Sequence[Row]) -> int | None:
    """Return the first column that is zero or a combination of those before it, else None."""
    scales = [math.sqrt(_dot(column, column)) for column in columns]
    if 0.0 in scales:
        return scales.index(0.0)
    gram = _scaled_gram(columns, scales)
    for size in range(1, len(columns) + 1):
        if _cholesky(gram, list(range(size))) is None:
            return size - 1
    return None


def nonnegative_least_squares(
    columns: Sequence[Row], targets: Row, weights: Row | None = None
) -> list[float]:
    """Return the x >= 0 with the least weighted squared error.

    The active-set method of Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter
    23: columns enter the positive set by steepest gradient and leave it when their coefficient
    would turn negative.

    Args:
        columns: Feature by feature, one value per measurement; none may be dependent.
        targets: What was measured.
        weights: Weight of each measurement, all 1 by default.
    """
    if weights is not None:
        roots = [math.sqrt(weight) for weight in weights]
        columns = [list(map(mul, column, roots)) for column in columns]
        targets = list(map(mul, targets, roots))
    # Weights may have taken all that a column holds: its scale only must not divide by zero.
    scales = [math.sqrt(_dot(column, column)) or 1.0 for column in columns]
    target_scale = math.sqrt(_dot(targets, targets)) or 1.0
    gram = _scaled_gram(columns, scales)
    moments = [
        _dot(column, targets) / (scale * target_scale)
        for column, scale in zip(columns, scales, strict=True)
    ]
    solution = _lawson_hanson(gram, moments)
    return [x * target_scale / scale for x, scale in zip(solution, scales, strict=True)]


def leverages(columns: Sequence[Row], kept: Sequence[int]) -> list[float]:
    """Return x^T (K^T K)^-1 x of every measurement x, K being those that are kept.

    If all residuals have the variance s**2, a fit to K misses a further measurement by
    s**2 * (1 + leverage): much where the kept ones say little about it. The columns must be
    independent over K.
    """
    kept_columns = [[column[i] for i in kept] for column in columns]
    scales = [math.sqrt(_dot(column, column)) for column in kept_columns]
    lower = _cholesky(_scaled_gram(kept_columns, scales), list(range(len(columns))))
    assert lower is not None
    found = []
    for row in zip(*columns, strict=True):
        solved = _forward(lower, [x / scale for x, scale in zip(row, scales, strict=True)])
        found.append(_dot(solved, solved))
    return found


def _lawson_hanson(gram: Matrix, moments: list[float]) -> list[float]:
    size = len(moments)
    solution = [0.0] * size
    positive: list[int] = []
    # Exact arithmetic never visits a set of columns twice; rounding could, and is stopped here.
    for _ in range(_ROUNDS_PER_COLUMN * size):
        gradient = [moments[j] - _dot(gram[j], solution) for j in range(size)]
        outside = [j for j in range(size) if j not in positive and gradient[j] > _STATIONARY]
        if not outside:
            break
        positive.append(max(outside, key=gradient.__getitem__))
        solution = _descend(gram, moments, solution, positive)
    return solution


def _descend(
    gram: Matrix, moments: list[float], start: list[float], positive: list[int]
) -> list[float]:
    """Walk from `start` to the minimum over the positive columns, dropping those that reach 0."""
    solution = start
    while positive:
        target = _solve(gram, moments, positive)
        if all(target[j] > 0 for j in positive):
            return target
        steps = {
            j: solution[j] / (solution[j] - target[j]) if solution[j] > 0 else 0.0
            for j in positive
            if target[j] <= 0
        }
        stopper = min(steps, key=steps.__getitem__)
        walk = steps[stopper]
        solution = [x + walk * (t - x) for x, t in zip(solution, target, strict=True)]
        positive.remove(stopper)
        solution[stopper] = 0.0
    return solution


def _solve(gram: Matrix, moments: list[float], chosen: list[int]) -> list[float]:
    """Return the least-squares solution that uses only the chosen columns."""
    lower = _cholesky(gram, chosen)
    solution = [0.0] * len(moments)
    if lower is None:  # weights can make columns dependent; the newest then has nothing to add
        chosen.pop()
        return _solve(gram, moments, chosen) if chosen else solution
    forward = _forward(lower, [moments[j] for j in chosen])
    for i in reversed(range(len(chosen))):
        known = math.fsum(lower[k][i] * solution[chosen[k]] for k in range(i + 1, len(chosen)))
        solution[chosen[i]] = (forward[i] - known) / lower[i][i]
    return solution


def _cholesky(gram: Matrix, chosen: list[int]) -> Matrix | None:
    """Return the lower triangle with L L^T = gram[chosen, chosen], None if it is singular."""
    lower: Matrix = []
    for i in chosen:
        row: list[float] = []
        for j, above in zip(chosen, lower, strict=False):
            row.append((gram[i][j] - _dot(row, above[:-1])) / above[-1])
        pivot = gram[i][i] - _dot(row, row)
        if pivot < _INDEPENDENT:
            return None
        lower.append([*row, math.sqrt(pivot)])
    return lower


def _forward(lower: Matrix, right: list[float]) -> list[float]:
    """Solve lower @ y = right."""
    solved: list[float] = []
    for row, value in zip(lower, right, strict=True):
        solved.append((value - _dot(row[:-1], solved)) / row[-1])
    return solved


def _scaled_gram(columns: Sequence[Row], scales: list[float]) -> Matrix:
    return [
        [_dot(a, b) / (scale_a * scale_b) for b, scale_b in zip(columns, scales, strict=True)]
        for a, scale_a in zip(columns, scales, strict=True)
    ]


def _dot(left: Row, right: Row) -> float:
    return math.fsum(map(mul, left, right))
