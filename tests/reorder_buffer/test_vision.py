"""Counting images and patches, placeholders, and moving whole images."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.reorder_buffer import (
    cu_img_from_counts,
    empty_like_vision,
    gather_vision_subdict,
    patches_per_image,
    reorder_vision_by_images,
)
from tests.reorder_buffer.microbatches import assert_same, numbers

GRID = torch.tensor([[1, 2, 2], [1, 1, 1], [2, 1, 3]])  # 4, 1 and 6 patches
HIDDEN = numbers(11, 2).to(torch.float32)


@pytest.mark.parametrize("counts", [[2, 0, 3], torch.tensor([2, 0, 3]), (2, 0, 3)])
def test_offsets_are_the_running_sum_of_counts(counts: Any) -> None:
    assert cu_img_from_counts(counts) == [0, 2, 2, 5]


def test_no_samples_have_one_offset() -> None:
    assert cu_img_from_counts([]) == [0]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, -1], r"image_counts\[1\]=-1: must be an integer >= 0"),
        ([True], r"image_counts\[0\]=True: must be an integer"),
        ([1.5], r"image_counts\[0\]=1.5: must be an integer"),
        (torch.tensor([1.0]), r"image_counts is a torch.float32 tensor of shape \[1\]"),
        (numbers(2, 2), r"image_counts is a torch.int64 tensor of shape \[2, 2\]"),
    ],
)
def test_counts_that_count_nothing_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cu_img_from_counts(counts)


def test_patches_are_the_product_of_the_grid() -> None:
    assert_same(patches_per_image(GRID), torch.tensor([4, 1, 6]))
    assert_same(patches_per_image(GRID.int()), torch.tensor([4, 1, 6]))
    assert_same(patches_per_image(GRID[:0]), torch.empty(0, dtype=torch.int64))
    large = torch.tensor([[1, 2**20, 2**20]], dtype=torch.int32)
    assert_same(patches_per_image(large), torch.tensor([2**40]))


@pytest.mark.parametrize(
    "grid", [torch.tensor([1, 2, 2]), numbers(2, 2), torch.ones(2, 3), numbers(1, 3, 1)]
)
def test_other_things_than_a_grid_are_refused(grid: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"grid_thw is a .* must hold integers \[n_images, 3\]"):
        patches_per_image(grid)


def test_placeholders_have_no_rows_and_all_else_of_the_reference() -> None:
    hidden, grid = empty_like_vision(HIDDEN.to(torch.bfloat16), GRID.int())
    assert_same(hidden, torch.empty(0, 2, dtype=torch.bfloat16))
    assert_same(grid, torch.empty(0, 3, dtype=torch.int32))
    on_meta, _ = empty_like_vision(HIDDEN.to("meta"), GRID)
    assert on_meta.device.type == "meta"


def test_a_reference_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="ref_grid_thw has no dims"):
        empty_like_vision(HIDDEN, torch.tensor(1))
    with pytest.raises(ValueError, match="ref_hidden_states has no dims"):
        empty_like_vision(torch.tensor(1.0), GRID)


def test_images_move_with_their_patches() -> None:
    hidden, grid = reorder_vision_by_images(HIDDEN, GRID, [2, 0])
    assert_same(grid, GRID[torch.tensor([2, 0])])
    assert_same(hidden, torch.cat([HIDDEN[5:], HIDDEN[:4]]))
    assert_same(reorder_vision_by_images(HIDDEN, GRID, []), (HIDDEN[:0], GRID[:0]))


def test_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample_indices\[1\]=3: must be the index of one of 3"):
        reorder_vision_by_images(HIDDEN, GRID, [0, 3])
    with pytest.raises(ValueError, match=r"'hidden_states': a tensor \[10, 2\] with 10 rows"):
        reorder_vision_by_images(HIDDEN[:10], GRID, [0])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whole_samples_are_gathered_by_their_images(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)))
    offsets = [0, *cuts, 3]
    order = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    gathered = gather_vision_subdict(
        {"hidden_states": HIDDEN, "grid_thw": GRID}, order, 3, cu_img=offsets
    )
    images = [i for sample in order for i in range(offsets[sample], offsets[sample + 1])]
    hidden, grid = reorder_vision_by_images(HIDDEN, GRID, images)
    assert_same(gathered, {"hidden_states": hidden, "grid_thw": grid})


def test_a_nulled_encoder_stays_nulled() -> None:
    nulled = {"hidden_states": None, "grid_thw": None}
    assert gather_vision_subdict(nulled, [1, 0], 2) == nulled


def test_samples_that_do_not_fit_are_refused() -> None:
    value = {"hidden_states": HIDDEN, "grid_thw": GRID}
    with pytest.raises(ValueError, match=r"3 rows, .* \[1, 1\] add up to 2; give the items"):
        gather_vision_subdict(value, [0], 2)
    with pytest.raises(ValueError, match=r"sample_indices\[0\]=-1"):
        gather_vision_subdict(value, [-1], 3)
    with pytest.raises(ValueError, match="flats is empty"):
        gather_vision_subdict(value, [], 3)
