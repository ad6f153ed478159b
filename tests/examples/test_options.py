from pathlib import Path

import pytest

from command_line import OptionError
from vlm.model import ModelConfig
from vlm.options import parse_options


def test_the_defaults_follow_the_built_in_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse_options([])
    assert options.image_sizes == ()
    assert options.model == ModelConfig(width=192, depth=4)
    assert (options.steps, options.batch_size, options.window) == (40, 4, 1)
    assert options.picture == Path("out/train_vlm.png")
    assert (tmp_path / "out").is_dir()


def test_options_are_taken(tmp_path: Path) -> None:
    trace = tmp_path / "sizes.csv"
    trace.write_text("463,1013\n")
    picture = tmp_path / "new" / "loads.png"
    options = parse_options(
        ["--trace", str(trace), "--picture", str(picture), "--steps=6", "--window=3"]
    )
    assert options.image_sizes == ((463, 1013),)
    assert (options.steps, options.window) == (6, 3)
    assert picture.parent.is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "--steps is 0: at least 1"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--window 0", "--window is 0: at least 1"),
        ("--steps 4 --window 3", "--window is 3: must divide --steps, which is 4"),
        ("--batch-size 1", "--batch-size is 1: at least 2, as ranks with one sample each"),
        ("--scale -1", "--scale is -1: at least 1"),
        ("--depth 0", "--depth is 0: at least 1"),
        ("--width 100", "--width is 100: a multiple of 64"),
        ("--width 0", "--width is 0: a multiple of 64"),
        ("--learning-rate 0", "--learning-rate is 0.0: above 0 and below 1"),
        ("--learning-rate nan", "--learning-rate is nan: above 0 and below 1"),
        ("--seed -1", "--seed is -1: at least 0"),
        ("--trace none.csv", "--trace: cannot read the trace none.csv: No such file"),
        ("--trace", "argument --trace: expected one argument"),
        ("--picture loads.jpg", "--picture is loads.jpg: the name must end in .png"),
        ("--picture /dev/null/loads.png", "--picture: cannot make /dev/null"),
        ("--step 4", "unrecognized arguments: --step 4"),
        ("surplus", "unrecognized arguments: surplus"),
    ],
)
def test_bad_options_end_in_one_line(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as caught:
        parse_options(arguments.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("rank", "is_shown"), [("0", True), ("1", False)])
def test_help_explains_every_option_on_one_rank(
    rank: str,
    is_shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    if not is_shown:
        assert shown == ""
        return
    options = [
        "steps",
        "batch-size",
        "window",
        "scale",
        "width",
        "depth",
        "learning-rate",
    ]
    for option in [*options, "seed", "trace", "picture"]:
        assert f"--{option} " in shown
    assert "--overlap, --no-overlap" in shown
    assert shown.count("(default") == 11
    assert "Azure LLM inference trace 2023" in shown
    assert "SROIE" in shown
