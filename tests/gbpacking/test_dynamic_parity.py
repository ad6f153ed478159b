"""The proof on the real model: groups of 1, 2 and 4 ranks in a step equal one rank, unpacked."""

from functools import cache
from typing import Any

import pytest

from tests.gbpacking.dynamic_steps import (
    LENGTHS,
    Layout,
    dynamic_step,
    sample_of,
    unpacked_step,
)
from tests.harness import RankPools

pytest.importorskip("megatron.core")

WORLD_SIZE = 4

LAYOUTS = {
    "dp4": Layout(dp=4),
    "dp2-cp2": Layout(dp=2, cp=2),
    "cp4": Layout(cp=4),
    "dp4-rotary": Layout(dp=4, rotary=True),
    "dp2-cp2-rotary": Layout(dp=2, cp=2, rotary=True),
    "dp2-tp2": Layout(dp=2, tp=2),
}


@pytest.fixture(scope="module")
def reference(ranks: RankPools) -> Any:
    """Return the unpacked step's result, by whether positions are rotary."""

    @cache
    def run(rotary: bool) -> dict[str, Any]:
        # Importing Megatron-Core takes the ranks long, the first time.
        result: dict[str, Any] = ranks(WORLD_SIZE).run(unpacked_step, rotary, deadline_s=400)[0]
        return result

    return run


@pytest.mark.parametrize(
    ("scheduler", "layout"),
    [
        *(("evenstep_dynamic_cp", name) for name in LAYOUTS),
        ("default_dynamic_cp", "dp4"),
        ("default_dynamic_cp", "dp2-cp2-rotary"),
    ],
)
def test_a_step_on_groups_of_all_sizes_is_the_unpacked_step(
    ranks: RankPools, reference: Any, scheduler: str, layout: str
) -> None:
    import numpy as np

    shape = LAYOUTS[layout]
    expected = reference(shape.rotary)
    results = ranks(WORLD_SIZE).run(dynamic_step, scheduler, shape)
    domain = shape.dp * shape.cp
    assert {size for one in results for size in one["sizes"]} == {
        size for size in (1, 2, 4) if size <= domain
    }
    for result in results:
        assert result["loss"].num_tokens == expected["loss"][1]
        assert result["loss"].mean == pytest.approx(expected["loss"][0], rel=1e-6)
        assert result["sums"] == results[0]["sums"]
        assert len(result["sizes"]) == len(results[0]["sizes"])
        for name, whole in expected["gradients"].items():
            shard, dim = result["shards"].get(name, (0, 0))
            part = np.split(whole, shape.tp if name in result["shards"] else 1, dim)[shard]
            error = abs(result["gradients"][name] - part).max()
            assert error <= 1e-5 * abs(whole).max(), (name, error, abs(whole).max())
    held = sorted(token for one in results for pack in one["tokens"] for token in pack)
    drawn = sorted(t for i in range(len(LENGTHS)) for t in sample_of(i)["tokens"].tolist())
    assert held == sorted(drawn * shape.tp)
