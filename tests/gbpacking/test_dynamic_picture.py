"""The simulation's picture."""

from pathlib import Path

import pytest

from evenstep.balance import plan_dynamic_cp

pytest.importorskip("matplotlib")


def test_plans_of_both_planners_are_drawn(tmp_path: Path) -> None:
    from benchmarks.simulate_dynamic_cp import NAMES, draw

    plans = {
        name: plan_dynamic_cp(
            [30, 12, 9, 7, 5, 3, 2], tokens_per_rank=8, num_ranks=4, strategy=strategy
        )
        for strategy, name in NAMES.items()
    }
    path = tmp_path / "picture.png"
    draw(plans, "a step", path)
    assert path.read_bytes().startswith(b"\x89PNG")
