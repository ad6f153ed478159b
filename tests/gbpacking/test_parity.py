"""The proof on the real model: a packed step on many ranks is the unpacked step on one process."""

from typing import Any

import pytest

from tests.gbpacking.gpt_steps import (
    NUM_MICROBATCHES,
    STEPS,
    Layout,
    documents,
    packed_steps,
    unpacked_steps,
)
from tests.harness import RankPools

pytest.importorskip("megatron.core")

WORLD_SIZE = 4


@pytest.mark.parametrize("scheduler", ["evenstep_balanced", "dp_balanced"])
@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, replicas=2), Layout(dp=4), Layout(dp=2, cp=2), Layout(dp=2, tp=2)],
    ids=["dp2", "dp4", "dp2-cp2", "dp2-tp2"],
)
def test_a_packed_step_is_the_unpacked_step(
    ranks: RankPools, scheduler: str, layout: Layout
) -> None:
    num_samples = layout.dp * NUM_MICROBATCHES
    import numpy as np

    # Importing Megatron-Core takes the ranks long, the first time.
    reference = ranks(WORLD_SIZE).run(unpacked_steps, num_samples, deadline_s=400)[0]
    results = ranks(WORLD_SIZE).run(packed_steps, scheduler, layout)
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert result["counts"] == results[0]["counts"]
        assert result["sums"] == results[0]["sums"]
        for name, whole in reference["gradients"].items():
            shard, dim = result["shards"].get(name, (0, 0))
            expected = np.split(whole, layout.tp if name in result["shards"] else 1, dim)[shard]
            error = abs(result["gradients"][name] - expected).max()
            assert error <= 1e-4 * abs(expected).max(), name
    _assert_every_token_once(results, num_samples, copies=layout.tp * layout.replicas)


def _assert_every_token_once(
    results: list[dict[str, Any]], num_samples: int, *, copies: int
) -> None:
    stream = documents()
    for step in range(STEPS):
        held = [
            token
            for result in results
            for microbatch in result["tokens"][step]
            for token in microbatch
        ]
        drawn = stream[step * num_samples : (step + 1) * num_samples]
        assert sorted(held) == sorted(byte for document in drawn * copies for byte in document[:-1])
