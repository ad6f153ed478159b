"""A plain loader balanced in one call: passes, epochs, length, groups, state, and the costs."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from evenstep.balance import transformer_cost
from evenstep.reorder_buffer import (
    SAMPLE_LIST,
    ImageCost,
    TextAndImageCost,
    TextCost,
    balance_loader,
    padded_text,
)
from evenstep.reorder_buffer.layout import BatchLayout
from tests.harness import RankPools
from tests.reorder_buffer.loaders import (
    PlainLoader,
    StatefulLoader,
    numbered_batches,
    numbers_of,
)


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Sample i is a text of i % 9 + 1 tokens, all of them i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((index % 9 + 1,), index)}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    return {"input_ids": ids}


def test_without_process_groups_it_serves_all_in_every_pass() -> None:
    loader = PlainLoader(numbered_batches(4))
    with balance_loader(loader, TextCost(), window_size=3) as batches:
        assert len(batches) == 4
        for _ in range(2):
            served = [numbers_of(batch) for batch in batches]
            assert [sorted(numbers) for numbers in served] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert loader.passes == 2
    with pytest.raises(RuntimeError, match="this balanced loader was closed; make a new one"):
        iter(batches)
    batches.close()  # again


def test_a_second_pass_over_an_iterator_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with balance_loader(iter(numbered_batches(4)), TextCost()) as batches:
        assert len([*batches]) == 4
        assert not caplog.records
        assert [*batches] == []
        assert "the data is a list_iterator, an iterator, which gives one pass" in caplog.text


def test_a_new_pass_ends_the_one_before() -> None:
    batches = balance_loader(PlainLoader(numbered_batches(50)), TextCost())
    first = iter(batches)
    next(first)
    second = iter(batches)
    assert sorted(numbers_of(next(second))) == [0, 1]
    with pytest.raises(RuntimeError, match="was shut down"):
        list(first)


class Endless(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield Texts(1)[0]


def test_a_loader_without_length_has_none() -> None:
    loader: DataLoader[Any] = DataLoader(Endless(), batch_size=2)
    cost = TextCost(field="input_ids", ignore=None)
    with balance_loader(loader, cost) as batches:
        with pytest.raises(TypeError, match=r"the DataLoader of a rank has no len\(\)"):
            len(batches)
        next(iter(batches))
    with (
        balance_loader(iter(numbered_batches(2)), TextCost()) as batches,
        pytest.raises(TypeError, match="has no len"),
    ):
        len(batches)


class Epochs:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Parts(PlainLoader):
    """A loader whose samplers and data set take epochs; the sampler is in two places."""

    def __init__(self) -> None:
        super().__init__(numbered_batches(2))
        self.sampler = Epochs()
        self.batch_sampler = Epochs()
        self.batch_sampler.sampler = self.sampler  # type: ignore[attr-defined]  # as torch's has
        self.dataset = Epochs()


def test_set_epoch_reaches_each_part_once_or_the_loader_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = Parts()
    with balance_loader(parts, TextCost()) as batches:
        batches.set_epoch(3)
    assert parts.sampler.epochs == parts.batch_sampler.epochs == parts.dataset.epochs == [3]

    class Own(Parts, Epochs):
        def __init__(self) -> None:
            Epochs.__init__(self)
            Parts.__init__(self)

    own = Own()
    with balance_loader(own, TextCost()) as batches:
        batches.set_epoch(4)
    assert (own.epochs, own.sampler.epochs) == ([4], [])
    with balance_loader(PlainLoader([]), TextCost()) as batches:
        batches.set_epoch(5)
    assert "no part of the PlainLoader takes an epoch" in caplog.text


@pytest.mark.parametrize("kind", [PlainLoader, StatefulLoader])
def test_a_state_behind_a_pass_begins_the_next(kind: type[PlainLoader]) -> None:
    with balance_loader(kind(numbered_batches(3)), TextCost(), window_size=2) as first:
        whole = [numbers_of(batch) for batch in first]
        state = first.state_dict()
    with balance_loader(kind(numbered_batches(3)), TextCost(), window_size=2) as second:
        second.load_state_dict(state)
        assert [numbers_of(batch) for batch in second] == whole
        assert [numbers_of(batch) for batch in second] == whole


def test_a_state_in_a_pass_goes_on_there_with_its_epoch_and_then_begins_anew() -> None:
    def sampled() -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(Texts(12), num_replicas=1, rank=0)
        return DataLoader(Texts(12), batch_size=2, sampler=sampler, collate_fn=padded)

    cost = TextCost(field="input_ids", ignore=None)
    layout = BatchLayout(fields=padded_text(pad_token_id=0))
    with balance_loader(sampled(), cost, layout=layout, window_size=4) as first:
        epochs = []
        for epoch in (6, 7):
            first.set_epoch(epoch)
            epochs.append([batch["input_ids"].tolist() for batch in first])
        first.set_epoch(6)
        running = iter(first)
        served = [next(running)["input_ids"].tolist() for _ in range(5)]
        state = first.state_dict()
    assert epochs[0] != epochs[1]
    with balance_loader(sampled(), cost, layout=layout, window_size=4) as second:
        second.load_state_dict(state)
        assert served + [batch["input_ids"].tolist() for batch in second] == epochs[0]
        second.set_epoch(7)
        assert [batch["input_ids"].tolist() for batch in second] == epochs[1]
        with pytest.raises(ValueError, match=r"the state has \['model'\], and no 'pass'"):
            second.load_state_dict({"model": 1})


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="window_size is 0"):
        balance_loader(PlainLoader([]), TextCost(), window_size=0)
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized"):
        balance_loader(PlainLoader([]), TextCost(), group=object())  # type: ignore[arg-type]  # no group
    with pytest.raises(ValueError, match="the data is a int; it must be iterable"):
        balance_loader(3, TextCost())  # type: ignore[arg-type]  # no loader


def serve_texts(rank: int, _world_size: int, overlap: bool) -> dict[str, Any]:
    """Two epochs of padded text on real ranks, then an early end, and what is left behind."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    texts = Texts(28)
    sampler: DistributedSampler[Any] = DistributedSampler(texts, seed=1)
    loader = DataLoader(texts, batch_size=2, sampler=sampler, collate_fn=padded)
    if rank == 0:
        loader = PlainLoader([*loader, *loader])  # type: ignore[assignment]  # twice as long
    before = len(_world.pg_map)
    batches = balance_loader(
        loader,
        TextCost(field="input_ids", ignore=0),
        layout=BatchLayout(fields=padded_text(pad_token_id=0)),
        window_size=3,
        overlap=overlap,
    )
    length = len(batches)
    counts = [len([*batches]) for _ in range(2)]
    next(iter(batches))
    made = len(_world.pg_map) - before
    dist.barrier()
    del batches  # closes itself
    gc.collect()
    return {
        "length": length,
        "counts": counts,
        "made": made,
        "left": len(_world.pg_map) - before,
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_stop_together_and_leave_nothing_behind(ranks: RankPools, *, overlap: bool) -> None:
    for told in ranks(2).run(serve_texts, overlap):
        assert told == {
            "length": 7,
            "counts": [7, 7],
            "made": 2 if overlap else 1,
            "left": 0,
        }


def loads_of(_rank: int, _world_size: int) -> list[float]:
    """Balanced loads of this rank, and samples per micro-batch, with the default strategy."""
    texts = Texts(64)
    sampler: DistributedSampler[Any] = DistributedSampler(texts, shuffle=False)
    loader = DataLoader(texts, batch_size=8, sampler=sampler, collate_fn=lambda samples: samples)
    cost = TextCost(field="input_ids", ignore=None)
    with balance_loader(loader, cost, layout=SAMPLE_LIST) as batches:
        return [sum(len(sample["input_ids"]) for sample in batch) for batch in batches]


def test_loads_become_even(ranks: RankPools) -> None:
    first, second = ranks(2).run(loads_of)
    assert len(first) == 4
    assert all(abs(one - other) <= 2 for one, other in zip(first, second, strict=True))


MODEL = transformer_cost(hidden_size=8).of


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (TextCost(), 3.0),
        (TextCost(field="input_ids", ignore=7), 4.0),
        (TextCost(field="input_ids", ignore=None), 5.0),
        (TextCost(field="tags", ignore=None), 2.0),
        (TextCost(model=MODEL), MODEL(3)),
        (ImageCost(), 24.0),
        (ImageCost(elements_per_patch=5), 4.8),
        (ImageCost(elements_per_patch=5, model=MODEL), MODEL(5)),
        (ImageCost(field="absent"), 0.0),
        (TextAndImageCost(image_weight=0.5), 15.0),
    ],
)
def test_ready_costs(cost: TextCost, expected: float) -> None:
    flat: dict[str, Any] = {
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0]]),
        "input_ids": torch.tensor([[5, 6, 4, 7, 1]]),
        "pixel_values": torch.zeros(2, 3, 2, 2),
        "tags": [1, 2],
    }
    assert cost(flat) == expected
    assert " at 0x" not in repr(cost)  # ranks compare it


def test_costs_refuse_what_they_cannot_count() -> None:
    with pytest.raises(ValueError, match="field 'attention_mask' is missing; TextCost counts"):
        TextCost()({})
    with pytest.raises(ValueError, match="field 'pixel_values' is a list; ImageCost counts"):
        ImageCost()({"pixel_values": [1]})
    with pytest.raises(ValueError, match="elements_per_patch is 0; it must be >= 1"):
        ImageCost(elements_per_patch=0)
    with pytest.raises(ValueError, match="image_weight is -1; it must be finite and >= 0"):
        TextAndImageCost(image_weight=-1)
