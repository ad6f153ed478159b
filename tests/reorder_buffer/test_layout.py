"""Declaring a layout: patterns, kinds, groups of items, and what they refuse."""

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from evenstep.reorder_buffer import (
    MIMO_LAYOUT,
    Batched,
    BatchLayout,
    FieldKind,
    Global,
    Items,
    Ragged,
    check_agreement,
    hf_vision_layout,
)
from evenstep.serialize import Leaf, fold_values, sample_layout
from tests.reorder_buffer.microbatches import assert_same, numbers

IDS = {"input_ids": numbers(2, 4)}


def layout(fields: Mapping[str, FieldKind], **options: Any) -> BatchLayout:
    return BatchLayout(fields=fields, **options)


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.*", r"a.b\.c", True),
        ("**.ids", "ids", True),
        ("**.ids", "a.b.ids", True),
        ("**.ids", "a.bids", False),
        ("a.**", "a.b.c", True),
        ("a.**.d", "a.d", True),
        (r"a\.b", r"a\.b", True),
        (r"a\.b", "a.b", False),
        ("a+", "a+", True),
        ("a+", "aa", False),
    ],
)
def test_patterns_match_whole_names_of_dotted_keys(pattern: str, key: str, matches: bool) -> None:
    chosen = layout({pattern: Global()}).kind_of(key, numbers(2))
    assert isinstance(chosen, Global) is matches


def test_the_first_pattern_that_matches_counts() -> None:
    rules = layout({"x": Global(), "*": Batched(dim=1)})
    assert rules.kind_of("x", numbers(2)) == Global()
    assert rules.kind_of("y", numbers(2)) == Batched(dim=1)


def test_sequence_first_tensors_are_split_along_the_dim_they_declare() -> None:
    rules = layout({"*": Batched(dim=1)})
    square = {"input_ids": numbers(2, 2), "last": numbers(3, 2, 4)}
    flats = rules.split(square)
    assert_same(flats[1]["input_ids"], torch.tensor([[1], [3]]))
    assert flats[1]["last"].shape == (3, 1, 4)  # type: ignore[union-attr]  # a tensor
    assert_same(rules.merge(flats), square)
    last = layout({"x": Batched(dim=-1)})
    assert_same(
        last.merge(last.split({**IDS, "x": numbers(3, 2)})[::-1])["x"], numbers(3, 2).flip(1)
    )


def test_global_fields_go_with_every_sample_and_must_agree() -> None:
    rules = layout({"size": Global(), "table": Global()})
    batch = {**IDS, "size": [448, 448, 3], "table": numbers(5)}
    flats = rules.split(batch)
    assert flats[0]["size"] == flats[1]["size"] == [448, 448, 3]
    assert_same(rules.merge(flats), batch)
    flats[1]["table"] = numbers(5) + 1
    with pytest.raises(ValueError, match=r"field 'table': sample 1 has a torch.int64 tensor \[5\]"):
        rules.merge(flats)
    flats[1]["table"] = numbers(5).clone()
    assert_same(rules.merge(flats), batch)


def test_counts_chain_from_rows_to_items_to_samples() -> None:
    """Frames per clip, clips per video, videos per sample: each field ragged along the next."""
    rules = layout(
        {
            "clips": Ragged(along="videos"),
            "frames": Ragged(along="clips"),
            "pixels": Ragged(along="frames"),
        }
    )
    batch = {
        **IDS,
        "videos": torch.tensor([2, 1]),
        "clips": [1, 0, 2],  # a list counts as well
        "frames": torch.tensor([[2, 2], [1, 3], [1, 1]]),  # a grid: 4, 3 and 1 pixels
        "pixels": numbers(8, 2),
    }
    flats = rules.split(batch)
    assert_same(flats[0]["clips"], [1, 0])
    assert_same(flats[1]["clips"], [2])
    assert_same(flats[0]["pixels"], numbers(8, 2)[:4])
    assert_same(flats[1]["pixels"], numbers(8, 2)[4:])
    assert_same(rules.merge(flats), batch)


