"""Plain DDP with two lines changed: it learns, and its ranks carry equal loads."""

import re

import pytest

from tests.examples.launch import DEADLINE_S, ROOT, torchrun

LINE = re.compile(r"epoch (\d): loss (\d\.\d+), largest / mean tokens (\d\.\d+)")
AT_MOST = 1.02  # as they come, the larger load of two ranks is 1.2 to 1.3 times the mean


@pytest.mark.timeout(DEADLINE_S + 20)
def test_it_learns_on_balanced_ranks() -> None:
    ended = torchrun("ddp_text.py")
    assert ended.returncode == 0, ended.stderr
    found = [LINE.fullmatch(line) for line in ended.stdout.splitlines()]
    epochs = [match.groups() for match in found if match is not None]
    assert [epoch for epoch, _, _ in epochs] == ["0", "1", "2"]
    losses = [float(loss) for _, loss, _ in epochs]
    assert losses[2] < losses[0]
    assert all(1.0 <= float(ratio) <= AT_MOST for _, _, ratio in epochs)
    assert "Traceback" not in ended.stderr


def test_it_has_forty_lines_and_evenstep_is_two_of_them() -> None:
    source = (ROOT / "examples" / "ddp_text.py").read_text(encoding="utf-8")
    code = [line for line in source.partition('"""\n\n')[2].splitlines() if line.strip()]
    assert len(code) <= 40
    assert sum("evenstep" in line or "balance_loader(" in line for line in code) == 2
