"""Samples that are cut by arithmetic are those that are cut by torch."""

import ctypes
import gc
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.reorder_buffer import (
    MIMO_LAYOUT,
    SAMPLE_LIST,
    Batched,
    BatchLayout,
    Global,
    Items,
    Ragged,
    SampleCost,
    padded_text,
    samples_with_costs,
)
from evenstep.reorder_buffer import cut_samples as cut_module
from evenstep.reorder_buffer.cost import cut_with_costs
from evenstep.reorder_buffer.cut_samples import CutSample
from evenstep.serialize import (
    FEW_ROWS,
    FlatSample,
    Leaf,
    Manifest,
    PackedSample,
    PackedSamples,
    TensorSample,
    flatten_nested,
    pack_samples,
    sample_layout,
    unpack_samples,
)
from tests.reorder_buffer.microbatches import (
    Case,
    assert_same,
    gather,
    mimo_cases,
    numbers,
    share_memory,
)


def only_tensors(case: Case) -> Case:
    """Return the case without its lists and plain values; what is left is tensors and None."""
    batch = {
        key: value
        for key, value in case.batch.items()
        if value is None or isinstance(value, torch.Tensor) or (isinstance(value, dict) and value)
    }
    return Case(batch=batch, size=case.size, counts=case.counts)


tensor_cases = mimo_cases().map(only_tensors)


def cut(
    batch: Mapping[str, Any], layout: BatchLayout = MIMO_LAYOUT, **options: Any
) -> list[CutSample]:
    """Return the samples of a micro-batch, which must be one that is cut by arithmetic."""
    samples = layout.read(batch, **options).cut()
    assert samples is not None
    return samples


def tensors_of(flats: Sequence[FlatSample]) -> list[TensorSample]:
    """Return flat samples as what they are: without plain values."""
    found: list[TensorSample] = []
    for flat in flats:
        found.append({})
        for key, value in flat.items():
            assert value is None or isinstance(value, torch.Tensor)
            found[-1][key] = value
    return found


def packed(flats: Sequence[Mapping[str, torch.Tensor | None]]) -> list[PackedSample]:
    """Return samples as they are borrowed from another rank."""
    manifest = Manifest(tuple([sample_layout(flat) for flat in flats]))
    return [*PackedSamples(manifest, pack_samples(flats))]


def packed_bytes(flats: Sequence[Mapping[str, torch.Tensor | None]]) -> bytes:
    """Return the bytes of packed samples, padding included; what is not written shows."""
    nbytes = sum(sample_layout(flat).nbytes for flat in flats)
    out = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
    return bytes(pack_samples(flats, out=out).tolist())


def assert_cut_as_by_torch(samples: Sequence[CutSample], flats: Sequence[FlatSample]) -> None:
    """Assert that each sample has the keys, views, layout and bytes of a dict."""
    assert len(samples) == len(flats)
    for sample, flat in zip(samples, tensors_of(flats), strict=True):
        assert [*sample] == [*sample.keys()] == [*flat]
        assert len(sample) == len(flat)
        assert_same({**sample}, flat)
        for key, view in flat.items():
            found = sample[key]
            if view is not None and found is not None:
                assert found.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
                assert found.storage_offset() == view.storage_offset()
                assert not found.requires_grad
        layout = sample_layout(flat)
        assert sample.layout == layout
        assert (sample.layout.placed, sample.layout.nbytes) == (layout.placed, layout.nbytes)
    assert packed_bytes(samples) == packed_bytes(tensors_of(flats))


@settings(max_examples=60, deadline=None)
@given(tensor_cases)
def test_a_micro_batch_is_cut_as_by_torch(case: Case) -> None:
    samples = cut(case.batch, counts=case.counts)
    assert_cut_as_by_torch(samples, MIMO_LAYOUT.split(case.batch, counts=case.counts))


@settings(max_examples=60, deadline=None)
@given(tensor_cases, st.data())
def test_cut_and_packed_samples_in_any_order_are_merged_as_dicts_are(
    case: Case, data: st.DataObject
) -> None:
    order = data.draw(st.lists(st.sampled_from(range(case.size)), min_size=1, max_size=6))
    samples = cut(case.batch, counts=case.counts)
    arrived = packed(samples)
    flats = MIMO_LAYOUT.split(case.batch, counts=case.counts)
    sources: list[Sequence[Mapping[str, Leaf]]] = data.draw(
        st.sampled_from([[samples], [arrived], [samples, arrived], [samples, arrived, flats]])
    )
    chosen = [data.draw(st.sampled_from(sources))[i] for i in order]
    merged = MIMO_LAYOUT.merge(chosen)
    assert_same(merged, MIMO_LAYOUT.merge([flats[i] for i in order]))
    assert_same(merged, gather(case, order))