def test_items_of_one_group_share_counts_by_name_by_counter_or_by_position() -> None:
    fields: dict[str, FieldKind] = {"boxes": Items(of="box"), "labels_of_boxes": Items(of="box")}
    batch = {**IDS, "boxes": numbers(3, 4), "labels_of_boxes": ["a", "b", "c"]}
    counted = layout(fields, counters={"box": lambda _: [3, 0]})
    for rules, counts, first in (
        (layout(fields), [1, 2], ["a"]),
        (layout(fields), torch.tensor([1, 2]), ["a"]),
        (layout(fields), {"box": [0, 3], "unused": [9]}, []),
        (counted, None, ["a", "b", "c"]),
        (counted, [1, 2], ["a", "b", "c"]),  # nameless counts are for groups without a counter
        (counted, {"box": [2, 1]}, ["a", "b"]),
        (counted, {"other": [2, 1]}, ["a", "b", "c"]),
    ):
        flats = rules.split(batch, counts=counts)
        assert flats[0]["labels_of_boxes"] == first
        assert_same(rules.merge(flats), batch)


def test_items_without_any_counts_are_refused_unless_declared_one_each() -> None:
    batch = {**IDS, "boxes": numbers(2, 4)}
    with pytest.raises(ValueError, match=r"counts for 'box' are missing: .*image_count_of"):
        layout({"boxes": Items(of="box")}).split(batch)
    rules = layout({"boxes": Items(of="box", one_each=True)})
    assert_same(rules.merge(rules.split(batch)), batch)


def test_shorter_samples_are_padded_where_the_rule_says_so() -> None:
    rules = layout(
        {
            "input_ids": Batched(pad=9),
            "position_ids": Batched(dim=1, ndim=3, pad=0, pad_side="left"),
            "lengths": Batched(pad=0),
        }
    )
    short = {"input_ids": numbers(1, 2), "position_ids": numbers(3, 1, 2), "lengths": numbers(1)}
    long = {"input_ids": numbers(1, 3), "position_ids": numbers(3, 1, 3), "lengths": numbers(1)}
    merged = rules.merge(rules.split(short) + rules.split(long))
    assert_same(merged["input_ids"], torch.tensor([[0, 1, 9], [0, 1, 2]]))
    assert_same(merged["position_ids"][1], torch.tensor([[0, 2, 3], [3, 4, 5]]))
    assert_same(merged["lengths"], torch.tensor([0, 0]))
    assert_same(rules.merge(rules.split(short)), short)


def test_the_number_of_samples_comes_from_a_declared_field() -> None:
    rules = layout({"x": Batched(dim=1)}, size_fields=["x"])
    assert rules.batch_size({"x": numbers(3, 5), "input_ids": numbers(5)}) == 5
    assert rules.batch_size({"x": [1, 2]}) == 2
    assert MIMO_LAYOUT.batch_size({"position_ids": numbers(3, 2, 4)}) == 2


