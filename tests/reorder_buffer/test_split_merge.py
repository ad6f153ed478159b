"""Cutting micro-batches of the reference's form into samples, and joining them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.reorder_buffer import (
    MIMO_LAYOUT,
    apply_sample_dispatch,
    cu_img_from_counts,
    merge_samples,
    split_microbatch,
)
from evenstep.serialize import (
    FlatSample,
    flatten_nested,
    fold_values,
    pack_samples,
    sample_layout,
    unfold_values,
    unpack_sample,
)
from tests.reorder_buffer.microbatches import Case, assert_same, gather, mimo_cases, numbers

CLIP = "modality_inputs.images.clip"


def over_the_wire(flats: list[FlatSample]) -> list[FlatSample]:
    """Return the samples as they arrive from another rank: views of one buffer."""
    folded = [fold_values(flat) for flat in flats]
    layouts = [sample_layout(flat) for flat in folded]
    buffer = pack_samples(folded)
    arrived = []
    offset = 0
    for layout in layouts:
        arrived.append(unfold_values(unpack_sample(buffer, layout, offset)))
        offset += layout.nbytes
    return arrived


def vision_batch() -> dict[str, Any]:
    """Three samples with 1, 0 and 2 images of 2, 1 and 3 patches."""
    return {
        "input_ids": numbers(3, 4),
        "modality_inputs": {
            "images": {
                "clip": {
                    "hidden_states": numbers(6, 2).to(torch.bfloat16),
                    "grid_thw": torch.tensor([[1, 1, 2], [1, 1, 1], [1, 3, 1]]),
                }
            }
        },
    }


@settings(max_examples=60, deadline=None)
@given(mimo_cases())
def test_merging_what_was_split_gives_the_micro_batch_back(case: Case) -> None:
    flats = MIMO_LAYOUT.split(case.batch, counts=case.counts)
    assert len(flats) == case.size
    assert_same(merge_samples(flats), case.batch)


@settings(max_examples=60, deadline=None)
@given(mimo_cases(), st.data())
def test_any_order_equals_a_plain_gather_also_where_some_samples_arrived(
    case: Case, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(case.size)))
    order = order[: data.draw(st.integers(1, case.size))]
    flats = MIMO_LAYOUT.split(case.batch, counts=case.counts)
    arrived = over_the_wire(flats)
    remote = data.draw(st.sets(st.sampled_from(order)))
    mixed = [arrived[i] if i in remote else flats[i] for i in order]
    assert_same(merge_samples(mixed), gather(case, list(order)))
    cu_img = {name: cu_img_from_counts(counts) for name, counts in case.counts.items()}
    assert_same(apply_sample_dispatch(case.batch, order, cu_img=cu_img), gather(case, list(order)))


@settings(max_examples=30, deadline=None)
@given(mimo_cases())
def test_samples_are_views_and_merged_tensors_have_their_own_memory(case: Case) -> None:
    flat_batch = flatten_nested(case.batch)
    flats = MIMO_LAYOUT.split(case.batch, counts=case.counts)
    for flat in flats:
        for key, value in flat.items():
            source = flat_batch[key]
            if isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor):
                assert value.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    merged = flatten_nested(merge_samples(flats))
    for key, value in merged.items():
        source = flat_batch[key]
        if isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor) and source.ndim:
            assert value.numel() == 0 or value.data_ptr() != source.data_ptr()


def test_a_sample_has_batch_dims_of_size_one_and_its_own_images() -> None:
    batch = vision_batch() | {"names": ["a", "b", "c"], "tokens_seen": 5}
    flats = split_microbatch(batch, cu_img=[0, 1, 1, 3])
    assert_same(
        flats[2],
        {
            "input_ids": torch.tensor([[8, 9, 10, 11]]),
            f"{CLIP}.hidden_states": numbers(6, 2)[2:].to(torch.bfloat16),
            f"{CLIP}.grid_thw": torch.tensor([[1, 1, 1], [1, 3, 1]]),
            "names": ["c"],
            "tokens_seen": 5,
        },
    )
    hidden = flats[1][f"{CLIP}.hidden_states"]
    assert_same(hidden, torch.empty(0, 2, dtype=torch.bfloat16))  # a placeholder, dtype kept


def test_three_samples_do_not_confuse_rotary_position_ids() -> None:
    batch = {"input_ids": numbers(3, 3), "position_ids": numbers(3, 3, 3)}
    flats = split_microbatch(batch)
    assert_same(flats[0]["position_ids"], batch["position_ids"][:, :1])
    assert_same(merge_samples(flats[::-1])["position_ids"], batch["position_ids"].flip(1))


def test_without_offsets_each_sample_has_one_image() -> None:
    batch = vision_batch()
    flats = split_microbatch(batch)
    assert [flat[f"{CLIP}.hidden_states"].shape[0] for flat in flats] == [2, 1, 3]  # type: ignore[union-attr]  # tensors
    assert_same(merge_samples(flats), batch)


def test_an_encoder_whose_grid_is_nulled_has_one_row_per_image() -> None:
    images = numbers(3, 2, 4, 4)
    batch = {
        "input_ids": numbers(2, 4),
        "modality_inputs": {"images": {"clip": {"hidden_states": images, "grid_thw": None}}},
    }
    flats = split_microbatch(batch, cu_img=[0, 1, 3])
    assert_same(flats[1][f"{CLIP}.hidden_states"], images[1:])
    assert_same(merge_samples(flats), batch)


def test_one_table_of_offsets_serves_all_encoders_that_see_the_same_images() -> None:
    batch = vision_batch()
    batch["modality_inputs"]["images"]["siglip"] = {
        "hidden_states": numbers(3, 1),
        "grid_thw": torch.ones(3, 3, dtype=torch.int64),
    }
    flats = split_microbatch(batch, cu_img=[0, 1, 1, 3])
    assert [f["modality_inputs.images.siglip.grid_thw"].shape[0] for f in flats] == [1, 0, 2]  # type: ignore[union-attr]  # tensors
    assert_same(merge_samples(flats), batch)


def test_text_only_micro_batches_may_leave_the_encoders_out() -> None:
    with_images = split_microbatch(vision_batch(), cu_img=[0, 1, 1, 3])
    absent: list[dict[str, Any]] = [{}, {"modality_inputs": {}}]
    for nothing in absent:
        text_only = split_microbatch({"input_ids": numbers(1, 4), **nothing})
        for flats in (text_only + with_images, with_images + text_only):
            merged = merge_samples(flats)
            assert merged["input_ids"].shape == (4, 4)
            assert_same(merged["modality_inputs"], vision_batch()["modality_inputs"])
        assert_same(merge_samples(text_only), {"input_ids": numbers(1, 4), **nothing})


def test_samples_are_detached_from_autograd() -> None:
    weights = torch.ones(2, 3, requires_grad=True)
    flats = split_microbatch({"input_ids": weights * 1})
    assert not flats[0]["input_ids"].requires_grad  # type: ignore[union-attr]  # a tensor
    assert not merge_samples(flats)["input_ids"].requires_grad
    assert not merge_samples([{"input_ids": weights}])["input_ids"].requires_grad


def test_transposed_and_expanded_tensors_keep_their_values() -> None:
    batch = {"input_ids": numbers(4, 3).T, "labels": torch.tensor([5]).expand(3, 4)}
    assert_same(merge_samples(split_microbatch(batch)), batch)


# Bad input: every message names the field, what was found, and what to do.


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "labels",
            numbers(4, 3),
            r"'labels': a tensor \[4, 3\] with 4 entries on dim 0, .* has 3 samples.*Batched\(dim=",
        ),
        ("names", ["a", "b"], r"field 'names': a list of 2 entries on dim 0, .* 3 samples"),
        ("names", [], r"field 'names': a list of 0 entries"),
        ("pair", (1, 2), r"field 'pair': a tuple of 2 entries"),
        (
            "position_ids",
            numbers(3, 4, 4),
            r"'position_ids': a tensor \[3, 4, 4\] with 4 entries on dim 1",
        ),
        ("mask", numbers(1, 1, 4, 4), r"field 'mask': .* with 1 entries on dim 0"),
        ("array", object(), r"'array': a object can be neither cut nor sent; give a tensor"),
        (
            "sparse",
            torch.eye(3).to_sparse(),
            r"'sparse': a tensor of layout torch.sparse_coo .*to_dense",
        ),
    ],
)
def test_a_field_that_does_not_fit_is_refused_by_name(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split_microbatch({"input_ids": numbers(3, 4), field: value})


@pytest.mark.parametrize(
    ("cu_img", "message"),
    [
        ([0, 1, 3], r"for 'modality_inputs.images.clip' are of 2 samples, .* has 3: must"),
        (
            [0, 1, 1, 2],
            r"clip.\w+': .* 3 rows, .* \[1, 0, 1\] add up to 2; give the items per sample",
        ),
        ([1, 1, 1, 3], r"cu_img=\[1, 1, 1, 3\]: must be the offsets"),
        ([0, 2, 1, 3], r"cu_img=\[0, 2, 1, 3\]: must be the offsets"),
        ([], r"cu_img=\[\]: must be the offsets"),
        ([0, 1.0, 1, 3], r"cu_img\[1\]=1.0: must be an integer >= 0"),
        (
            {"clip": [0, 1, 1, 3]},
            r"for 'modality_inputs.images.clip' are missing: .* got \['clip'\]",
        ),
    ],
)
def test_offsets_that_do_not_fit_are_refused(cu_img: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_microbatch(vision_batch(), cu_img=cu_img)


def test_patches_that_do_not_fit_their_grid_are_refused() -> None:
    batch = vision_batch()
    clip = batch["modality_inputs"]["images"]["clip"]
    clip["hidden_states"] = clip["hidden_states"][:5]
    message = (
        r"hidden_states': a tensor \[5, 2\] with 5 rows, .* \[2, 0, 4\] add up to 6; .*'.grid_thw'"
    )
    with pytest.raises(ValueError, match=message):
        split_microbatch(batch, cu_img=[0, 1, 1, 3])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, r"has none of \['input_ids', .*so its number of samples is unknown"),
        ({"pixels": numbers(2, 2)}, r"its fields: \['pixels'\].*size_fields"),
        ({"input_ids": torch.tensor(3)}, r"has none of"),
        ({"input_ids": numbers(0, 4)}, r"field 'input_ids': the micro-batch has no samples"),
    ],
)
def test_a_micro_batch_of_unknown_size_is_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_microbatch(batch)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            numbers(1, 2),
            numbers(1, 2).int(),
            r"'x': sample 1 has a torch.int32 tensor \[1, 2\] on cpu, and sample 0 has",
        ),
        (numbers(1, 2), numbers(1, 2, 1), r"'x': sample 1 has a torch.int64 tensor \[1, 2, 1\]"),
        (numbers(1, 2), numbers(0), r"field 'x': sample 1 has a torch.int64 tensor \[0\]"),
        (
            numbers(1, 2),
            numbers(1, 3),
            r"'x': sample 1 has .*\[1, 3\].* all sizes but that of dim 0",
        ),
        (numbers(1, 2), None, r"field 'x': sample 1 has None, and sample 0 has a torch.int64"),
        (None, numbers(1, 2), r"'x': sample 1 has a torch.int64 tensor .* sample 0 has None"),
        (numbers(1, 2), ["a"], r"field 'x': sample 1 has \['a'\]"),
        (["a"], ("b",), r"field 'x': sample 1 has \('b',\), and sample 0 has \['a'\]"),
        (1, 2, r"'x': sample 1 has 2, and sample 0 has 1. What has no batch dim must be"),
        (1, True, r"field 'x': sample 1 has True"),
        (torch.tensor(1), torch.tensor(2), r"'x': sample 1 has a torch.int64 tensor \[\] on cpu"),
    ],
)
def test_samples_that_disagree_are_refused(first: Any, second: Any, message: str) -> None:
    ids = numbers(1, 4)
    flats: list[FlatSample] = [{"input_ids": ids, "x": first}, {"input_ids": ids, "x": second}]
    with pytest.raises(ValueError, match=message):
        merge_samples(flats)


def test_only_ragged_fields_may_be_missing() -> None:
    flats: list[FlatSample] = [
        {"input_ids": numbers(1, 4), "x": numbers(1)},
        {"input_ids": numbers(1, 4)},
    ]
    with pytest.raises(ValueError, match=r"field 'x': sample 1 lacks it and others have it"):
        merge_samples(flats)


def test_an_error_names_the_sample_also_where_others_lack_the_field() -> None:
    key = f"{CLIP}.grid_thw"
    flats: list[FlatSample] = [{}, {key: numbers(1, 3)}, {}, {key: numbers(1, 3).int()}]
    with pytest.raises(ValueError, match=r"sample 3 has a torch.int32 .*, and sample 1 has"):
        merge_samples(flats)


def test_samples_on_different_devices_are_refused() -> None:
    flats: list[FlatSample] = [{"x": numbers(1, 4)}, {"x": numbers(1, 4).to("meta")}]
    with pytest.raises(ValueError, match=r"'x': sample 1 has .* on meta.*Dtype, device and all"):
        merge_samples(flats)


def test_an_error_of_the_machine_is_not_taken_for_the_users() -> None:
    huge = torch.empty(1).expand(2**60, 1)  # joins to more memory than there is
    with pytest.raises(RuntimeError):
        merge_samples([{"x": huge}, {"x": huge}])


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="flats is empty"):
        merge_samples([])


def test_indices_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample_indices\[1\]=2: must be the index of one of 2"):
        apply_sample_dispatch({"input_ids": numbers(2, 2)}, [0, 2])
