"""Resuming: exactly, from what was served, mid-window and mid-prefetch, again and at the end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from evenstep.exchange import ExchangeError
from evenstep.reorder_buffer import ReorderingBuffer, TextCost
from tests.harness import RankPools
from tests.reorder_buffer.loaders import (
    PlainLoader,
    StatefulLoader,
    numbered_batches,
    numbers_of,
)
from tests.reorder_buffer.numbered import over

LOADERS: list[Callable[[list[dict[str, Any]]], PlainLoader]] = [PlainLoader, StatefulLoader]
COUNT = 7  # with windows of 3: two whole ones and a rest
WINDOW = 3


def alone(loader: Any, *, overlap: bool = False, **changed: Any) -> ReorderingBuffer[Any]:
    arguments: dict[str, Any] = {
        "dp_rank": 0,
        "dp_size": 1,
        "n_groups": 2,
        "cost_of": TextCost(),
        "dp_group_gloo": None,
        "dp_group_nccl": None,
        "window_size": WINDOW,
    }
    return ReorderingBuffer(loader, overlap=overlap, **{**arguments, **changed})


def take(buffer: ReorderingBuffer[Any], count: int) -> list[list[int]]:
    return [numbers_of(next(buffer)) for _ in range(count)]


def saved_after(served: int, **changed: Any) -> dict[str, Any]:
    with alone(PlainLoader(numbered_batches(COUNT)), **changed) as buffer:
        take(buffer, served)
        return buffer.state_dict()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_goes_on_exactly_wherever_it_was_saved(
    kind: Callable[[list[dict[str, Any]]], PlainLoader], *, overlap: bool
) -> None:
    batches = numbered_batches(COUNT)
    with alone(kind(batches)) as whole:
        expected = take(whole, COUNT)
    assert expected != [numbers_of(batch) for batch in batches]  # else order proves nothing
    for stop in range(COUNT + 1):
        with alone(kind(batches), overlap=overlap) as first:
            served = take(first, stop)
            state = first.state_dict()
        assert first.state_dict() == state  # also after shutdown
        with alone(kind(batches), overlap=overlap) as second:
            second.load_state_dict(state)
            assert second.state_dict() == state
            served += take(second, min(2, COUNT - stop))
            state = second.state_dict()
        with alone(kind(batches), overlap=overlap) as third:
            third.load_state_dict(state)
            served += [numbers_of(batch) for batch in third]
            state = third.state_dict()
        assert served == expected
        with alone(kind(batches), overlap=overlap) as ended:
            ended.load_state_dict(state)
            assert ended.state_dict() == state
            assert list(ended) == []


def test_what_was_read_ahead_does_not_count() -> None:
    states = []
    for overlap in (False, True):
        loader = StatefulLoader(numbered_batches(30))
        with alone(loader, overlap=overlap) as buffer:
            take(buffer, 4)
            if overlap:
                worker = buffer._windows._worker  # type: ignore[attr-defined]  # of WorkerDoesAll
                while loader.read < 3 * WINDOW and worker._thread.is_alive():
                    pass
            states.append(buffer.state_dict())
    assert states[0] == states[1]
    assert states[0]["served"] == 1
    assert states[0]["place"]["loader"] == {"yielded": 3, "finished": False}


def test_a_stateful_loader_reads_only_the_current_window_again() -> None:
    loader = StatefulLoader(numbered_batches(COUNT))
    with alone(loader) as buffer:
        take(buffer, 4)
        state = buffer.state_dict()
    resumed = StatefulLoader(numbered_batches(COUNT))
    with alone(resumed) as buffer:
        buffer.load_state_dict(state)
        take(buffer, 2)
    assert resumed.read == WINDOW


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window_size": 2}, "window_size is 2, but the state was saved with 3"),
        ({"n_groups": 1}, "n_groups is 1, but the state was saved with 2"),
        ({"strategy": "refined"}, "strategy is 'refined', but the state was saved with 'lpt'"),
        (
            {"cost_of": TextCost(ignore=1)},
            r"cost_of is .TextCost\(.*ignore=1.*saved with .Text.*ignore=0",
        ),
    ],
)
def test_changed_settings_are_refused_with_both_values(
    changed: dict[str, Any], message: str
) -> None:
    with (
        alone(PlainLoader([]), **changed) as buffer,
        pytest.raises(ValueError, match=f"{message}(?s:.*)resume with the settings of then"),
    ):
        buffer.load_state_dict(saved_after(2))


def test_a_changed_dp_size_and_another_ranks_loader_are_refused() -> None:
    state = saved_after(2)
    state["settings"]["dp_size"] = 4
    with (
        alone(PlainLoader([])) as buffer,
        pytest.raises(ValueError, match="dp_size is 1, but the state was saved with 4"),
    ):
        buffer.load_state_dict(state)
    with alone(StatefulLoader(numbered_batches(COUNT))) as buffer:
        state = buffer.state_dict()
        state["dp_rank"] = 3
        with pytest.raises(ValueError, match="dp_rank is 0, but the state was saved by rank 3"):
            buffer.load_state_dict(state)


def test_states_that_cannot_be_returned_to_are_refused() -> None:
    with alone(PlainLoader(numbered_batches(COUNT))) as buffer:
        with pytest.raises(ValueError, match="the state has version None, and this release reads"):
            buffer.load_state_dict({"model": 1})
        with alone(StatefulLoader(numbered_batches(COUNT))) as other:
            state = other.state_dict()
        with pytest.raises(ValueError, match=r"this loader \(PlainLoader\) has no load_state_dict"):
            buffer.load_state_dict(state)
        next(buffer)
        with pytest.raises(RuntimeError, match="load_state_dict came after the first next"):
            buffer.load_state_dict(saved_after(1))
    with alone(PlainLoader(numbered_batches(2))) as buffer:
        buffer.load_state_dict(saved_after(5))
        with pytest.raises(ValueError, match="ended after 2 micro-batches, but the saved run had"):
            next(buffer)
    with alone(PlainLoader(numbered_batches(4))) as buffer:
        buffer.load_state_dict(saved_after(5))
        with pytest.raises(ValueError, match=r"window 1 has 1 micro-batches, but .* was served 2"):
            next(buffer)


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 2 * COUNT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([index]), "attention_mask": torch.ones(1)}


def test_a_shuffling_loader_resumes_by_its_generator_and_not_without() -> None:
    def shuffled(seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(Numbers(), batch_size=2, shuffle=True, generator=generator)

    with alone(shuffled(1)) as whole:
        expected = take(whole, COUNT)
    with alone(shuffled(1)) as first:
        served = take(first, 4)
        state = first.state_dict()
    with alone(shuffled(2)) as second:
        second.load_state_dict(state)
        assert served + take(second, 3) == expected
    with (
        alone(DataLoader(Numbers(), batch_size=2, shuffle=True)) as anew,
        pytest.raises(ValueError, match="the loader shuffles with the global random numbers"),
    ):
        anew.load_state_dict({**state, "place": {**state["place"], "generator": None}})


def run_and_resume(rank: int, _: int, overlap: bool) -> bool:
    """Compare a run with one that is saved and resumed after every number of micro-batches."""
    import torch.distributed as dist

    from evenstep.exchange import ModuleGroups

    batches = numbered_batches(COUNT, first=100 * rank)
    main = dist.group.WORLD
    assert main is not None
    with ModuleGroups.create(main, overlap=overlap) as groups:

        def buffer(loader: PlainLoader) -> ReorderingBuffer[Any]:
            return alone(
                loader,
                overlap=overlap,
                **over(groups),
            )

        with buffer(PlainLoader(batches)) as whole:
            expected = take(whole, COUNT)
        same = []
        for stop in (2, 3, 5):
            with buffer(StatefulLoader(batches)) as first:
                served = take(first, stop)
                state = first.state_dict()
            with buffer(StatefulLoader(batches)) as second:
                second.load_state_dict(state)
                same.append(served + [numbers_of(batch) for batch in second] == expected)
    return all(same)


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_resume_together(ranks: RankPools, *, overlap: bool) -> None:
    assert ranks(2).run(run_and_resume, overlap) == [True, True]


def resume_at(rank: int, _: int, served: list[int | None]) -> tuple[str, str]:
    """Resume each rank where `served` says; return the error's type, text and notes."""
    import torch.distributed as dist

    from evenstep.exchange import ModuleGroups

    main = dist.group.WORLD
    assert main is not None
    with (
        ModuleGroups.create(main, overlap=False) as groups,
        alone(PlainLoader(numbered_batches(COUNT)), **over(groups)) as buffer,
    ):
        state = buffer.state_dict()
        place = served[rank]
        if place is not None:
            windows = place // WINDOW * WINDOW
            state["place"]["batches_read"], state["served"] = windows, place - windows
            state["behind"] = place
            buffer.load_state_dict(state)
        try:
            next(buffer)
        except ExchangeError as error:
            return type(error).__name__, " ".join([str(error), *error.__notes__[:1]])
    return "", ""


