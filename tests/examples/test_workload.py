import dataclasses
import math

import pytest
import torch

from vlm.layout import (
    FIRST_WORD,
    IMAGE_START,
    IMAGE_TOKEN,
    PATCH_DIM,
    VOCABULARY_SIZE,
    Batch,
    images_of,
    images_per_sample,
    patch_coordinates,
    patches_per_sample,
)
from vlm.traces import ImageSize
from vlm.workload import MAX_IMAGES, MIN_TEXT_TOKENS, Workload

WORKLOAD = Workload(seed=7, scale=64)
SMALL = Workload(seed=7, scale=512)


def text_lengths(batch: Batch) -> torch.Tensor:
    return (batch["input_ids"] >= FIRST_WORD).sum(dim=1)


def assert_same(left: Batch, right: Batch) -> None:
    torch.testing.assert_close(dict(left), dict(right), rtol=0, atol=0)


def test_a_micro_batch_has_the_nested_layout() -> None:
    batch = WORKLOAD.micro_batch(range(5, 9))
    length = WORKLOAD.sequence_length
    images = images_of(batch)
    assert batch["sample_index"].tolist() == [5, 6, 7, 8]
    shapes = {key: tuple(value.shape) for key, value in batch.items() if torch.is_tensor(value)}
    assert shapes == {
        "sample_index": (4,),
        "input_ids": (4, length),
        "labels": (4, length),
        "loss_mask": (4, length),
        "attention_mask": (4, length),
        "position_ids": (3, 4, length),
    }
    assert images["hidden_states"].shape == (int(patches_per_sample(batch).sum()), PATCH_DIM)
    assert images["grid_thw"].shape == (int(images_per_sample(batch).sum()), 3)
    assert images["grid_thw"].prod(dim=1).sum() == len(images["hidden_states"])
    assert batch["input_ids"].max() < VOCABULARY_SIZE


def test_samples_depend_on_seed_and_index_alone() -> None:
    whole = SMALL.micro_batch(range(6))
    for index in range(6):
        alone = SMALL.micro_batch(range(index, index + 1))
        assert torch.equal(whole["input_ids"][index], alone["input_ids"][0])
    assert_same(whole, Workload(seed=7, scale=512).micro_batch(range(6)))
    other = Workload(seed=8, scale=512).micro_batch(range(6))
    assert not torch.equal(whole["input_ids"], other["input_ids"])


def test_the_ranks_read_disjoint_shards_of_each_global_batch() -> None:
    workload = Workload(seed=7, scale=4096)
    shards = [
        [
            batch["sample_index"].tolist()
            for batch in workload.micro_batches(rank=rank, num_ranks=3, batch_size=2, num_batches=2)
        ]
        for rank in range(3)
    ]
    assert shards == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


def test_lengths_and_image_counts_follow_the_traces() -> None:
    batches = [WORKLOAD.micro_batch(range(start, start + 50)) for start in range(0, 500, 50)]
    counts = torch.cat([images_per_sample(batch) for batch in batches])
    assert set(counts.tolist()) == set(range(MAX_IMAGES + 1))
    assert counts.double().mean().item() == pytest.approx(MAX_IMAGES / 2, rel=0.1)
    patches = torch.cat([images_of(batch)["grid_thw"].prod(dim=1) for batch in batches])
    assert patches.double().mean().item() == pytest.approx(14479 / 64, rel=0.15)
    assert patches.double().median().item() == pytest.approx(7300 / 64, rel=0.15)
    text = torch.cat([text_lengths(batch) for batch in batches])
    assert text.min() >= MIN_TEXT_TOKENS
    assert text.double().median().item() == pytest.approx(1412 / 64, rel=0.1)


@pytest.mark.parametrize("scale", [1, 64, 5000, 100_000])
def test_the_longest_possible_sample_fits(scale: int) -> None:
    huge = tuple(ImageSize(side, 12_000) for side in (6_000, 9_000, 12_000))
    workload = Workload(seed=0, scale=scale, image_sizes=huge)
    if scale == 1:  # building it takes gigabytes: check the bound alone
        assert workload.sequence_length >= 3 * (1 + 16384) + 14089
        return
    batch = workload.micro_batch(range(100))
    assert int(batch["attention_mask"].sum(dim=1).max()) <= workload.sequence_length


def test_labels_are_the_next_tokens_of_the_answer() -> None:
    batch = WORKLOAD.micro_batch(range(20))
    for row in range(20):
        counted = batch["loss_mask"][row].nonzero().flatten()
        assert len(counted) == text_lengths(batch)[row] // 2
        assert batch["attention_mask"][row, counted + 1].all()
        assert torch.equal(batch["labels"][row, counted], batch["input_ids"][row, counted + 1])
        assert (batch["labels"][row, counted] >= FIRST_WORD).all()
        last = int(batch["attention_mask"][row].sum()) - 1
        assert counted[-1] == last - 1


def test_positions_of_text_and_images() -> None:
    size = ImageSize(width=8 * 3 * 28, height=8 * 2 * 28)  # 2 x 3 image tokens at scale 64
    workload = Workload(seed=1, scale=64, image_sizes=(size,))
    batches = (workload.micro_batch(range(index, index + 1)) for index in range(50))
    batch = next(batch for batch in batches if images_per_sample(batch) == 1)
    ids = batch["input_ids"][0]
    assert ids[:7].tolist() == [IMAGE_START] + [IMAGE_TOKEN] * 6
    assert batch["position_ids"][:, 0, :10].tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]


def test_patches_of_a_merged_square_stand_together() -> None:
    assert patch_coordinates(4, 4).T.tolist() == [
        *([0, 0], [0, 1], [1, 0], [1, 1]),
        *([0, 2], [0, 3], [1, 2], [1, 3]),
        *([2, 0], [2, 1], [3, 0], [3, 1]),
        *([2, 2], [2, 3], [3, 2], [3, 3]),
    ]
    assert math.prod(patch_coordinates(6, 2).shape) == 24


def test_the_workload_is_a_frozen_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WORKLOAD.seed = 1  # type: ignore[misc]  # the point of the test
