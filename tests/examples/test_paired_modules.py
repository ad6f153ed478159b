"""Two modules of different DP sizes: sample i of one is sample i of the other."""

import re

import pytest

from tests.examples.launch import DEADLINE_S, torchrun

LINE = re.compile(r"order \[(.*)\]: pictures match; image tokens per encoder rank \[(\d+), (\d+)\]")
STEPS, SAMPLES = 6, 8


@pytest.mark.timeout(DEADLINE_S + 20)
def test_activations_meet_their_own_texts() -> None:
    ended = torchrun("paired_modules.py", num_ranks=3)
    assert ended.returncode == 0, ended.stderr
    found = [match.groups() for line in ended.stdout.splitlines() if (match := LINE.match(line))]
    assert len(found) == STEPS
    moved = 0
    for step, (order, first, second) in enumerate(found):
        numbers = [int(number) for number in order.split(", ")]
        as_read = [*range(step * SAMPLES, (step + 1) * SAMPLES)]
        assert sorted(numbers) == as_read
        moved += numbers != as_read
        assert abs(int(first) - int(second)) <= 2
    assert moved == STEPS
    assert "Traceback" not in ended.stderr
