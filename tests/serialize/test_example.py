"""The example that sends samples between two processes."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "send_samples.py"


def test_samples_arrive_through_shared_memory_and_through_a_socket() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "shared memory: ['a.png', None] with [[0, 1], [0, 1, 2]]",
        "socket: ['a.png', None] with [[0, 1], [0, 1, 2]]",
    ]
    assert done.stderr == ""
