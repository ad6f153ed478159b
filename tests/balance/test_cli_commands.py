"""The command as users call it: tables, JSON, pictures, messages and exit codes."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner, Result

from evenstep.balance.cli.app import app
from evenstep.balance.cli.strategies import ACROSS_SLOTS, WITHIN_SLOT

NAMES = ["as read", *WITHIN_SLOT]


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("input") / "lengths.txt"
    path.write_text("\n".join(str(int(rng.lognormvariate(7, 0.8))) for _ in range(2000)))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "80"})


def simulate(*arguments: object) -> Result:
    return call("simulate", "--dp-size", 4, "--micro-batch", 4, *arguments)


def outcomes(result: Result) -> dict[str, dict[str, object]]:
    assert result.exit_code == 0, result.output
    return {entry["strategy"]: entry for entry in json.loads(result.stdout)["strategies"]}


@pytest.mark.parametrize("synchronize", ["microbatch", "step"])
@pytest.mark.parametrize("window", [1, 3])
def test_simulate_says_what_each_strategy_brings(
    lengths: Path, window: int, synchronize: str
) -> None:
    result = simulate(
        lengths, "--window", window, "--synchronize", synchronize, "--draws", 8, "--json"
    )
    found = outcomes(result)
    assert list(found) == NAMES + (list(ACROSS_SLOTS) if window > 1 else [])
    before = found["as read"]
    assert before["moved_share"] == before["time_saved"] == 0.0
    for entry in found.values():
        spread = entry["largest_over_mean"]
        assert isinstance(spread, dict)
        assert 1 <= spread["mean"] <= spread["worst"]
        assert spread["p95"] <= spread["worst"]
        gap = entry["gap_to_bound"]
        assert isinstance(gap, dict)
        assert -1e-9 <= gap["mean"] <= gap["worst"]
    for name in set(found) - {"as read"}:
        assert 0.1 < float(str(found[name]["time_saved"])) < 1
        assert 0 < float(str(found[name]["moved_share"])) <= 1
    about = json.loads(result.stdout)
    assert about["steps_available"] == 2000 // (16 * window)
    assert (about["samples"], about["window"]) == (2000, window)


def test_simulate_known_numbers(tmp_path: Path) -> None:
    path = tmp_path / "costs.txt"
    # Two ranks of two samples: as read 8 + 6 | 1 + 1, balanced 8 + 1 | 6 + 1.
    path.write_text("8\n6\n1\n1\n")
    arguments = (path, "--dp-size", 2, "--micro-batch", 2, "--json")
    found = outcomes(call("simulate", "--strategy", "lpt", *arguments))
    assert list(found) == ["as read", "lpt"]
    assert found["as read"]["largest_over_mean"] == {"mean": 1.75, "p95": 1.75, "worst": 1.75}
    assert found["lpt"]["largest_over_mean"] == {"mean": 1.125, "p95": 1.125, "worst": 1.125}
    assert found["lpt"]["time_saved"] == pytest.approx(1 - 9 / 14)
    assert found["lpt"]["moved_share"] == pytest.approx(7 / 16)  # the 6 and a 1 change places
    assert found["lpt"]["gap_to_bound"] == pytest.approx({"mean": 0, "p95": 0, "worst": 0})


def test_simulate_prints_a_table_and_an_answer(lengths: Path) -> None:
    result = simulate(lengths, "--draws", 10)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("10 of 125 steps, evenly spaced, in the order of the input: 4 ranks")
    rows = [line for line in lines if line.startswith(tuple(NAMES))]
    assert [next(n for n in NAMES if row.startswith(n)) for row in rows] == NAMES
    assert "Would it help? Yes" in result.stdout


def test_simulate_says_when_it_would_not_help(tmp_path: Path) -> None:
    path = tmp_path / "equal.txt"
    path.write_text("5\n" * 100)
    result = simulate(path)
    assert "Would it help? Hardly: no strategy saves more than 0.0% of the time" in result.stdout
    assert "With one sample" not in result.stdout


def test_one_sample_per_rank_needs_a_window(lengths: Path) -> None:
    one = ("simulate", lengths, "--dp-size", 4, "--micro-batch", 1, "--draws", 5)
    text = " ".join(call(*one).stdout.split())
    assert "only --window above 1, or packing, can help." in text
    assert "4 ranks x 1 sample x 1 micro-batch;" in text
    assert "or packing, can help" not in " ".join(call(*one, "--window", 2).stdout.split())


def test_json_names_the_best_strategy(lengths: Path, tmp_path: Path) -> None:
    about = json.loads(simulate(lengths, "--draws", 10, "--json").stdout)
    assert (about["best"], about["plot"]) == ("least_move", None)
    path = tmp_path / "equal.txt"
    path.write_text("5\n" * 100)
    assert json.loads(simulate(path, "--json").stdout)["best"] is None


def test_the_answer_prefers_equal_counts_and_little_movement(lengths: Path) -> None:
    answer = " ".join(simulate(lengths, "--draws", 10).stdout.split()).partition("help? ")[2]
    assert answer.startswith("Yes: least_move saves ")
    only = simulate(lengths, "--draws", 2, "--strategy", "unequal").stdout
    assert "Yes: unequal saves " in only


def test_zero_costs_are_no_division_by_zero(tmp_path: Path) -> None:
    path = tmp_path / "zero.txt"
    path.write_text("0\n" * 32)
    found = outcomes(simulate(path, "--json"))
    assert found["lpt"]["largest_over_mean"] == {"mean": 1.0, "p95": 1.0, "worst": 1.0}


def test_same_call_same_answer(lengths: Path) -> None:
    first, second = (json.loads(simulate(lengths, "--seed", 5, "--json").stdout) for _ in "ab")
    for about in (first, second):
        for entry in about["strategies"]:
            del entry["planning_s"]
    assert first == second
    assert first["seed"] == 5


def test_hidden_size_makes_lengths_costs(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("1200\n0\n600\n0\n")  # with H = 100: 1200 + 1200, 600 + 300
    call_ = ("simulate", path, "--dp-size", 2, "--micro-batch", 2, "--hidden-size", 100, "--json")
    spread = outcomes(call(*call_))["as read"]["largest_over_mean"]
    assert isinstance(spread, dict)
    assert spread["mean"] == pytest.approx(2400 / 1650)
    spread = outcomes(call(*call_, "--bidirectional"))["as read"]["largest_over_mean"]
    assert isinstance(spread, dict)
    assert spread["mean"] == pytest.approx(3600 / 2400)


def test_help_says_how_samples_are_drawn() -> None:
    text = " ".join(call("simulate", "--help").stdout.replace("│", " ").split())
    assert "Shuffle the input with this seed. Without it, samples are drawn in the order" in text


def pack(*arguments: object) -> Result:
    return call("pack", "--capacity", 32768, "--dp-size", 4, "--global-batch", 200, *arguments)


def test_pack_says_what_each_strategy_brings(lengths: Path) -> None:
    result = pack(lengths, "--draws", 3, "--hidden-size", 4096, "--json")
    found = outcomes(result)
    assert list(found) == ["arrival", "balanced"]
    assert found["arrival"]["time_saved"] == 0.0
    assert float(str(found["balanced"]["time_saved"])) > 0
    for entry in found.values():
        assert 0 < float(str(entry["fill"])) <= 1
        assert 0.5 < float(str(entry["padding_saved"])) < 1
        bins = entry["bins"]
        assert isinstance(bins, dict)
        assert bins["mean"] >= 4
    about = json.loads(result.stdout)
    assert (about["capacity"], about["global_batch"], about["steps_available"]) == (32768, 200, 10)


def test_pack_known_numbers(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("6\n4\n6\n4\n")
    found = outcomes(call("pack", path, "--capacity", 10, "--json"))
    balanced = found["balanced"]
    assert balanced["bins"] == {"mean": 2.0, "p95": 2, "worst": 2}
    assert balanced["fill"] == 1.0
    assert balanced["largest_load"] == {"mean": 10.0, "p95": 10.0, "worst": 10.0}
    assert balanced["padding_saved"] == 1.0


@pytest.mark.parametrize("numbers", ["5\n5\n", "8\n7\n8\n"])
def test_pack_where_there_is_no_padding_to_save(tmp_path: Path, numbers: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(numbers)
    arguments = ("pack", path, "--capacity", 10)
    assert outcomes(call(*arguments, "--json"))["balanced"]["padding_saved"] is None
    row = next(line for line in call(*arguments).stdout.splitlines() if "balanced" in line)
    assert row.split()[-4] == "-"  # then time saved, plan time, its unit


def test_pack_prints_a_table_and_an_answer(lengths: Path) -> None:
    result = pack(lengths, "--draws", 2)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "2 of 10 steps" in result.stdout
    assert "Would it help? Balanced, the step takes" in result.stdout


def test_pack_takes_a_short_input_as_one_step(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n" * 30)
    about = json.loads(call("pack", path, "--capacity", 10, "--json").stdout)
    assert (about["global_batch"], about["steps"]) == (30, 1)


@pytest.mark.parametrize(
    ("command", "name", "magic"),
    [
        ("simulate", "loads.png", b"\x89PNG"),
        ("pack", "loads.svg", b"<?xml"),
        ("pack", "loads.pdf", b"%PDF"),
    ],
)
def test_plot_is_a_picture(
    lengths: Path, tmp_path: Path, command: str, name: str, magic: bytes
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    run = simulate if command == "simulate" else pack
    result = run(lengths, "--draws", 1, "--plot", path)
    assert result.exit_code == 0
    assert result.stdout.endswith(f"\nLoad of every rank, before and after: {path}\n")
    assert path.read_bytes().startswith(magic)
    result = run(lengths, "--draws", 1, "--plot", path, "--json")
    assert json.loads(result.stdout)["plot"] == str(path)


@pytest.mark.parametrize(
    ("content", "arguments", "exit_code", "message"),
    [
        ("1\nx\n", (), 1, "costs.txt: 1 bad line of 2:\n  line 2: 'x' is not a number\nmend"),
        ("1\n2\n", (), 1, "costs.txt: it has 2 numbers, but one step takes 16 (4 ranks x 4 samp"),
        ("", (), 1, "costs.txt: there is no number in it"),
        ("1.5\n", ("--hidden-size", 64), 1, "line 1: '1.5' is not an integer >= 0"),
        ("1\n", ("--bidirectional",), 2, "--bidirectional needs --hidden-size"),
        ("1\n", ("--strategy", "best"), 2, "--strategy best must be one of"),
        ("1\n", ("--plot", "x.doc"), 2, "--plot x.doc must end in one of .png, .svg, .pdf"),
        ("1\n", ("--plot", "no/x.png"), 2, "--plot no/x.png is in a folder that does not exist"),
        ("1\n", ("--column", "a", "--format", "lines"), 2, "--column is for CSV and Parquet, but"),
        ("1\n", ("--key", "a", "--format", "csv"), 2, "--key is for JSON lines, but the format"),
        ("1\n", ("--format", "xml"), 2, "xml"),
        ("1\n", ("--window", "0"), 2, "window"),
        ("1\n", ("--strategy", "refined_window"), 2, "it needs --window above 1"),
        ('{"a": 1}\n', ("--format", "jsonl"), 2, "choose one of 1 keys with --key: a"),
        ('{"a": 1}\n', (), 1, "line 1: looks like JSON; choose a key with --key"),
        ("1\n", ("--draws", "-1"), 2, "draws"),
    ],
)
def test_simulate_errors(
    tmp_path: Path, content: str, arguments: tuple[object, ...], exit_code: int, message: str
) -> None:
    path = tmp_path / "costs.txt"
    path.write_text(content)
    result = simulate(path, *arguments)
    assert result.exit_code == exit_code
    flat = " ".join(result.stderr.replace("│", " ").split())
    assert " ".join(message.split()) in flat
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_missing_file_is_a_wrong_call(tmp_path: Path) -> None:
    result = simulate(tmp_path / "missing.csv")
    assert result.exit_code == 2
    assert "is not a file" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("5\n11\n", (), "line 2: '11' is more than the capacity of 10"),
        ("5\n0\n", (), "line 2: '0' is not an integer >= 1"),
        ("5\n5\n", ("--dp-size", 3), "step 0 cannot be packed: 2 sequences cannot fill 3 ranks"),
    ],
)
def test_pack_errors(
    tmp_path: Path, content: str, arguments: tuple[object, ...], message: str
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    result = call("pack", path, "--capacity", 10, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_bad_lines_left_out_are_still_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.txt"
    path.write_text("1\n" * 16 + "x\n")
    result = simulate(path, "--skip-bad", "--json")
    assert result.exit_code == 0
    assert "left out 1 bad line of 17:\n  line 17: 'x' is not a number" in result.stderr
    assert json.loads(result.stdout)["bad_lines"] == 1


def shell(code: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], input=text, capture_output=True, text=True, check=False
    )


MAIN = "from evenstep.balance.cli import main; main()"


def test_a_pipe_is_read() -> None:
    arguments = ["evenstep-balance", "simulate", "--dp-size", "2", "--micro-batch", "1", "--json"]
    numbers = "\n".join(map(str, range(1, 11)))
    done = shell(f"import sys; sys.argv = {arguments!r}; {MAIN}", numbers)
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert (about["input"], about["steps"]) == ("standard input", 5)
    assert done.stderr == ""


def test_a_closed_pipe_is_no_traceback(lengths: Path) -> None:
    arguments = ["x", "simulate", str(lengths), "--draws", "1", "--dp-size", "2"]
    arguments += ["--micro-batch", "2"]
    code = f"import sys; sys.argv = {arguments!r}; {MAIN}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing: str) -> None:
    done = shell(f"import sys; sys.modules[{missing!r}] = None; {MAIN}")
    assert done.returncode == 1
    assert done.stderr == (
        f"evenstep-balance needs the package {missing} for this; "
        "install it with: pip install 'evenstep-balance[cli]'\n"
    )


def test_matplotlib_is_only_needed_for_plots(lengths: Path) -> None:
    arguments = ["x", "simulate", str(lengths), "--draws", "1", "--dp-size", "2"]
    arguments += ["--micro-batch", "2"]
    code = f"import sys; sys.modules['matplotlib'] = None; sys.argv = {arguments!r}; {MAIN}"
    assert shell(code).returncode == 0
    done = shell(code.replace("'2']", "'2', '--plot', 'x.png']"))
    assert done.returncode == 1
    assert "pip install 'evenstep-balance[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_library_does_not_load_the_command() -> None:
    code = "import sys, evenstep.balance as b; print(*sorted(m for m in sys.modules if 'cli' in m))"
    assert shell(code).stdout.strip() == ""


def test_percent_of_time_is_consistent_with_the_ratios(lengths: Path) -> None:
    found = outcomes(simulate(lengths, "--draws", 1, "--json"))
    ratios = {}
    for name, entry in found.items():
        spread = entry["largest_over_mean"]
        assert isinstance(spread, dict)
        ratios[name] = spread["mean"]
    saved = float(str(found["lpt"]["time_saved"]))
    assert math.isclose(saved, 1 - ratios["lpt"] / ratios["as read"], rel_tol=1e-9)
