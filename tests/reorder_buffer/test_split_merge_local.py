"""Reordering a window on a module that one rank holds whole."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import balanced_index_order
from evenstep.reorder_buffer import (
    SAMPLE_LIST,
    SampleCost,
    reorder_window_local,
)
from evenstep.serialize import FlatSample
from tests.reorder_buffer.microbatches import assert_same, numbers

TOKENS = SampleCost(encoder_cost_weight=0.0, language_cost_weight=1.0)


def text_batch(lengths: list[int]) -> dict[str, Any]:
    """Return micro-batch of samples with these lengths, whose ids tell them apart."""
    return {
        "input_ids": numbers(len(lengths), 8),
        "attention_mask": numbers(8) < torch.tensor(lengths)[:, None],
        "names": [f"{length} tokens" for length in lengths],
    }


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.lists(st.integers(0, 8), min_size=4, max_size=4), min_size=1, max_size=3),
)
def test_every_slot_comes_in_canonical_order(n_groups: int, window: list[list[int]]) -> None:
    batches = [text_batch(lengths) for lengths in window]
    reordered = reorder_window_local(batches, n_groups=n_groups, cost_of=TOKENS)
    assert len(reordered) == len(window)
    for batch, lengths, result in zip(batches, window, reordered, strict=True):
        order = balanced_index_order([float(length) for length in lengths], n_groups)
        assert_same(result["input_ids"], batch["input_ids"][torch.tensor(order)])
        assert_same(result["attention_mask"], batch["attention_mask"][torch.tensor(order)])
        assert result["names"] == [batch["names"][i] for i in order]


def test_images_follow_the_counts_of_each_micro_batch() -> None:
    def batch(counts: list[int]) -> dict[str, Any]:
        grid = torch.ones(sum(counts), 3, dtype=torch.int64)
        clip = {"hidden_states": numbers(sum(counts), 2), "grid_thw": grid}
        return {
            "input_ids": numbers(2, 2),
            "modality_inputs": {"images": {"clip": clip}},
            "counts": torch.tensor(counts),
        }

    window = reorder_window_local(
        [batch([0, 3]), batch([2, 1])],
        n_groups=2,
        cost_of=SampleCost(encoder_cost_weight=1.0),
        image_count_of=lambda micro_batch: micro_batch["counts"],
    )
    assert [result["counts"].tolist() for result in window] == [[3, 0], [2, 1]]
    hidden = window[0]["modality_inputs"]["images"]["clip"]["hidden_states"]
    assert_same(hidden, numbers(3, 2))


def test_other_layouts_can_be_given() -> None:
    def cost_of(flat: FlatSample) -> float:
        value = flat["cost"]
        assert isinstance(value, float)
        return value

    batch = [{"cost": 1.0}, {"cost": 3.0}, {"cost": 2.0}, {"cost": 0.0}]
    (result,) = reorder_window_local([batch], n_groups=2, cost_of=cost_of, layout=SAMPLE_LIST)
    assert [sample["cost"] for sample in result] == [3.0, 0.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("window", "n_groups", "message"),
    [
        ([], 1, "batches is empty: a window needs at least one micro-batch"),
        ([[1, 2], [1, 2, 3, 4]], 2, "costs_per_slot"),
        ([[1, 2, 3]], 2, "n_groups"),
    ],
)
def test_windows_that_cannot_be_balanced_are_refused(
    window: list[list[int]], n_groups: int, message: str
) -> None:
    batches = [text_batch(lengths) for lengths in window]
    with pytest.raises(ValueError, match=message):
        reorder_window_local(batches, n_groups=n_groups, cost_of=TOKENS)
