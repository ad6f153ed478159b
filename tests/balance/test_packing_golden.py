"""The same plans on every Python version, machine and hash seed: digests of whole plans."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.balance import SequenceLoad, plan_dynamic_cp, plan_packing

LOAD = SequenceLoad.from_hidden_size(4096)

DIGESTS = {
    "microbatch": "b29a55246629a0ea",
    "step": "7ce7c862d8431e36",
    "dynamic": "ed56e322739a06f8",
}


def lengths_of(count: int) -> list[int]:
    """Draw heavy-tailed lengths with integers only: up to 500 + 1000 x 2 ** (0 .. 6)."""
    state, lengths = 1, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        lengths.append(500 + (state >> 33) % (1000 << (state >> 60) % 7))
    return lengths


def digest(kind: str) -> str:
    """Return a digest of a whole plan."""
    lengths = lengths_of(300)
    if kind == "dynamic":
        plan = plan_dynamic_cp(
            lengths, tokens_per_rank=8192, num_ranks=32, load=LOAD, communication=0.01
        )
        text = repr(plan)
    elif kind == "step":
        text = repr(
            plan_packing(lengths, capacity=65536, num_ranks=8, load=LOAD, synchronize="step")
        )
    else:
        text = repr(plan_packing(lengths, capacity=65536, num_ranks=8, load=LOAD))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("kind", DIGESTS)
def test_plans_are_the_same_everywhere(kind: str) -> None:
    assert digest(kind) == DIGESTS[kind]


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_plans_do_not_depend_on_hashing(seed: str) -> None:
    code = f"from {__name__} import DIGESTS, digest; print(*map(digest, DIGESTS))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == list(DIGESTS.values())
