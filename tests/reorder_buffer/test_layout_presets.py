"""The presets, on micro-batches like those that their loaders make."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.reorder_buffer import (
    SAMPLE_LIST,
    BatchLayout,
    TokenCounter,
    audio_layout,
    hf_vision_layout,
    image_layout,
    padded_text,
)
from tests.reorder_buffer.microbatches import assert_same, numbers

IMAGE, VIDEO, PAD = 7, 8, 0


def hf_batch(images: list[list[int]], videos: list[list[int]], **extra: Any) -> dict[str, Any]:
    """Return a processor's output: per sample, the merged tokens of its images and videos."""
    rows = [
        [1, *[IMAGE] * sum(own_images), 2, *[VIDEO] * sum(own_videos)]
        for own_images, own_videos in zip(images, videos, strict=True)
    ]
    length = max(map(len, rows))
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([row + [PAD] * (length - len(row)) for row in rows]),
        "position_ids": numbers(3, len(rows), length),
        **extra,
    }
    for group, suffix, items in (("image", "", images), ("video", "_videos", videos)):
        tokens = [count for own in items for count in own]
        if tokens:  # a processor leaves the keys out where no sample has any
            batch[f"{group}_grid_thw"] = torch.tensor([[1, 2, 2 * count] for count in tokens])
            batch[f"pixel_values{suffix}"] = numbers(4 * sum(tokens), 3).to(torch.float32)
    return batch


ITEMS = st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=3, max_size=3)


@settings(max_examples=60, deadline=None)
@given(ITEMS, ITEMS)
def test_hf_processors_items_are_found_by_their_placeholder_tokens(
    images: list[list[int]], videos: list[list[int]]
) -> None:
    layout = hf_vision_layout(image_token_id=IMAGE, video_token_id=VIDEO)
    batch = hf_batch(images, videos)
    flats = layout.split(batch)
    for group, suffix, items in (("image", "", images), ("video", "_videos", videos)):
        for flat, own in zip(flats, items, strict=True):
            if f"{group}_grid_thw" not in batch:
                assert f"{group}_grid_thw" not in flat
                continue
            assert_same(
                flat[f"{group}_grid_thw"],
                torch.tensor([[1, 2, 2 * n] for n in own]).long().view(-1, 3),
            )
            assert flat[f"pixel_values{suffix}"].shape == (4 * sum(own), 3)  # type: ignore[union-attr]  # a tensor
    assert_same(layout.merge(flats), batch)


def test_hf_text_only_micro_batches_meet_such_with_images() -> None:
    layout = hf_vision_layout(
        image_token_id=IMAGE, video_token_id=VIDEO, more=padded_text(pad_token_id=PAD)
    )
    with_images = hf_batch([[2], [1, 1]], [[], []])
    text = hf_batch([[], []], [[], []])
    merged = layout.merge([*layout.split(text), *layout.split(with_images)])
    assert merged["input_ids"].shape == (4, 4)
    assert merged["input_ids"][0].tolist() == [1, 2, PAD, PAD]
    assert_same(merged["pixel_values"], with_images["pixel_values"])
    assert "pixel_values_videos" not in merged
    again = layout.split(merged)
    assert again[2]["image_grid_thw"].shape == (1, 3)  # type: ignore[union-attr]  # a tensor
    assert_same(layout.merge(again), merged)


def test_hf_counts_can_be_given_by_group_instead() -> None:
    layout = hf_vision_layout()
    batch = hf_batch([[2], []], [[], [1, 1]], second_per_grid_ts=torch.tensor([0.5, 1.0]))
    flats = layout.split(batch, counts={"image": [1, 0], "video": torch.tensor([0, 2])})
    assert_same(flats[1]["second_per_grid_ts"], torch.tensor([0.5, 1.0]))
    assert_same(layout.merge(flats), batch)


def test_hf_images_of_unknown_samples_are_refused() -> None:
    """Two samples and two images: as many, but both belong to the first sample."""
    with pytest.raises(ValueError, match=r"counts for 'image' are missing"):
        hf_vision_layout().split(hf_batch([[1, 1], []], [[], []]))