def test_any_mapping_is_taken_as_a_micro_batch() -> None:
    class Encoding(Mapping[str, torch.Tensor]):
        def __getitem__(self, key: str) -> torch.Tensor:
            return IDS[key]

        def __iter__(self) -> Any:
            return iter(IDS)

        def __len__(self) -> int:
            return len(IDS)

    assert_same(MIMO_LAYOUT.merge(MIMO_LAYOUT.split(Encoding())), IDS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layout({"": Global()}), r"field pattern '': must be names joined by single dots"),
        (lambda: layout({"a..b": Global()}), r"field pattern 'a..b': must be names"),
        (lambda: layout({"a*": Global()}), r"field pattern 'a\*': 'a\*' mixes a star"),
        (lambda: layout({"a": "batch"}), r"fields\['a'\]='batch': must be Batched, Items"),  # type: ignore[dict-item]  # wrong on purpose
        (lambda: layout({}, size_fields=()), r"size_fields=\(\): must name at least one field"),
        (lambda: layout({}, size_fields="x"), r"size_fields='x': must name"),
        (lambda: Ragged(along=""), r"Ragged\(along=''\): must name the count field"),
        (lambda: Ragged(along="."), r"Ragged\(along='.'\): must name"),
        (lambda: Batched(dim=2, ndim=2), r"Batched\(dim=2, ndim=2\): dim must be .* \[-2, 2\)"),
        (lambda: Batched(pad_side="up"), r"pad_side='up'\): must be 'left' or 'right'"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_bad_declarations_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


X_ALONG_N: dict[str, FieldKind] = {"x": Ragged(along="n")}


@pytest.mark.parametrize(
    ("fields", "more", "message"),
    [
        ({"x": Batched(dim=1)}, {"x": numbers(2)}, r"'x': a tensor \[2\] has no dim 1, its"),
        (X_ALONG_N, {"x": numbers(3)}, r"'x': its rows are counted by 'n'"),
        (X_ALONG_N, {"x": numbers(3), "n": None}, r"'x': its rows are counted by 'n'"),
        (X_ALONG_N, {"x": numbers(3), "n": torch.ones(2)}, r"'n': other fields are ragged"),
        (X_ALONG_N, {"x": numbers(3), "n": "two"}, r"'n': other fields are ragged"),
        (X_ALONG_N, {"x": numbers(3), "n": [4, -1]}, r"'n': .* \(entry 1 is -1\)"),
        (X_ALONG_N, {"x": numbers(3), "n": [True, 2]}, r"'n': .* \(entry 0 is True\)"),
        (X_ALONG_N, {"x": numbers(3), "n": [1, 1]}, r"'x': .* 3 rows, .* add up to 2"),
        (X_ALONG_N, {"x": numbers(3), "n": [2]}, r"'n': a list of 1 entries"),
        (
            {"x": Ragged(along="n"), "n": Ragged(along="x")},
            {"x": numbers(2), "n": numbers(2)},
            r"field '[nx]': .* the samples' counts \[\] add up to 0",
        ),
    ],
)
def test_micro_batches_that_do_not_fit_are_refused(
    fields: dict[str, FieldKind], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layout(fields).split({**IDS, **more})


def test_a_layout_can_be_sent_to_a_worker_process() -> None:
    sent = pickle.loads(pickle.dumps(hf_vision_layout(image_token_id=7)))
    batch = {"input_ids": torch.tensor([[7], [0]]), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    assert_same(sent.merge(sent.split(batch)), batch)
    assert repr(sent) == repr(hf_vision_layout(image_token_id=7))  # the same on every rank


def test_unlisted_fields_can_be_refused() -> None:
    rules = layout({"input_ids": Batched()}, unlisted=None)
    assert_same(rules.merge(rules.split(IDS)), IDS)
    with pytest.raises(ValueError, match=r"field 'x': the layout has no rule for it"):
        rules.split({**IDS, "x": 1})


def samples(*flats: dict[str, Leaf]) -> list[Any]:
    return [sample_layout(fold_values(flat)) for flat in flats]


def test_samples_that_can_be_merged_agree_by_their_metadata() -> None:
    grid = "modality_inputs.images.clip.grid_thw"
    check_agreement(
        MIMO_LAYOUT,
        samples(
            {"input_ids": numbers(1, 4), "position_ids": numbers(3, 1, 4), grid: numbers(2, 3)},
            {"input_ids": numbers(1, 4), "position_ids": numbers(3, 1, 4), grid: numbers(0, 3)},
            {"input_ids": numbers(1, 4), "position_ids": numbers(3, 1, 4), "name": ["a"]},
        ),
    )
    padded = layout({"x": Batched(pad=0)})
    check_agreement(padded, samples({"x": numbers(1, 4)}, {"x": numbers(1, 5)}))
    check_agreement(MIMO_LAYOUT, [])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (numbers(1, 4).int(), r"field 'x': rank 1 has a torch.int32 tensor of 2 dims"),
        (
            numbers(1, 4, 1),
            r"field 'x': rank 1 has a torch.int64 tensor of 3 dims with sizes \[4, 1\]",
        ),
        (numbers(1, 5), r"field 'x': rank 1 has .* sizes \[5\] .*, rank 0 a .* sizes \[4\]"),
        (None, r"field 'x': rank 1 has None, rank 0 a torch.int64"),
    ],
)
def test_samples_that_disagree_are_found_by_their_metadata(second: Leaf, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_agreement(
            MIMO_LAYOUT, samples({"x": numbers(1, 4)}, {"x": second}), ["rank 0", "rank 1"]
        )


@pytest.mark.parametrize("first", [0, 1])
def test_a_missing_field_is_found_by_the_metadata(first: int) -> None:
    flats: list[dict[str, Leaf]] = [{"y": numbers(1)}, {"y": numbers(1), "x": numbers(1)}]
    with pytest.raises(ValueError, match=rf"field 'x': sample {first} lacks it, and sample"):
        check_agreement(MIMO_LAYOUT, samples(flats[first], flats[1 - first]))