@settings(max_examples=30, deadline=None)
@given(st.lists(tensor_cases, min_size=1, max_size=3))
def test_several_micro_batches_are_merged_at_once(cases: list[Case]) -> None:
    slots = [cut(case.batch, counts=case.counts) for case in cases]
    for found, case in zip(MIMO_LAYOUT.merge_each(slots), cases, strict=True):
        assert_same(found, case.batch)


def test_merged_tensors_have_their_own_memory() -> None:
    batch = {
        "input_ids": numbers(2, 3),
        "position_ids": numbers(3, 2, 3),
        "scalar": torch.tensor(5),
    }
    merged = MIMO_LAYOUT.merge(cut(batch))
    for value in batch.values():
        value.zero_()
    expected = {"input_ids": numbers(2, 3), "position_ids": numbers(3, 2, 3)}
    assert_same(merged, {**expected, "scalar": torch.tensor(5)})


@settings(max_examples=60, deadline=None)
@given(tensor_cases, st.data())
def test_only_a_whole_micro_batch_in_order_keeps_its_memory(
    case: Case, data: st.DataObject
) -> None:
    order = data.draw(
        st.one_of(
            st.just([*range(case.size)]),
            st.permutations(range(case.size)),
            st.lists(st.sampled_from(range(case.size)), min_size=1, max_size=4),
        )
    )
    samples, again = (cut(case.batch, counts=case.counts) for _ in range(2))
    chosen: list[Mapping[str, Leaf]] = [samples[i] for i in order]
    odd = data.draw(st.sampled_from(["none", "another batch's", "packed", "dict"]))
    if odd != "none":
        at = data.draw(st.sampled_from(range(len(order))))
        others: dict[str, Sequence[Mapping[str, Leaf]]] = {
            "another batch's": again,
            "packed": packed(samples),
            "dict": MIMO_LAYOUT.split(case.batch, counts=case.counts),
        }
        chosen[at] = others[odd][order[at]]
    (merged,) = MIMO_LAYOUT.merge_each([chosen], donated=True)
    assert_same(merged, gather(case, order))
    is_whole = odd == "none" and order == [*range(case.size)]
    if odd == "another batch's" and len(order) == 1:
        is_whole = case.size == 1
    shared = share_memory(case.batch, merged)
    assert ("input_ids" in shared) == is_whole
    if not is_whole:
        assert not shared


def test_a_part_of_a_micro_batch_is_copied() -> None:
    batch = {"input_ids": numbers(3, 2)}
    samples = cut(batch)
    for chosen in (samples[:2], samples[1:], samples[::-1], samples * 2):
        (merged,) = MIMO_LAYOUT.merge_each([chosen], donated=True)
        assert not share_memory(batch, merged)


def test_what_shares_its_memory_with_something_else_is_copied() -> None:
    both = numbers(4, 3)  # one of the micro-batches may be lent, and the other is the user's then
    alike = numbers(2, 3)
    cases: list[dict[str, Any]] = [
        *[{"input_ids": ids} for ids in both.chunk(2)],
        {"input_ids": alike, "labels": alike},
        {"input_ids": numbers(2, 3), "table": alike, "labels": alike},
        {"input_ids": numbers(2, 3), "labels": numbers(2, 3)[:, :0]},
    ]
    layout = BatchLayout(fields={"table": Global()})
    for batch in cases:
        (merged,) = layout.merge_each([cut(batch, layout)], donated=True)
        assert_same(merged, batch)
        assert not share_memory(batch, merged)


def test_no_inference_tensor_is_handed_on() -> None:
    with torch.inference_mode():
        batch = {"input_ids": numbers(2, 3)}
    (merged,) = MIMO_LAYOUT.merge_each([cut(batch)], donated=True)
    assert not merged["input_ids"].is_inference()


def test_what_all_samples_share_is_a_copy_in_a_micro_batch_that_keeps_its_memory() -> None:
    layout = BatchLayout(fields={"mask": Global()})
    ids = numbers(2, 3)
    mask = numbers(4)[:2]  # whose memory holds more
    batch = {"input_ids": ids, "mask": mask, "scalar": torch.tensor(5), "no": None}
    (merged,) = layout.merge_each([cut(batch, layout)], donated=True)
    assert_same(merged, batch)
    assert share_memory(batch, merged) == ["input_ids"]
    merged["input_ids"].resize_(0)  # the tensor is another one
    assert ids.shape == (2, 3)


