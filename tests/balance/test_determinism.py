"""Same costs, same plan: under any hash seed and any supported Python; and a light import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import evenstep.balance
from tests.balance.plan_digest import plan_digest

DIGEST = "9bd02da3b51b1668cf29100299dbfe503f475d02cd0b2dc3466335c4827d16d8"
"""Of all plans of `plan_digest`, asserted by whichever Python runs the tests."""

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


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_plans_do_not_depend_on_the_python_version(version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no python{version} here; CI runs this file under each of them")
    assert run_digest(python, "7") == DIGEST


def find_python(version: str) -> str | None:
    """Return an interpreter of that version that really starts (a pyenv shim may not)."""
    command = f"python{version}"
    try:
        done = subprocess.run(
            [command, "-c", "import sys; print(sys.executable)"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


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
