import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from vlm.record import RunRecord, StepRecord
from vlm.report import count_steps, largest_difference, results_table, save_picture, speed_up

SLOW = StepRecord(
    step_s=2.0,
    wait_s=0.0,
    load_gflop=30.0,
    samples=4,
    moved_samples=0,
    loss_sum=10.0,
    loss_tokens=10.0,
)
IDLE = SLOW._replace(step_s=1.9, load_gflop=10.0, loss_sum=50.0, loss_tokens=20.0)
EVEN = SLOW._replace(
    step_s=1.25, wait_s=0.05, load_gflop=20.0, moved_samples=1, loss_sum=30.003, loss_tokens=15
)


def run_of(*steps: list[StepRecord]) -> RunRecord:
    return RunRecord(torch.tensor(steps, dtype=torch.float64))


PLAIN = run_of([SLOW, IDLE], [IDLE, SLOW])
BALANCED = run_of([EVEN, EVEN], [EVEN, EVEN])


def test_a_run_sums_up_its_steps() -> None:
    assert PLAIN.step_s.tolist() == [2.0, 2.0]
    assert PLAIN.imbalance == 1.5
    assert BALANCED.imbalance == 1.0
    assert BALANCED.moved_share == 0.25
    assert BALANCED.wait_s == pytest.approx(0.05)
    assert PLAIN.loads.tolist() == [[30.0, 10.0], [10.0, 30.0]]
    # The mean over the tokens of the global batch, not the mean of the ranks' means (1.75).
    assert PLAIN.losses.tolist() == [2.0, 2.0]
    assert speed_up(PLAIN, BALANCED) == pytest.approx(1.6)
    assert largest_difference(PLAIN, BALANCED) == pytest.approx(0.0002)


def test_the_table_sets_both_runs_side_by_side() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(results_table(PLAIN, BALANCED, 0.025))
    cells = {
        parts[0]: parts[1:]
        for line in out.getvalue().splitlines()
        if len(parts := [part.strip() for part in line.strip("│┃").split("│")]) == 3
    }
    assert cells == {
        "step time p50": ["2000 ms", "1250 ms"],
        "step time p90": ["2000 ms", "1250 ms"],
        "largest load / mean load": ["1.500", "1.000"],
        "samples moved": ["0%", "25%"],
        "time in the exchange, per step": ["-", "25 ms"],
        "time waiting in next(), per step": ["0 ms", "50 ms"],
        "loss of the last step": ["2.000000", "2.000200"],
        "largest difference of the losses": ["-", "2.0e-04"],
        "speed-up that the loads allow": ["-", "1.50"],
        "speed-up": ["-", "1.60"],
    }


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    picture = tmp_path / "loads.png"
    save_picture(PLAIN, BALANCED, picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_a_terminal_progress_is_a_line_now_and_then() -> None:
    out = io.StringIO()
    assert list(count_steps("balanced", 23, Console(file=out))) == list(range(23))
    assert out.getvalue().splitlines() == [f"balanced: step {n} of 23" for n in (10, 20, 23)]


def test_a_terminal_shows_a_progress_bar() -> None:
    out = io.StringIO()
    steps = count_steps("balanced", 3, Console(file=out, force_terminal=True, width=80))
    assert list(steps) == [0, 1, 2]
    assert "100%" in out.getvalue()


def test_other_ranks_are_quiet() -> None:
    out = io.StringIO()
    assert list(count_steps("balanced", 20, Console(file=out, quiet=True))) == list(range(20))
    assert out.getvalue() == ""