PADDED = BatchLayout(fields=padded_text(pad_token_id=9))
PADDED_LEFT = BatchLayout(fields=padded_text(pad_token_id=9, pad_side="left"))


def text(size: int, length: int) -> dict[str, Any]:
    return {
        "input_ids": numbers(size, length) + 100,
        "labels": numbers(size, length),
        "attention_mask": torch.ones(size, length, dtype=torch.bool),
        "position_ids": numbers(3, size, length),
    }


@pytest.mark.parametrize("layout", [PADDED, PADDED_LEFT], ids=["right", "left"])
@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4), (0, 2)])
def test_samples_of_different_lengths_are_padded_as_dicts_are(
    layout: BatchLayout, lengths: tuple[int, int]
) -> None:
    batches = [text(2, length) for length in lengths]
    samples = [sample for batch in batches for sample in cut(batch, layout)]
    flats = [flat for batch in batches for flat in layout.split(batch)]
    expected = layout.merge(flats)
    assert expected["input_ids"].shape == (4, max(lengths))
    for given_as in (samples, packed(samples), [*samples[:2], *packed(samples)[2:]]):
        assert_same(layout.merge(given_as), expected)


CLIP = "modality_inputs.images.clip"


def test_samples_that_lack_ragged_fields_are_merged_as_dicts_are() -> None:
    clip = {"hidden_states": numbers(6, 2), "grid_thw": torch.tensor([[1, 1, 2], [1, 2, 2]])}
    with_images = {"input_ids": numbers(2, 4), "modality_inputs": {"images": {"clip": clip}}}
    plain = {"input_ids": numbers(1, 4)}
    samples = [*cut(plain), *cut(with_images), *cut(plain)]
    for given_as in (samples, packed(samples), [*packed(samples[:2]), *samples[2:]]):
        merged = MIMO_LAYOUT.merge(given_as)
        assert_same(merged["modality_inputs"], with_images["modality_inputs"])
        assert merged["input_ids"].shape == (4, 4)


def test_ragged_fields_may_have_no_rows_at_all() -> None:
    layout = BatchLayout(
        fields={"x": Ragged(along="count"), "y": Items(of="y"), "w": Ragged(along="count")}
    )
    batch = {
        "input_ids": numbers(3, 2),
        "count": torch.tensor([0, 0, 0]),
        "x": torch.empty(0, 4, dtype=torch.bool),
        "y": numbers(2, 0),
        "w": torch.empty(0),
    }
    samples = cut(batch, layout, counts={"y": [0, 2, 0]})
    assert_cut_as_by_torch(samples, layout.split(batch, counts={"y": [0, 2, 0]}))
    for given_as in (samples, packed(samples)):
        assert_same(layout.merge(given_as), batch)


def test_values_that_all_samples_share_go_whole_with_each() -> None:
    layout = BatchLayout(fields={"table": Global(), "nothing": Global()})
    batch = {
        "table": numbers(2, 3).to(torch.bfloat16),
        "input_ids": numbers(3, 2),
        "nothing": None,
        "scalar": torch.tensor(True),
    }
    samples = cut(batch, layout)
    assert_cut_as_by_torch(samples, layout.split(batch))
    for given_as in (samples, packed(samples), [samples[0], *packed(samples[1:])]):
        assert_same(flatten_nested(layout.merge(given_as)), {**batch})
    other = cut({**batch, "table": torch.zeros(2, 3, dtype=torch.bfloat16)}, layout)
    with pytest.raises(ValueError, match="field 'table': sample 1 has a torch"):
        layout.merge([samples[0], other[0]])


@pytest.mark.parametrize("rows", [0, 1, 2, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64], ids=str)
def test_few_rows_before_the_batch_dim_are_cut_and_more_are_left_to_torch(
    rows: int, dtype: torch.dtype
) -> None:
    layout = BatchLayout(fields={"x": Batched(dim=1), "y": Batched(dim=-1)})
    batch = {
        "input_ids": numbers(3, 2),
        "x": (numbers(rows, 3, 5) % 2).to(dtype),
        "y": (numbers(rows, 3) % 2).to(dtype),
    }
    flats = layout.split(batch)
    samples = layout.read(batch).cut()
    if rows > FEW_ROWS:
        assert samples is None
        assert_same(layout.merge(packed(tensors_of(flats))), batch)
    else:
        assert samples is not None
        assert_cut_as_by_torch(samples, flats)
        assert_same(layout.merge([*samples[:1], *packed(samples)[1:]]), batch)


