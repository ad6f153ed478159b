"""The whole example: under torchrun, as a single process, and what it serves to three ranks."""

import re
import sys
from pathlib import Path

import pytest

import train_vlm
from tests.examples.launch import DEADLINE_S, torchrun
from tests.harness import RankPools

TINY = ("--scale", "1024", "--width", "64", "--depth", "1")
FLOAT32_ROUNDING = 5e-6  # of losses around 6, after a few steps


def table_rows(output: str) -> dict[str, list[str]]:
    lines = [line.strip().strip("│┃").split("│") for line in output.splitlines()]
    return {parts[0].strip(): [p.strip() for p in parts[1:]] for parts in lines if len(parts) == 3}


@pytest.mark.timeout(DEADLINE_S + 20)
def test_two_ranks_train_the_same_model_both_ways(tmp_path: Path) -> None:
    trace = tmp_path / "sizes.csv"
    trace.write_text("463,1013\n992,1403\n4961,7016\n604,1716\n")
    picture = tmp_path / "loads.png"
    ended = torchrun(
        "train_vlm.py", *TINY, "--steps=6", "--window=3", f"--trace={trace}", f"--picture={picture}"
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "ranks: 2 (cpu), steps: 6"
    assert lines[1:3] == ["as it comes: step 6 of 6", "balanced: step 6 of 6"]
    rows = table_rows(ended.stdout)
    plain, balanced = (float(cell) for cell in rows["largest load / mean load"])
    assert 1.0 <= balanced < plain
    assert rows["samples moved"][0] == "0%"
    assert int(rows["samples moved"][1].rstrip("%")) > 0
    assert float(rows["largest difference of the losses"][1]) <= FLOAT32_ROUNDING
    assert re.fullmatch(r"\d+ ms", rows["time in the exchange, per step"][1])
    assert re.fullmatch(r"\d+\.\d\d", rows["speed-up"][1])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in ended.stderr


@pytest.mark.timeout(DEADLINE_S + 20)
def test_bad_options_end_all_ranks_with_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "sizes.csv"
    trace.write_text("463,1013\nwide,tall\n")
    ended = torchrun("train_vlm.py", "--trace", str(trace))
    errors = [line for line in ended.stderr.splitlines() if line.startswith("train_vlm.py: error")]
    assert len(errors) == 1
    assert f"--trace: {trace}, line 2: 'wide,tall' is not a row of two positive" in errors[0]
    assert ended.returncode != 0
    assert "exitcode  : 2" in ended.stderr  # as torchrun reports it
    assert 'train_vlm.py", line' not in ended.stderr  # no traceback of the ranks


def run_alone(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train_vlm.py", *arguments])
    train_vlm.main()


def test_without_torchrun_it_is_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "loads.png"
    run_alone(monkeypatch, *TINY, "--steps=2", f"--picture={picture}")
    output = capsys.readouterr().out
    assert "ranks: 1 (cpu), steps: 2" in output
    rows = table_rows(output)
    assert rows["largest load / mean load"] == ["1.000", "1.000"]
    assert rows["samples moved"] == ["0%", "0%"]
    assert float(rows["largest difference of the losses"][1]) <= FLOAT32_ROUNDING
    assert picture.exists()


def test_bad_options_exit_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_alone(monkeypatch, "--steps", "0")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "train_vlm.py: error: --steps is 0: at least 1\n"


def served_samples(rank: int, world_size: int, picture: str) -> list[list[int]]:
    import torch

    import train_vlm as example
    from evenstep.reorder_buffer import WindowStats
    from vlm.options import parse_options
    from vlm.ranks import Ranks

    options = parse_options([*TINY, "--steps=3", "--batch-size=2", f"--picture={picture}"])
    loader = example.open_loader(options, Ranks(rank, world_size, torch.device("cpu")))
    windows: list[WindowStats] = []
    served = example.balance(loader, options, windows.append)
    indices = [batch["sample_index"].tolist() for batch in served]
    assert [window.window for window in windows] == [0, 1, 2]
    return indices


def test_three_ranks_together_serve_each_sample_of_a_step_once(
    ranks: RankPools, tmp_path: Path
) -> None:
    # Serving alone: an optimizer or DistributedDataParallel would cost each rank of the pool the
    # import of torch's compiler, which is most of what these tests take.
    by_rank = ranks(3).run(served_samples, str(tmp_path / "loads.png"))
    for step in range(3):
        served = [index for steps in by_rank for index in steps[step]]
        assert sorted(served) == list(range(6 * step, 6 * step + 6))
    assert by_rank != [[[6 * s + 2 * r, 6 * s + 2 * r + 1] for s in range(3)] for r in range(3)]