def test_ranks_that_resume_at_different_steps_are_told(ranks: RankPools) -> None:
    told = ranks(2).run(resume_at, [4, 5])
    assert [kind for kind, _ in told] == ["MismatchError", "MismatchError"]
    assert all("all ranks must, each from its state of one step" in text for _, text in told)


def resume_uneven(
    rank: int, _: int, counts: list[int], stop: list[int], overlap: bool
) -> tuple[str, str]:
    """Resume behind `stop` micro-batches, or the end, of data that is uneven over the ranks."""
    import torch.distributed as dist

    from evenstep.exchange import ModuleGroups

    main = dist.group.WORLD
    assert main is not None
    with ModuleGroups.create(main, overlap=True) as groups:

        def buffer() -> ReorderingBuffer[Any]:
            return alone(
                PlainLoader(numbered_batches(counts[rank], first=100 * rank)),
                overlap=overlap,
                **over(groups),
                timeout_s=20.0,
            )

        expected, states = [], []
        with buffer() as whole:
            states.append(whole.state_dict())
            for batch in whole:
                expected.append(numbers_of(batch))
                states.append(whole.state_dict())
            states.append(whole.state_dict())  # the end was seen
        served = expected[: stop[rank]]
        with buffer() as second:
            second.load_state_dict(states[stop[rank]])
            try:
                served += [numbers_of(batch) for batch in second]
            except ExchangeError as error:
                return type(error).__name__, str(error)
    return ("", "") if served == expected else ("other micro-batches", str(served))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stop", range(5))  # 4: behind the end
def test_ranks_resume_though_their_data_is_uneven(
    ranks: RankPools, stop: int, *, overlap: bool
) -> None:
    assert ranks(2).run(resume_uneven, [3, 5], [stop, stop], overlap) == [("", "")] * 2


@pytest.mark.parametrize("stop", [[5, 3], [4, 3]])
def test_a_rank_that_resumes_at_the_end_alone_is_told(ranks: RankPools, stop: list[int]) -> None:
    for kind, text in ranks(2).run(resume_uneven, [4, 4], stop, False, deadline_s=60):
        assert kind == "MismatchError"
        assert "resumed_behind = '4 micro-batches and the end'" in text