class Subclass(torch.Tensor):
    pass


COMPLEX = torch.complex(numbers(4, 3).float(), -numbers(4, 3).float())

ODD: dict[str, tuple[torch.Tensor, bool]] = {
    # The tensor [4, ...], and whether it is cut by arithmetic.
    "contiguous": (numbers(4, 3), True),
    "behind a storage's start": (numbers(6, 3)[1:5], True),
    "misaligned": (torch.arange(40, dtype=torch.uint8)[3:15].view(4, 3), True),
    "complex": (COMPLEX, True),
    "no width": (numbers(4, 0), True),
    "no width, transposed": (numbers(0, 4).t(), True),
    "a size of 1 with an odd stride": (
        torch.as_strided(numbers(64), (4, 1, 3), (3, 50, 1), 2),
        True,
    ),
    "requires grad": (torch.ones(4, 3, requires_grad=True), True),
    "result of a computation": (torch.ones(4, 3, requires_grad=True) * 2, True),
    "transposed": (numbers(3, 4).t(), False),
    "sliced with steps": (numbers(8, 6)[::2, ::2], False),
    "part of wider rows": (numbers(4, 6)[:, 1:4], False),
    "expanded": (torch.tensor([1, 2, 3]).expand(4, 3), False),
    "expanded, no width": (torch.empty(1, 0).expand(4, 0), True),
    "overlapping": (torch.as_strided(numbers(20), (4, 3), (1, 1)), False),
    "channels last": (
        numbers(4, 2, 3, 5).contiguous(memory_format=torch.channels_last),
        False,
    ),
    "conjugate": (COMPLEX.conj(), False),
    "negative": (torch._neg_view(numbers(4, 3).float()), False),
    "parameter": (torch.nn.Parameter(torch.ones(4, 3)), False),
    "subclass": (torch.ones(4, 3).as_subclass(Subclass), False),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_are_cut_right_or_left_to_torch(name: str) -> None:
    value, by_arithmetic = ODD[name]
    batch = {"input_ids": numbers(4, 2), "x": value}
    samples = MIMO_LAYOUT.read(batch).cut()
    assert (samples is not None) == by_arithmetic
    if samples is not None:
        flats = MIMO_LAYOUT.split(batch)
        assert_cut_as_by_torch(samples, flats)
        assert_same(MIMO_LAYOUT.merge(samples), MIMO_LAYOUT.merge(flats))


@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_that_all_samples_share_are_whole_or_left_to_torch(name: str) -> None:
    value, _ = ODD[name]
    layout = BatchLayout(fields={"x": Global()})
    batch = {"input_ids": numbers(3, 2), "x": value}
    samples = layout.read(batch).cut()
    plain = type(value) is torch.Tensor and not (value.is_conj() or value.is_neg())
    assert (samples is not None) == (plain and value.is_contiguous())
    if samples is not None:
        assert_same(samples[2]["x"], value.detach())
        assert packed_bytes(samples) == packed_bytes(tensors_of(layout.split(batch)))


def test_one_row_of_an_odd_stride_is_cut_right() -> None:
    batch = {
        "input_ids": torch.as_strided(numbers(20), (1, 4), (7, 1), 3),
        "position_ids": torch.as_strided(numbers(60), (3, 1, 4), (4, 9, 1), 5),
    }
    samples = cut(batch)
    assert_cut_as_by_torch(samples, MIMO_LAYOUT.split(batch))
    assert_same(MIMO_LAYOUT.merge(samples), batch)


@pytest.mark.parametrize("value", [["a", "b"], ("a", "b"), 7, "text", {}, object()], ids=repr)
def test_what_is_no_tensor_is_left_to_the_split(value: object) -> None:
    assert MIMO_LAYOUT.read({"input_ids": numbers(2, 2), "x": value}).cut() is None


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # these kinds are beta
    NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize(
    "value",
    [torch.eye(2).to_sparse(), NESTED, torch.zeros(2, 2, device="meta")],
    ids=["sparse", "nested", "meta"],
)
def test_what_does_not_lie_in_host_memory_is_left_to_the_split(value: torch.Tensor) -> None:
    layout = BatchLayout(fields={"x": Global()})
    assert layout.read({"input_ids": numbers(2, 2), "x": value}).cut() is None


ONE_EACH = {"grid_thw": torch.ones(3, 3, dtype=torch.int64)}


def told(call: Callable[[], object]) -> str:
    """Return the message of the ValueError that a call raises."""
    with pytest.raises(ValueError, match="field") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        {"x": numbers(4, 3)},
        {"position_ids": numbers(3, 4, 4)},
        {"modality_inputs": {"images": {"clip": {**ONE_EACH, "hidden_states": numbers(5, 2)}}}},
        {"a": numbers(2), "x": numbers(4)},
        {"a": numbers(2), "names": ["a", "b", "c"]},
    ],
    ids=["batched", "rotary", "ragged", "first of two", "before a list"],
)  # fmt: skip
def test_a_field_that_does_not_fit_is_refused_as_by_the_split(extra: dict[str, Any]) -> None:
    batch: dict[str, Any] = {"input_ids": numbers(3, 4), **extra}
    assert told(MIMO_LAYOUT.read(batch).cut) == told(lambda: MIMO_LAYOUT.split(batch))


