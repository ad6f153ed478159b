"""Runs an example under torchrun, as a user would."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 500.0  # a hang never ends; several imports of torch on a busy machine take a minute


def torchrun(
    example: str, *arguments: str, num_ranks: int = 2
) -> "subprocess.CompletedProcess[str]":
    """Run `examples/<example>` on `num_ranks` ranks of this machine, and kill them if they hang."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*launch, f"--nproc-per-node={num_ranks}", f"examples/{example}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun and its ranks
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
