"""Paired modules with different DP sizes: the check of their order, and what it finds."""

from typing import Any

import pytest

from evenstep.reorder_buffer import PairedCheck, ReorderingBuffer, TextCost
from tests.harness import RankPools
from tests.reorder_buffer.loaders import PlainLoader, numbered_batches, numbers_of

ENCODER_RANKS = 2  # and one rank of the language model: DP 2 and DP 1, a grid of 2
SIZE = 4  # samples of a micro-batch over all ranks of a module


def shard(rank: int, world_size: int, windows: int) -> PlainLoader:
    """This rank's contiguous share of each micro-batch of its module."""
    size = SIZE // world_size
    batches = []
    for window in range(windows):
        (batch,) = numbered_batches(1, size=size, first=window * SIZE + rank * size)
        batches.append(batch)
    return PlainLoader(batches)


def serve_paired(
    rank: int, world_size: int, settings: list[dict[str, Any]], overlap: bool
) -> tuple[list[list[int]], str]:
    """Serve one module's data on each rank; return the numbers served, and the error."""
    import torch.distributed as dist

    from evenstep.exchange import ExchangeError, ModuleGroups

    encoder, language, everyone = (
        dist.new_group([*members])
        for members in (
            range(ENCODER_RANKS),
            range(ENCODER_RANKS, world_size),
            range(world_size),
        )
    )
    mine = encoder if rank < ENCODER_RANKS else language
    assert isinstance(mine, dist.ProcessGroup)
    assert isinstance(everyone, dist.ProcessGroup)
    changed = dict(settings[rank])
    windows = changed.pop("windows", 4)
    served: list[list[int]] = []
    with ModuleGroups.create(mine, overlap=True) as groups:
        buffer: ReorderingBuffer[Any] | None = None
        try:
            buffer = ReorderingBuffer(
                shard(groups.rank, groups.world_size, windows),
                dp_rank=groups.rank,
                dp_size=groups.world_size,
                dp_group_gloo=groups.control,
                dp_group_nccl=groups.payload,
                overlap=overlap,
                paired=PairedCheck(group=everyone, every=2),
                timeout_s=20.0,
                **{"n_groups": 2, "cost_of": TextCost(), **changed},
            )
            served.extend(numbers_of(batch) for batch in buffer)
        except ExchangeError as error:
            return served, f"{type(error).__name__}: {error}"
        finally:
            if buffer is not None:
                buffer.shutdown()
    return served, ""


@pytest.mark.parametrize("overlap", [False, True])
def test_modules_of_different_sizes_serve_one_order(ranks: RankPools, *, overlap: bool) -> None:
    first, second, language = ranks(3).run(serve_paired, [{}, {}, {}], overlap)
    assert [error for _, error in (first, second, language)] == ["", "", ""]
    joined = [[*a, *b] for a, b in zip(first[0], second[0], strict=True)]
    assert joined == language[0]
    assert [sorted(numbers) for numbers in joined] == [
        [*range(start, start + SIZE)] for start in range(0, 4 * SIZE, SIZE)
    ]
    assert joined != [sorted(numbers) for numbers in joined]


def test_settings_that_differ_between_modules_are_found_at_construction(ranks: RankPools) -> None:
    results = ranks(3).run(serve_paired, [{}, {}, {"strategy": "refined"}], False)
    for served, error in results:
        assert served == []
        assert error.startswith("MismatchError: ranks must be set alike")
        assert "rank 0 has strategy = 'lpt'" in error
        assert "rank 2 has strategy = 'refined'" in error


class Lying:
    """A cost that looks like the other module's, and is not."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, flat: dict[str, Any], /) -> float:
        return TextCost()(flat) * self.scale

    def __repr__(self) -> str:
        return "Lying()"


def test_costs_that_differ_raise_on_all_ranks_of_both_modules(ranks: RankPools) -> None:
    settings = [{"cost_of": Lying(scale)} for scale in (1.0, 1.0, 1.5)]
    for served, error in ranks(3).run(serve_paired, settings, False):
        assert served == []
        assert error.startswith("PairedOrderError: paired modules differ in window 0: ")
        assert "3 costs" in error
        assert "cost_of must depend only on what all modules hold" in error


def test_data_that_ends_at_different_windows_raises(ranks: RankPools) -> None:
    settings = [{"windows": windows} for windows in (4, 4, 3)]
    results = ranks(3).run(serve_paired, settings, False)
    for _, error in results:
        assert error.startswith("PairedOrderError: paired modules differ in window")


def test_every_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every is 0; it must be a positive number of windows"):
        PairedCheck(group=None, every=0)  # type: ignore[arg-type]  # refused before it is used
