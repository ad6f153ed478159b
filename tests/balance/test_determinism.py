"""Same costs, same plan: under any hash seed and any supported Python; and a light import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import evenstep.balance
from tests.balance.plan_digest import plan_digest

DIGEST = "361972239c261252aa22c1907fcf0fadf8da8fa7b1a5638fee0084f1911927b9"
"""Of all plans of `plan_digest`. CI asserts it under every supported Python."""

SOURCES = Path(evenstep.balance.__file__).parents[2]


def run_digest(python: str, hash_seed: str) -> str:
    done = subprocess.run(
        [python, str(Path(__file__).with_name("plan_digest.py"))],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_plans_are_those_of_every_other_machine() -> None:
    assert plan_digest() == DIGEST


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_plans_do_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    assert run_digest(sys.executable, hash_seed) == DIGEST


def test_importing_loads_no_heavy_module() -> None:
    script = (
        "import sys; before = set(sys.modules); import evenstep.balance; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    heavy = {"torch", "numpy", "scipy", "inspect", "statistics", "random", "logging", "asyncio"}
    assert "evenstep.balance" in loaded
    assert not loaded & heavy
