"""The sample contract."""

import math

import pytest
import torch

from evenstep.gbpacking import (
    build_unpacked_sample,
    fold_alignment_padding,
    folding_collate,
    identity_collate,
    padding_multiple,
)

INF, NAN = math.inf, math.nan


def test_a_sample_has_the_fields_dtypes_and_padding_of_the_contract() -> None:
    sample = build_unpacked_sample([5, 6, 7], [6, 7, 8], multiple=4, pad_token_id=9)
    assert {key: (value.dtype, tuple(value.shape)) for key, value in sample.items()} == {
        "tokens": (torch.int64, (4,)),
        "labels": (torch.int64, (4,)),
        "position_ids": (torch.int64, (4,)),
        "loss_mask": (torch.float32, (4,)),
        "original_seq_len": (torch.int32, (1,)),
        "padded_seq_len": (torch.int32, (1,)),
    }
    assert sample["tokens"].tolist() == [5, 6, 7, 9]
    assert sample["labels"].tolist() == [6, 7, 8, 9]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3]
    assert (sample["original_seq_len"].item(), sample["padded_seq_len"].item()) == (3, 4)


def test_a_sample_that_fits_is_not_padded() -> None:
    sample = build_unpacked_sample(
        torch.tensor([1, 2]), torch.tensor([2, 3]), loss_mask=[0.5, 1], position_ids=[4, 5]
    )
    assert sample["loss_mask"].tolist() == [0.5, 1]
    assert sample["position_ids"].tolist() == [4, 5]
    assert sample["original_seq_len"].item() == sample["padded_seq_len"].item() == 2


def test_weights_are_exact_and_may_be_a_mask() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        sample = build_unpacked_sample([1, 2], [2, 3], loss_mask=[0.1, 1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(sample["loss_mask"], torch.tensor([0.1, 1]))
    masked = build_unpacked_sample([1, 2], [2, 3], loss_mask=torch.tensor([True, False]))
    assert masked["loss_mask"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [], "labels": []}, "tokens is empty"),
        ({"tokens": [1], "labels": [1, 2]}, "labels has 2 elements and tokens 1"),
        ({"tokens": [1], "labels": [1], "loss_mask": [1, 1]}, "loss_mask has 2 elements"),
        ({"tokens": [1], "labels": [1], "position_ids": []}, "position_ids has 0 elements"),
        ({"tokens": [[1]], "labels": [1]}, r"tokens has shape \[1, 1\]"),
        ({"tokens": [1.7, 2.2], "labels": [1, 2]}, r"tokens holds 1.7\d*, of torch.float32; ids"),
        ({"tokens": torch.tensor([1.0]), "labels": [1]}, "tokens holds 1.0, of torch.float32"),
        ({"tokens": [1], "labels": [True]}, "labels holds True, of torch.bool"),
        ({"tokens": [1], "labels": [1], "position_ids": [1j]}, "position_ids holds 1j, of torch.c"),
        ({"tokens": ["a"], "labels": [1]}, "tokens is no row of numbers: too many dimensions"),
        ({"tokens": None, "labels": [1]}, "tokens is no row of numbers"),
        ({"tokens": [2**63], "labels": [1]}, "tokens is no row of numbers: Overflow"),
        ({"tokens": torch.ones(1, device="meta"), "labels": [1]}, "tokens is on the meta device"),
        ({"tokens": [1, 2], "labels": [1, 2], "loss_mask": [1, NAN]}, r"loss_mask\[1\] is nan"),
        ({"tokens": [1], "labels": [1], "loss_mask": [-INF]}, r"loss_mask\[0\] is -inf"),
        ({"tokens": [1], "labels": [1], "loss_mask": [1e300]}, "is inf in float32; a weight must"),
        ({"tokens": [1], "labels": [1], "loss_mask": [1j]}, "loss_mask holds 1j, of torch.compl"),
        ({"tokens": [1], "labels": [1], "pad_token_id": None}, "pad_token_id is None; it must be"),
        ({"tokens": [1], "labels": [1], "multiple": 0}, "multiple is 0; it must be an integer"),
        ({"tokens": [1], "labels": [1], "multiple": True}, "multiple is True"),
    ],
)
def test_bad_samples_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_unpacked_sample(**arguments)  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize(
    ("settings", "multiple"),
    [
        ({}, 1),
        ({"context_parallel_size": 2}, 4),
        ({"context_parallel_size": 4, "data_parallel_size": 2}, 8),
        ({"data_parallel_size": 4, "dynamic_context_parallel": True}, 8),
        (
            {
                "data_parallel_size": 2,
                "context_parallel_size": 2,
                "dynamic_context_parallel": True,
            },
            8,
        ),
        ({"tensor_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 2, "sequence_parallel": True}, 2),
        (
            {"tensor_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
            8,
        ),
    ],
)
def test_padding_multiple(settings: dict[str, int], multiple: int) -> None:
    assert padding_multiple(**settings) == multiple  # type: ignore[arg-type] # by name


def test_padding_multiple_refuses_sizes_below_one() -> None:
    with pytest.raises(ValueError, match="context_parallel_size is 0"):
        padding_multiple(context_parallel_size=0)


def test_folding_counts_padding_as_part_of_the_sequence() -> None:
    sample = build_unpacked_sample([1, 2, 3], [2, 3, 4], multiple=4)
    folded = fold_alignment_padding(sample)
    assert folded["original_seq_len"].tolist() == [4]
    assert sample["original_seq_len"].tolist() == [3]
    assert folded["tokens"] is sample["tokens"]
    assert folded["loss_mask"].tolist() == [1, 1, 1, 0]
    with pytest.raises(ValueError, match="no 'padded_seq_len'"):
        fold_alignment_padding({})


def test_collates_return_the_samples_themselves() -> None:
    sample = build_unpacked_sample([1, 2, 3], [2, 3, 4], multiple=4)
    assert identity_collate((sample,))[0] is sample
    assert folding_collate([sample])[0]["original_seq_len"].tolist() == [4]