def test_a_field_that_no_rule_covers_is_refused_as_by_the_split() -> None:
    layout = BatchLayout(fields={"input_ids": Batched()}, unlisted=None)
    batch = {"input_ids": numbers(3, 4), "x": numbers(3)}
    assert told(layout.read(batch).cut) == told(lambda: layout.split(batch))


def test_a_dtype_that_cannot_be_sent_is_refused_by_name() -> None:
    batch = {"input_ids": numbers(2, 2), "x": torch.zeros(2, dtype=torch.complex128)}
    assert "'x' has the unsupported dtype torch.complex128" in told(MIMO_LAYOUT.read(batch).cut)


@pytest.mark.parametrize(
    "other",
    [numbers(1, 4).int(), numbers(1, 3), numbers(1), numbers(1, 4, 1), None],
    ids=["dtype", "size", "ndim", "more dims", "None"],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_samples_that_disagree_are_refused_as_dicts_are(
    other: torch.Tensor | None, swapped: bool
) -> None:
    pair: list[dict[str, Any]] = [
        {"input_ids": numbers(1, 4), "x": numbers(1, 4)},
        {"input_ids": numbers(1, 4), "x": other},
    ]
    if swapped:
        pair.reverse()
    samples = [cut(batch)[0] for batch in pair]
    flats = [MIMO_LAYOUT.split(batch)[0] for batch in pair]
    expected = told(lambda: MIMO_LAYOUT.merge(flats))
    assert told(lambda: MIMO_LAYOUT.merge(samples)) == expected
    assert told(lambda: MIMO_LAYOUT.merge(packed(samples))) == expected


def test_only_ragged_fields_may_be_missing_in_cut_samples_too() -> None:
    samples = [
        *cut({"input_ids": numbers(1, 4), "x": numbers(1)}),
        *cut({"input_ids": numbers(1, 4)}),
    ]
    message = r"field 'x': sample 1 lacks it and others have it"
    with pytest.raises(ValueError, match=message):
        MIMO_LAYOUT.merge(samples)
    with pytest.raises(ValueError, match=message):
        MIMO_LAYOUT.merge(packed(samples))


def test_samples_with_equal_rows_share_one_layout() -> None:
    one, two = cut(text(3, 7)), cut(text(2, 7))
    assert {id(sample.layout) for sample in [*one, *two]} == {id(one[0].layout)}
    assert cut(text(2, 8))[0].layout != one[0].layout
    wider = cut({**text(2, 7), "labels": numbers(2, 7).int()})
    assert wider[0].layout != one[0].layout


@pytest.mark.parametrize("known", [0, 1, 2])
def test_layouts_that_were_forgotten_are_made_again(known: int) -> None:
    layout = BatchLayout(fields={"x": Ragged(along="n")})
    batch = {"input_ids": numbers(4, 2), "n": torch.tensor([1, 0, 3, 1]), "x": numbers(5, 2)}
    cut_module._known_layouts.cache_clear()
    with mock.patch.object(cut_module, "_MAX_KNOWN", known):
        for _ in range(2):
            assert_cut_as_by_torch(cut(batch, layout), layout.split(batch))


def test_the_memory_of_a_micro_batch_lives_as_long_as_one_of_its_samples() -> None:
    memory = (ctypes.c_char * 96)()
    is_there = weakref.ref(memory)
    ids = torch.frombuffer(memory, dtype=torch.int64).view(3, 4).copy_(numbers(3, 4))
    samples = cut({"input_ids": ids})
    last = samples[2]
    del memory, ids, samples
    gc.collect()
    assert is_there() is not None
    assert_same(MIMO_LAYOUT.merge([last]), {"input_ids": numbers(3, 4)[2:]})
    del last
    gc.collect()
    assert is_there() is None


def cost_of(flat: FlatSample, /) -> float:
    """A cost that only a dict with the sample's own values gives."""
    assert type(flat) is dict
    assert [*flat] == ["input_ids", "labels", "attention_mask", "position_ids"]
    ids = flat["input_ids"]
    assert isinstance(ids, torch.Tensor)
    return float(ids.sum())


TOKENS = SampleCost(encoder_cost_weight=0.0, language_cost_weight=1.0)


@pytest.mark.parametrize("cost", [cost_of, TOKENS], ids=["function", "SampleCost"])
def test_costs_are_those_of_samples_cut_by_torch(cost: Any) -> None:
    batch = text(3, 4)
    batch["attention_mask"][1, 2:] = False
    samples, costs = cut_with_costs(batch, layout=MIMO_LAYOUT, cost_of=cost)
    flats, expected = samples_with_costs(batch, layout=MIMO_LAYOUT, cost_of=cost)
    assert costs == expected
    assert len({*costs}) > 1
    assert_cut_as_by_torch([s for s in samples if isinstance(s, CutSample)], flats)


class Reversing(BatchLayout):
    """A layout that cuts in a way of its own."""

    def split(self, batch: Mapping[str, object], *, counts: Any = None) -> list[FlatSample]:
        return super().split(batch, counts=counts)[::-1]


def test_a_layout_with_a_way_of_its_own_is_asked() -> None:
    flats, _ = cut_with_costs(text(3, 4), layout=Reversing(), cost_of=cost_of)
    assert [type(flat) for flat in flats] == [dict] * 3
    assert_same(flats[0]["labels"], numbers(3, 4)[2:])
    listed, _ = cut_with_costs([{"x": torch.ones(2)}], layout=SAMPLE_LIST, cost_of=lambda _: 1.0)
    assert_same(listed, [{"x": torch.ones(2)}])


def test_an_error_of_a_cost_names_its_sample() -> None:
    def fails(flat: FlatSample, /) -> float:
        raise KeyError(f"absent from {[*flat]}")

    with pytest.raises(KeyError, match="absent") as caught:
        cut_with_costs(text(2, 3), layout=MIMO_LAYOUT, cost_of=fails)
    assert caught.value.__notes__ == ["raised by cost_of for sample 0 of its micro-batch"]


def test_a_micro_batch_that_moves_is_joined_from_where_it_is_then() -> None:
    batch = {"input_ids": torch.arange(6000).view(4, -1)}
    samples = cut(batch)
    batch["input_ids"].share_memory_()  # type: ignore[no-untyped-call] # as when a tensor is sent to another process
    held = [torch.full((6000,), 7) for _ in range(50)]  # takes what was freed
    assert torch.equal(MIMO_LAYOUT.merge(samples)["input_ids"], torch.arange(6000).view(4, -1))
    assert held


def test_zeros_without_memory_are_cut_by_torch() -> None:
    batch = {"input_ids": torch.zeros(2, 3), "labels": torch._efficientzerotensor((2, 3))}
    assert MIMO_LAYOUT.read(batch).cut() is None
    merged = MIMO_LAYOUT.merge(MIMO_LAYOUT.split(batch))
    assert torch.equal(merged["labels"], torch.zeros(2, 3))


def test_samples_stay_what_they_were_when_the_batch_gets_other_tensors() -> None:
    batch = {"input_ids": torch.arange(12).view(3, 4), "scale": torch.ones(2)}
    layout = BatchLayout(fields={"scale": Global()})
    samples = layout.read(batch).cut()
    assert samples is not None
    before = [{k: None if v is None else v.clone() for k, v in flat.items()} for flat in samples]
    batch["input_ids"].data = torch.zeros(1, dtype=torch.int64)  # frees what it had
    batch["scale"].unsqueeze_(0).requires_grad_()
    assert_same([dict(flat) for flat in samples], before)
    packed = pack_samples(samples)
    assert_same(unpack_samples(packed, [flat.layout for flat in samples]), before)
