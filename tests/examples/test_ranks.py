import contextlib
import io
import sys
from unittest import mock

from tests.harness import RankPools


def agree(rank: int, world_size: int, failing: list[int]) -> tuple[object, str]:
    import torch

    from vlm.ranks import Ranks, agreed

    value = ValueError(f"rank {rank} cannot") if rank in failing else f"value {rank}"
    errors = io.StringIO()
    result: object
    program = mock.patch.object(sys, "argv", ["train_vlm.py"])
    with contextlib.redirect_stderr(errors), program:
        try:
            result = agreed(value, Ranks(rank, world_size, torch.device("cpu")))
        except SystemExit as end:
            result = end.code
    return result, errors.getvalue()


def test_agreed_values_are_returned(ranks: RankPools) -> None:
    assert ranks(2).run(agree, []) == [("value 0", ""), ("value 1", "")]


def test_all_ranks_end_when_one_has_an_error(ranks: RankPools) -> None:
    line = "train_vlm.py: error: rank 1 cannot\n"
    assert ranks(2).run(agree, [1]) == [(2, ""), (2, line)]


def test_the_first_of_several_errors_is_printed(ranks: RankPools) -> None:
    line = "train_vlm.py: error: rank 0 cannot\n"
    assert ranks(2).run(agree, [0, 1]) == [(2, line), (2, "")]
