"""Several costs per sample: the sum over phases of the largest load."""

import random
from itertools import combinations
from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import plan_groups, plan_phases


def two_phases(n: int, seed: int) -> list[list[float]]:
    rng = random.Random(seed)
    encoder = [rng.lognormvariate(0, 1) * rng.randint(0, 3) for _ in range(n)]
    language = [rng.lognormvariate(0.5, 0.5) for _ in range(n)]
    return [encoder, language]


def synced(phases: list[list[float]], groups: tuple[tuple[int, ...], ...]) -> float:
    return fsum(max(fsum(costs[i] for i in group) for group in groups) for costs in phases)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 4), st.data())
def test_every_sample_once_and_loads_as_said(
    n_phases: int, n_groups: int, size: int, data: st.DataObject
) -> None:
    one = st.lists(st.floats(0, 100), min_size=n_groups * size, max_size=n_groups * size)
    phases = data.draw(st.lists(one, min_size=n_phases, max_size=n_phases))
    plan = plan_phases(phases, n_groups)
    assert sorted(i for group in plan.groups for i in group) == list(range(n_groups * size))
    assert {len(group) for group in plan.groups} == {size}
    assert plan.max_load == pytest.approx(synced(phases, plan.groups))
    assert plan.lower_bound <= plan.max_load * (1 + 1e-9)
    summed = [fsum(sample) for sample in zip(*phases, strict=True)]
    assert plan.max_load <= synced(phases, plan_groups(summed, n_groups).groups) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_gains_over_the_summed_cost(seed: int) -> None:
    phases = two_phases(64, seed)
    summed = [fsum(sample) for sample in zip(*phases, strict=True)]
    plan = plan_phases(phases, 8)
    assert plan.max_load < 0.96 * synced(phases, plan_groups(summed, 8).groups)
    assert plan.gap < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_two_groups_of_four_against_all_divisions(seed: int) -> None:
    phases = two_phases(8, seed)
    best = min(
        synced(phases, (half, tuple(i for i in range(8) if i not in half)))
        for half in combinations(range(8), 4)
    )
    assert best * (1 - 1e-9) <= plan_phases(phases, 2).max_load <= best * 1.1


def test_golden_plan() -> None:
    plan = plan_phases([[4, 4, 0, 0], [0, 0, 4, 4]], 2)
    assert plan.groups in (((0, 2), (1, 3)), ((0, 3), (1, 2)))
    assert plan.loads == ((4.0, 4.0), (4.0, 4.0))
    assert (plan.max_load, plan.gap) == (8.0, 0.0)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="costs_per_phase is empty; give the costs of at least"):
        plan_phases([], 2)
    with pytest.raises(ValueError, match=r"costs_per_phase\[1\] has 1 samples, but phase 0 has 2"):
        plan_phases([[1.0, 2.0], [1.0]], 2)
    with pytest.raises(ValueError, match=r"costs_per_phase\[1\]\[0\] is -1; a cost must be"):
        plan_phases([[1.0, 2.0], [-1, 1.0]], 2)
    with pytest.raises(ValueError, match="n_groups is 3, but must divide"):
        plan_phases([[1.0, 2.0]], 3)
