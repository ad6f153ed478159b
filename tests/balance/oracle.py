"""An exact solver for small inputs: mixed-integer programming with scipy's HiGHS."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def best_max_load(costs: Sequence[float], n_groups: int, least: int, most: int) -> float:
    """Return the lowest possible largest load of groups of `least` to `most` samples."""
    n = len(costs)
    # One 0/1 variable per (sample, group), and the largest load, which is minimised.
    n_variables = n * n_groups + 1
    rows, lower, upper = [], [], []
    for i in range(n):
        row = np.zeros(n_variables)
        row[i * n_groups : (i + 1) * n_groups] = 1
        rows.append(row)
        lower.append(1.0)
        upper.append(1.0)
    for g in range(n_groups):
        count = np.zeros(n_variables)
        count[g : n * n_groups : n_groups] = 1
        load = np.zeros(n_variables)
        load[g : n * n_groups : n_groups] = costs
        load[-1] = -1
        rows += [count, load]
        lower += [float(least), -np.inf]
        upper += [float(most), 0.0]
    objective = np.zeros(n_variables)
    objective[-1] = 1
    integrality = np.ones(n_variables)
    integrality[-1] = 0
    limits = np.ones(n_variables)
    limits[-1] = np.inf
    solution = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), lower, upper),
        integrality=integrality,
        bounds=Bounds(np.zeros(n_variables), limits),
        options={"mip_rel_gap": 0.0},
    )
    assert solution.success
    return float(solution.fun)
