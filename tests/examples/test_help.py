"""Without torchrun, the examples say what they are and how they start."""

import os
import subprocess
import sys

import pytest

from tests.examples.launch import ROOT


@pytest.mark.parametrize(
    ("example", "exit_code", "says"),
    [
        ("ddp_text.py", 1, "uv run torchrun --standalone"),  # it has no options, and needs ranks
        ("paired_modules.py", 1, "uv run torchrun --standalone"),
        ("send_samples.py", 0, "The parent packs two samples"),
        ("train_gpt_packed.py", 0, "torchrun --standalone"),
    ],
)
def test_help_is_short(example: str, exit_code: int, says: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, f"examples/{example}", "--help"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr  # such as Megatron-Core's, when it is imported
