"""`examples/train_gpt_packed.py`: its options, its three runs, its table and picture."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness import RankPools

pytest.importorskip("megatron.core")

if TYPE_CHECKING:
    from gpt.record import RunRecord

SMALL = ["--steps", "2", "--documents-per-rank", "4", "--longest", "120", "--tokens-per-rank"]


def _train(_: int, __: int, context_parallel: int, picture: str) -> "list[RunRecord]":
    import torch

    from gpt.groups import Parallelism, model_groups
    from gpt.options import parse_options
    from gpt.train import ONE_BY_ONE, train

    options = parse_options(
        [*SMALL, "300", "--context-parallel", str(context_parallel), "--picture", picture]
    )
    groups = model_groups(Parallelism(context=context_parallel))
    return [
        train(scheduler, options, groups, torch.device("cpu"), iter(range(options.steps)))
        for scheduler in (ONE_BY_ONE, "dp_balanced", "evenstep_balanced")
    ]


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_the_three_runs_train_the_same_model(
    ranks: RankPools, tmp_path: Path, context_parallel: int
) -> None:
    from gpt.report import results_table, save_picture

    picture = tmp_path / "packs.png"
    runs, *_ = ranks(4).run(_train, context_parallel, str(picture), deadline_s=400)
    one_by_one, arrival, balanced = runs
    assert balanced.losses == pytest.approx(one_by_one.losses, rel=1e-5)
    assert arrival.losses == pytest.approx(one_by_one.losses, rel=1e-5)
    assert one_by_one.losses[1] < one_by_one.losses[0]
    assert one_by_one.microbatches_per_step == 4
    assert balanced.microbatches_per_step < 4
    assert balanced.imbalance <= one_by_one.imbalance
    assert balanced.fill > one_by_one.fill
    assert results_table(runs).row_count == 6
    save_picture(runs, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0: at least 1"),
        (["--tokens-per-rank", "100"], "--tokens-per-rank is 100.*longest document, 2000"),
        (["--width", "40"], "--width is 40: a multiple of 16"),
        (["--longest", "3"], "--longest is 3: at least 17"),
        (["--learning-rate", "2"], "--learning-rate is 2.0"),
        (["--picture", "packs.pdf"], "must end in .png"),
        (["--nonesuch"], "unrecognized arguments: --nonesuch"),
    ],
)
def test_bad_options_end_in_one_line(arguments: list[str], message: str) -> None:
    from command_line import OptionError
    from gpt.options import parse_options

    with pytest.raises(OptionError, match=message) as error:
        parse_options(arguments)
    assert "\n" not in str(error.value)


def test_documents_are_real_text_with_a_heavy_tail() -> None:
    from gpt.text import standard_library_documents

    lengths = sorted(map(len, standard_library_documents(max_bytes=100_000)))
    median = lengths[len(lengths) // 2]
    assert len(lengths) > 500
    assert lengths[-1] > 20 * median
