"""A Hugging Face processor's own output through the buffer."""

import re

import pytest

from tests.examples.launch import DEADLINE_S, torchrun

LOADS = re.compile(r"largest / mean load: (\d\.\d\d) as it comes, (\d\.\d\d) balanced")


@pytest.mark.timeout(DEADLINE_S + 20)
def test_samples_arrive_as_the_processor_made_them() -> None:
    ended = torchrun("hf_processor.py")
    assert ended.returncode == 0, ended.stderr  # it compares every field of every micro-batch
    steps, loads = ended.stdout.splitlines()
    assert steps == "6 steps, every sample as the processor made it"
    match = LOADS.fullmatch(loads)
    assert match is not None
    before, after = map(float, match.groups())
    assert 1.0 <= after < before
    assert after <= 1.1
