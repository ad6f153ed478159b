"""What samples cost, one by one and a micro-batch at a time."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.reorder_buffer import (
    MIMO_LAYOUT,
    SAMPLE_LIST,
    Batched,
    BatchLayout,
    CostFunction,
    Global,
    SampleCost,
    costs_of_samples,
    hf_vision_layout,
    sample_cost,
    samples_with_costs,
)
from evenstep.serialize import FlatSample
from tests.reorder_buffer.microbatches import Case, assert_same, mimo_cases, numbers

SAMPLE: FlatSample = {
    "input_ids": torch.tensor([[9, 5, 9, 9, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 0]]),
    "modality_inputs.images.clip.grid_thw": torch.tensor([[1, 2, 2], [1, 4, 6]]),
    "modality_inputs.images.clip.hidden_states": numbers(28, 2),
    "modality_inputs.video.other.grid_thw": torch.tensor([[2, 2, 2]]),
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"encoder_cost_weight": 1.0}, 28 + 8),
        ({"encoder_cost_weight": 0.5}, 18.0),
        ({"encoder_cost_weight": 1.0, "square_merge_size": 4}, 36),  # only tokens are merged
        ({"encoder_cost_weight": 1.0, "image_token_id": 9}, 3),
        ({"encoder_cost_weight": 2.0, "image_token_id": 9, "square_merge_size": 4}, 24),
        ({"encoder_cost_weight": 0.0, "language_cost_weight": 1.0}, 4),
        ({"encoder_cost_weight": 0.1, "language_cost_weight": 0.3}, 0.1 * 36 + 0.3 * 4),
        ({"encoder_cost_weight": 1.0, "image_token_id": 7}, 0),
    ],
)
def test_a_sample_costs_its_patches_and_tokens(options: dict[str, Any], expected: float) -> None:
    assert sample_cost(SAMPLE, **options) == expected
    assert isinstance(sample_cost(SAMPLE, **options), float)


def test_both_modules_of_a_pair_derive_the_same_cost() -> None:
    """The language shard has no grid; the ids tell it as much."""
    ids = torch.full((1, 7), 9)  # 28 patches, 4 to a token
    vision: FlatSample = {"input_ids": ids, "clip.grid_thw": torch.tensor([[1, 4, 7]])}
    language: FlatSample = {"input_ids": ids, "clip.grid_thw": None}
    cost = SampleCost(encoder_cost_weight=1.0, image_token_id=9, square_merge_size=4)
    assert cost(vision) == cost(language) == 28
    by_grid = SampleCost(encoder_cost_weight=1.0)
    assert (by_grid(vision), by_grid(language)) == (28, 0)


def test_a_sample_without_text_or_images_costs_nothing_for_them() -> None:
    assert sample_cost({}, encoder_cost_weight=1.0) == 0
    assert sample_cost({"clip.grid_thw": torch.empty(0, 3).long()}, encoder_cost_weight=1.0) == 0


def test_samples_without_a_batch_dim_cost_the_same() -> None:
    flat: FlatSample = {"input_ids": torch.tensor([9, 9]), "attention_mask": torch.tensor([1, 1])}
    cost = SampleCost(encoder_cost_weight=1.0, language_cost_weight=1.0, image_token_id=9)
    assert cost(flat) == 4


@settings(max_examples=60, deadline=None)
@given(mimo_cases(), st.sampled_from([None, 0, 3]), st.sampled_from([0.0, 0.3]), st.booleans())
def test_a_micro_batch_costs_what_its_samples_do(
    case: Case, token: int | None, weight: float, encoder: bool
) -> None:
    cost = SampleCost(
        encoder_cost_weight=0.7 if encoder else 0.0,
        language_cost_weight=weight,
        image_token_id=token,
        square_merge_size=4,
    )
    flats, costs = samples_with_costs(
        case.batch, layout=MIMO_LAYOUT, cost_of=cost, counts=case.counts
    )
    assert costs == [cost(flat) for flat in flats] == costs_of_samples(flats, cost)
    assert cost.of_microbatch(case.batch, counts=case.counts) == costs
    assert_same(MIMO_LAYOUT.merge(flats), case.batch)


def test_other_layouts_and_cost_functions_are_served() -> None:
    def by_length(flat: FlatSample) -> torch.Tensor:
        ids = flat["input_ids"]
        assert isinstance(ids, torch.Tensor)
        return torch.tensor([ids.numel()])

    samples: list[dict[str, Any]] = [{"input_ids": numbers(3)}, {"input_ids": numbers(5)}]
    flats, costs = samples_with_costs(samples, layout=SAMPLE_LIST, cost_of=by_length)
    assert costs == [3, 5]
    assert_same(SAMPLE_LIST.merge(flats), samples)

    sequence_first = BatchLayout(fields={"*": Batched(dim=1)})
    batch = {"input_ids": torch.tensor([[9, 0], [9, 9]]), "attention_mask": torch.ones(2, 2)}
    cost = SampleCost(encoder_cost_weight=1.0, language_cost_weight=10.0, image_token_id=9)
    assert cost.of_microbatch(batch, layout=sequence_first) == [22, 21]

    grids = {"image_grid_thw": torch.tensor([[1, 2, 3], [1, 1, 1]])}
    hf = {"input_ids": numbers(2, 2), **grids}
    patches = SampleCost(encoder_cost_weight=1.0)
    assert patches.of_microbatch(hf, layout=hf_vision_layout(), counts=[0, 2]) == [0, 7]


@pytest.mark.parametrize(
    "cost_of", [SampleCost(encoder_cost_weight=1.0), lambda _flat: 1.0], ids=["ready", "function"]
)
def test_a_list_of_samples_is_refused_by_a_layout_of_fields(cost_of: CostFunction) -> None:
    samples: Any = [{"x": torch.zeros(2)}]

    with pytest.raises(ValueError, match="pass layout=SAMPLE_LIST, or let collate_fn"):
        samples_with_costs(samples, layout=MIMO_LAYOUT, cost_of=cost_of)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_cost_weight": -1.0}, r"encoder_cost_weight=-1.0: must be finite and >= 0"),
        ({"encoder_cost_weight": math.nan}, r"encoder_cost_weight=nan: must be finite"),
        (
            {"encoder_cost_weight": 1.0, "language_cost_weight": math.inf},
            r"language_cost_weight=inf: must be finite",
        ),
        (
            {"encoder_cost_weight": 1.0, "square_merge_size": 0},
            r"square_merge_size=0: must be >= 1, the patches per placeholder token",
        ),
    ],
)
def test_weights_that_are_no_weights_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_cost(SAMPLE, **options)


TOKENS = SampleCost(encoder_cost_weight=0.0, language_cost_weight=1.0)
IMAGES = SampleCost(encoder_cost_weight=1.0, image_token_id=9)


@pytest.mark.parametrize(
    ("cost", "flat", "message"),
    [
        (TOKENS, {}, r"'attention_mask' is missing: language_cost_weight needs a tensor \[B, S\]"),
        (TOKENS, {"attention_mask": None}, r"'attention_mask' is None"),
        (TOKENS, {"attention_mask": numbers(1, 1, 2, 2)}, r"is a tensor \[1, 1, 2, 2\]"),
        (IMAGES, {"input_ids": [1, 2]}, r"'input_ids' is \[1, 2\]: image_token_id needs a tensor"),
        (
            SampleCost(encoder_cost_weight=1.0),
            {"clip.grid_thw": torch.ones(2, 3)},
            r"field 'clip.grid_thw': other fields are ragged along it",
        ),
    ],
)
def test_a_sample_that_lacks_what_a_term_needs_is_refused(
    cost: SampleCost, flat: FlatSample, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cost(flat)


def test_a_micro_batch_that_lacks_what_a_term_needs_is_refused() -> None:
    batch = {"input_ids": numbers(2, 2), "attention_mask": numbers(2, 2, 1)}
    with pytest.raises(ValueError, match=r"'attention_mask' is a tensor \[2, 2, 1\]"):
        TOKENS.of_microbatch(batch)
    rules = BatchLayout(fields={"attention_mask": Global()})
    with pytest.raises(ValueError, match=r"'attention_mask': the layout gives it no batch dim"):
        TOKENS.of_microbatch({**batch, "attention_mask": numbers(2, 2)}, layout=rules)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-0.5, "-0.5"),
        (None, "None"),
        ("3", "'3'"),
        (2**2000, "1148"),
        (torch.tensor([1.0, 2.0]), r"a tensor \[2\]"),
        (torch.tensor(math.nan), r"tensor\(nan\)"),
    ],
)
def test_a_cost_that_is_no_cost_is_refused_with_its_sample(value: Any, shown: str) -> None:
    values = iter([1, value])
    with pytest.raises(ValueError, match=rf"cost_of returned {shown}.* for sample 1: a cost must"):
        costs_of_samples([{}, {}], lambda _: next(values))


def test_costs_become_floats() -> None:
    values: Iterator[Any] = iter([3, 2.5, torch.tensor([[4]]), torch.tensor(True)])
    costs = costs_of_samples([{}] * 4, lambda _: next(values))
    assert_same(costs, [3.0, 2.5, 4.0, 1.0])


def test_what_a_cost_function_raises_passes_through_with_a_note() -> None:
    def fails(flat: FlatSample) -> float:
        raise KeyError(f"no such field in {flat}")

    cost_of: CostFunction = fails
    with pytest.raises(KeyError, match="no such field") as caught:
        costs_of_samples([{}], cost_of)
    assert caught.value.__notes__ == ["raised by cost_of for sample 0 of its micro-batch"]