@pytest.mark.parametrize(
    ("counter", "batch", "message"),
    [
        (
            TokenCounter(token_id=IMAGE, grid="image_grid_thw", square_merge_size=4),
            {"input_ids": numbers(2), "image_grid_thw": numbers(1, 3)},
            r"field 'input_ids': must be a tensor \[B, S\] to count the items of 'image_grid_thw'",
        ),
        (
            TokenCounter(token_id=IMAGE, grid="image_grid_thw", square_merge_size=2),
            hf_batch([[2], [1]], [[], []]),
            r"sample 0 has 2 tokens 7, which are not those of whole items .*\(\[4, 2\] tokens",
        ),
        (
            TokenCounter(token_id=IMAGE, grid="image_grid_thw", square_merge_size=100),
            hf_batch([[], [1]], [[], []]),
            r"sample 0 has 0 tokens 7, .* square_merge_size \(100\), and that no sample was cut",
        ),
    ],
)
def test_tokens_that_are_not_those_of_whole_items_are_refused(
    counter: TokenCounter, batch: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        counter(batch)


def test_an_image_without_tokens_is_refused() -> None:
    batch = hf_batch([[1], [1]], [[], []])
    batch["input_ids"][1] = PAD
    layout = hf_vision_layout(image_token_id=IMAGE)
    with pytest.raises(ValueError, match=r"'image_grid_thw': .* \[1, 0\] add up to 1"):
        layout.split(batch)


def test_whole_images_follow_their_count_field() -> None:
    batch = {
        "input_ids": numbers(3, 4),
        "num_images": torch.tensor([2, 0, 1]),
        "pixel_values": numbers(3, 3, 2, 2).to(torch.bfloat16),
        "image_sizes": torch.tensor([[2, 2], [2, 2], [1, 2]]),
    }
    layout = image_layout()
    flats = layout.split(batch)
    assert [flat["pixel_values"].shape[0] for flat in flats] == [2, 0, 1]  # type: ignore[union-attr]  # tensors
    assert_same(layout.merge(flats), batch)
    picked = layout.merge([flats[2], flats[0]])
    assert_same(picked["num_images"], torch.tensor([1, 2]))
    assert_same(picked["pixel_values"], batch["pixel_values"][torch.tensor([2, 0, 1])])


def test_whole_images_can_be_counted_by_the_caller() -> None:
    batch = {"input_ids": numbers(2, 4), "pixel_values": numbers(3, 3, 2, 2)}
    layout = image_layout(count_field=None)
    flats = layout.split(batch, counts=[3, 0])
    assert flats[1]["pixel_values"].shape == (0, 3, 2, 2)  # type: ignore[union-attr]  # a tensor
    assert_same(layout.merge(flats), batch)


def test_audio_frames_follow_their_lengths() -> None:
    batch = {"audio_features": numbers(5, 2), "audio_lengths": torch.tensor([4, 0, 1])}
    layout = audio_layout()
    flats = layout.split(batch)
    assert_same(flats[0]["audio_features"], numbers(5, 2)[:4])
    assert_same(layout.merge(flats), batch)


def test_audio_clips_follow_their_count_field() -> None:
    batch = {
        "num_clips": torch.tensor([2, 0, 1]),
        "audio_lengths": torch.tensor([1, 2, 3]),
        "audio_features": numbers(6, 2),
        "languages": ["de", "en", "fr"],
    }
    layout = audio_layout(count_field="num_clips", clip_fields=["languages"])
    flats = layout.split(batch)
    assert flats[0]["languages"] == ["de", "en"]
    assert_same(flats[2]["audio_features"], numbers(6, 2)[3:])
    assert_same(layout.merge(flats), batch)


def test_padded_text_of_different_lengths_meets() -> None:
    layout = BatchLayout(fields=padded_text(pad_token_id=5, pad_side="left"))
    short = {"input_ids": numbers(1, 1), "labels": numbers(1, 1), "position_ids": numbers(1, 1)}
    long = {"input_ids": numbers(1, 3), "labels": numbers(1, 3), "position_ids": numbers(1, 3)}
    merged = layout.merge(layout.split(short) + layout.split(long))
    assert merged["input_ids"].tolist() == [[5, 5, 0], [0, 1, 2]]
    assert merged["labels"].tolist() == [[-100, -100, 0], [0, 1, 2]]
    assert merged["position_ids"].tolist() == [[0, 0, 0], [0, 1, 2]]


def test_a_list_of_samples_comes_back_as_it_was() -> None:
    batch: list[dict[str, Any]] = [
        {"input_ids": numbers(4), "images": {"grid_thw": numbers(1, 3)}, "name": "a"},
        {"input_ids": numbers(9), "other": None},
    ]
    flats = SAMPLE_LIST.split(batch)
    assert flats[0].keys() == {"input_ids", "images.grid_thw", "name"}
    assert_same(SAMPLE_LIST.merge(flats[::-1]), batch[::-1])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], r"the micro-batch is a list without samples: must be a list of at least one dict"),
        ({"input_ids": numbers(2)}, r"the micro-batch is a dict: must be a list"),
        ([numbers(2)], r"sample 0 is a Tensor: must be a plain dict; convert it with dict"),
    ],
)
def test_other_things_than_a_list_of_samples_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SAMPLE_LIST.split(batch)


def test_a_list_of_samples_has_no_use_for_counts_and_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match=r"counts of items are given for a list of samples"):
        SAMPLE_LIST.split([{}], counts=[1])
    with pytest.raises(ValueError, match=r"flats is empty"):
        SAMPLE_LIST.merge([])
