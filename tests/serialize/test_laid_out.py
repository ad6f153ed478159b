"""Fields of samples copied and joined from where they lie."""

import copy
import ctypes
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenstep.serialize import (
    FEW_ROWS,
    Copier,
    Copies,
    Copy,
    FieldJoiner,
    FieldSpec,
    LaidOutSample,
    Manifest,
    PackedSample,
    PackedSamples,
    Part,
    SampleSchema,
    TensorSample,
    fold_values,
    in_pieces,
    is_laid_out,
    pack,
    pack_samples,
    sample_layout,
)
from evenstep.serialize.copies import copy_all
from tests.serialize.samples import (
    SUPPORTED,
    InPlace,
    filled,
    raw,
    same,
    small_shapes,
    tensor_samples,
)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LARGE = (1 << 20) + 8


def packed(flat: TensorSample) -> PackedSample:
    """Return a sample that lies in a buffer, behind another one."""
    flats: list[TensorSample] = [{"before": torch.zeros(1)}, flat]
    manifest = Manifest(tuple([sample_layout(each) for each in flats]))
    return PackedSamples(manifest, pack_samples(flats))[1]


def cut_from_wider(tensor: Tensor) -> Tensor:
    """Return an equal tensor ``[R, n, ...]`` whose rows are a step apart."""
    rows, length, *rest = tensor.shape
    wide = filled(tensor.dtype, rows, length + 3, *rest, seed=99)
    part = wide[:, 2 : 2 + length]
    bits = _BITS[tensor.itemsize]
    part.view(bits).copy_(tensor.view(bits))
    return part


def concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return what torch makes of the tensors' bits."""
    dtype = tensors[0].dtype
    return torch.cat([tensor.view(_BITS[dtype.itemsize]) for tensor in tensors], dim).view(dtype)


def garbage(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory in which no byte is what it was, so that one that is not copied shows."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    tensor.view(-1).view(torch.uint8).fill_(0xA5)
    return tensor


def join(samples: Sequence[LaidOutSample], key: str, dim: int) -> Tensor | None:
    copies = Copies()
    joined = FieldJoiner(samples, garbage, copies).join(key, dim)
    copies.make()
    return joined


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Tensors that ``torch.cat`` takes along ``dim``."""

    tensors: list[Tensor]
    dim: int


@st.composite
def columns(draw: st.DrawFn) -> Column:
    dtype = draw(st.sampled_from(SUPPORTED))
    dim = draw(st.integers(0, 1))
    rows = [draw(st.sampled_from([1, 2, 3, FEW_ROWS]))] * dim
    rest = draw(small_shapes)
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    tensors = [filled(dtype, *rows, n, *rest, seed=seed) for seed, n in enumerate(lengths)]
    return Column(tensors=tensors, dim=dim)


@settings(max_examples=150, deadline=None)
@given(columns(), st.data())
def test_joining_equals_concatenating(column: Column, data: st.DataObject) -> None:
    samples: list[LaidOutSample] = []
    for tensor in column.tensors:
        # Other keys before it give the field another index in each schema.
        extras = data.draw(st.sets(st.sampled_from(["a", "b", "z"])))
        flat: TensorSample = {key: torch.zeros(3) for key in extras}
        kinds = ["packed", "whole", "rows"] if column.dim else ["packed", "whole"]
        kind = data.draw(st.sampled_from(kinds))
        flat["x"] = cut_from_wider(tensor) if kind == "rows" else tensor
        samples.append(packed(flat) if kind == "packed" else InPlace(flat))
    joined = join(samples, "x", column.dim)
    assert joined is not None
    assert joined.is_contiguous()
    assert same(joined, concatenated(column.tensors, column.dim))


def test_many_fields_are_copied_at_once() -> None:
    xs = [filled(torch.int16, i, 3) for i in range(4)]
    ys = [filled(torch.int8, 2, i) for i in range(4)]
    samples = [packed({"x": x, "y": y}) for x, y in zip(xs, ys, strict=True)]
    copies = Copies()
    joiner = FieldJoiner(samples, garbage, copies)
    x, y = joiner.join("x", 0), joiner.join("y", 1)
    assert x is not None
    assert y is not None
    assert (x.shape, y.shape) == ((6, 3), (2, 6))
    assert {*raw(x), *raw(y)} == {0xA5}  # not yet
    copies.make()
    assert same(x, torch.cat(xs))
    assert same(y, torch.cat(ys, 1))


class Elsewhere(InPlace):
    """A sample whose addresses are off by one, and whose copier knows."""

    shift = 1

    def parts(self) -> list[Part]:
        return [(address - self.shift, step) for address, step in super().parts()]

    @property
    def copier(self) -> Copier:
        return self.copy_back

    def copy_back(self, copies: Sequence[Copy]) -> None:
        copy_all([(to, source + self.shift, n) for to, source, n in copies])


@pytest.mark.parametrize("dim", [0, 1])
def test_what_lies_elsewhere_is_copied_as_it_says(dim: int) -> None:
    xs = [filled(torch.int32, 3, 3, seed=seed) for seed in range(4)]
    flats: list[TensorSample] = [
        {"x": cut_from_wider(x) if dim else x, "n": None, "y": torch.tensor([i])}
        for i, x in enumerate(xs)
    ]
    samples = [(Elsewhere if i % 2 else InPlace)(flat) for i, flat in enumerate(flats)]
    assert same(join(samples, "x", dim), torch.cat(xs, dim))
    packed = pack_samples(flats)
    assert same(pack_samples(samples), packed)
    assert same(pack_samples(samples, out=torch.full_like(packed, 9)), packed)


def test_a_laid_out_sample_knows_its_keys_without_a_view() -> None:
    sample = InPlace({"x": torch.zeros(2), "n": None})
    assert [key in sample for key in ("x", "n", "y")] == [True, True, False]
    assert is_laid_out(sample)
    assert not is_laid_out({**sample})
    assert not sample.is_pageable  # not known to be


def test_samples_without_the_field_are_left_out() -> None:
    x = filled(torch.float32, 2, 3)
    samples = [packed({"a": x}), InPlace({"a": x, "x": x}), packed({"n": None}), packed({"x": x})]
    assert same(join(samples, "x", 0), torch.cat([x, x]))
    assert same(join(samples[:2], "a", 1), torch.cat([x, x], 1))


def test_the_number_of_dims_is_that_of_the_first_tensor() -> None:
    samples = [packed({"y": None}), packed({"x": torch.zeros(2, 3)}), packed({"x": torch.zeros(2)})]
    joiner = FieldJoiner(samples, garbage, Copies())
    assert joiner.ndim("x") == 2
    assert joiner.ndim("y") is None
    assert joiner.ndim("absent") is None
    assert FieldJoiner(samples[:1], garbage, Copies()).ndim("y") is None


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("samples", "dim"),
    [
        ([packed({"x": X}), packed({"x": None})], 0),
        ([packed({"x": X}), packed({"x": X.double()})], 0),
        ([packed({"x": X}), packed({"x": X.view(torch.int32)})], 0),
        ([packed({"x": X}), packed({"x": X[:, :2].contiguous()})], 0),
        ([packed({"x": X}), packed({"x": X[:1]})], 1),
        ([packed({"x": X}), packed({"x": X[0]})], 0),
        ([packed({"x": X[0]}), packed({"x": X[0]})], 1),
        ([packed({"x": torch.tensor(1)})], 0),
        ([packed({"x": torch.zeros(FEW_ROWS + 1, 2)})], 1),
        ([packed({"x": torch.zeros(0, 2)})], 1),
        ([packed({"x": X}), InPlace({"x": cut_from_wider(X)})], 0),
        ([packed({"x": X}), InPlace({"x": X}, is_cpu=False)], 0),
        ([packed({"y": X})], 0),
    ],
    ids=["None", "dtype", "same size of dtype", "behind dim", "before dim", "ndim", "no such dim",
         "scalar", "many rows", "no rows", "stepped rows", "device", "absent"],
)  # fmt: skip
def test_what_memmoves_cannot_join_is_left_to_torch(samples: list[LaidOutSample], dim: int) -> None:
    assert join(samples, "x", dim) is None


def test_few_rows_before_the_dim_are_joined_and_more_are_not() -> None:
    for rows in (1, FEW_ROWS):
        x = filled(torch.int32, rows, 3)
        assert same(join([packed({"x": x})] * 2, "x", 1), torch.cat([x, x], 1))


def test_stepped_rows_are_joined_along_the_dim_that_was_cut_only() -> None:
    x = filled(torch.int32, 2, 3, 4)
    sample = InPlace({"x": cut_from_wider(x)})
    assert same(join([sample], "x", 1), x)
    assert join([sample], "x", 0) is None
    assert join([sample], "x", 2) is None


def test_large_fields_are_left_to_torch_where_it_has_several_threads() -> None:
    large, small = filled(torch.uint8, LARGE), filled(torch.uint8, 8)
    samples = [packed({"x": small}), packed({"x": large})]
    with threads(2):
        assert join(samples, "x", 0) is None
        assert same(join(samples[:1], "x", 0), small)
    with threads(1):
        assert same(join(samples, "x", 0), torch.cat([small, large]))


@settings(max_examples=100, deadline=None)
@given(st.lists(tensor_samples, max_size=4), st.data())
def test_laid_out_samples_pack_to_the_bytes_of_equal_dicts(
    flats: list[TensorSample], data: st.DataObject
) -> None:
    kinds: list[Any] = [dict, packed, InPlace]
    given_as = [data.draw(st.sampled_from(kinds))(flat) for flat in flats]
    layouts = [sample_layout(flat) for flat in flats]
    expected = pack_samples(flats)
    assert same(pack_samples(given_as), expected)
    out = torch.full_like(expected, 7)  # shows padding that is not written
    assert same(pack_samples(given_as, layouts=layouts, out=out), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS])
def test_stepped_rows_pack_to_the_bytes_of_contiguous_ones(rows: int, dtype: torch.dtype) -> None:
    x = filled(dtype, rows, 1, 5)
    flat: TensorSample = {"n": None, "x": x, "mask": filled(torch.bool, 3), "no": x[:0]}
    stepped = InPlace({**flat, "x": cut_from_wider(x)})
    expected = pack_samples([flat, flat])
    out = torch.full_like(expected, 7)
    assert same(pack_samples([stepped, stepped], out=out), expected)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_large_fields_pack_to_the_same_bytes(num_threads: int) -> None:
    x = filled(torch.uint8, 2, LARGE)
    flat: TensorSample = {"a": filled(torch.uint8, 3), "x": x}
    with threads(num_threads):
        expected = pack_samples([flat])
        assert same(pack_samples([packed(flat)]), expected)
        assert same(pack_samples([InPlace({**flat, "x": cut_from_wider(x)})]), expected)


def test_a_layout_of_another_laid_out_sample_is_refused() -> None:
    sample = packed({"x": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"sample 0, field 'x' is a Tensor of torch.float32 \[3\]"):
        pack_samples([sample], layouts=[sample_layout({"x": torch.zeros(2)})])
    with pytest.raises(ValueError, match="sample 0 has other keys than its layout"):
        pack_samples([sample], layouts=[sample_layout({})])


def test_an_equal_layout_of_a_laid_out_sample_will_do() -> None:
    flat: TensorSample = {"x": filled(torch.int16, 3), "n": None}
    sample = packed(flat)
    equal = replace(sample.layout)
    assert equal is not sample.layout
    assert same(pack_samples([sample], layouts=[equal]), pack_samples([flat]))


def test_laid_out_samples_know_their_layout_and_have_nothing_to_fold() -> None:
    sample = packed({"x": torch.zeros(2), "n": None})
    assert sample_layout(sample) is sample.layout
    assert fold_values(sample) is sample
    with pytest.raises(ValueError, match=r"has the key .* already; unfold it"):
        fold_values(pack([{"x": torch.zeros(2), "step": 3}])[0])


def test_a_packed_sample_is_a_mapping_with_keys_as_they_lie() -> None:
    sample: Mapping[str, Tensor | None] = packed({"z": torch.ones(1), "n": None, "b": X, "a": None})
    assert [*sample] == [*sample.keys()] == ["b", "z", "a", "n"]
    assert len(sample) == 4
    assert ["b" in sample, "a" in sample, "c" in sample] == [True, True, False]
    assert same({**sample}, {"b": X, "z": torch.ones(1), "a": None, "n": None})
    assert sample.get("c") is None
    with pytest.raises(KeyError, match="c"):
        sample["c"]


def test_a_packed_sample_elsewhere_than_in_host_memory_tells_no_address() -> None:
    manifest = pack([{"x": torch.zeros(2)}]).manifest
    samples = PackedSamples(
        manifest, torch.empty(manifest.nbytes, dtype=torch.uint8, device="meta")
    )
    assert not samples[0].is_cpu
    assert join([*samples], "x", 0) is None
    with pytest.raises(ValueError, match="field 'x' is on the meta device and has no data"):
        pack_samples([samples[0]])


@settings(deadline=None)
@given(columns())
def test_merging_a_buffer_s_samples_equals_concatenating_them(column: Column) -> None:
    samples = pack([{"x": tensor, "a": tensor[:0]} for tensor in column.tensors])
    merged = samples.merge("x", dim=column.dim)
    expected = concatenated(column.tensors, column.dim)
    assert same(merged, expected)
    samples.buffer.fill_(0xA5)
    assert same(merged, expected)  # it has its own memory


def test_a_dim_may_count_from_the_end() -> None:
    samples = pack([{"x": X}, {"x": X}])
    assert same(samples.merge("x", dim=-2), torch.cat([X, X]))
    assert same(samples.merge("x", dim=-1), torch.cat([X, X], 1))


def test_schemas_say_where_each_key_is_and_compare_without_it() -> None:
    schema = SampleSchema((FieldSpec("b", torch.int8, 1), FieldSpec("c", torch.int8, 0)), ("a",))
    assert schema.places == {"b": 0, "c": 1, "a": None}
    for other in (copy.deepcopy(schema), pickle.loads(pickle.dumps(schema)), replace(schema)):
        assert (other, hash(other), other.places) == (schema, hash(schema), schema.places)
    assert "places" not in repr(schema)


def _overwritten() -> list[Tensor]:
    """Take memory that was freed before, so that what still reads it reads something else."""
    return [torch.full((10_000,), 7) for _ in range(50)]


def test_a_buffer_that_moves_is_merged_from_where_it_is_then() -> None:
    packed = pack([{"x": torch.arange(5000)}] * 2)
    packed.buffer.share_memory_()  # type: ignore[no-untyped-call] # as when a tensor is sent to another process
    held = _overwritten()
    assert torch.equal(packed.merge("x"), torch.arange(5000).repeat(2))
    assert torch.equal(pack_samples([*packed]), packed.buffer)
    assert held


def test_copies_of_packed_samples_are_merged_from_their_own_memory() -> None:
    packed = pack([{"x": torch.arange(5000)}] * 2)
    copied, unpickled = copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))
    packed.buffer.zero_()
    assert torch.equal(copied.merge("x"), torch.arange(5000).repeat(2))
    assert torch.equal(unpickled.merge("x"), torch.arange(5000).repeat(2))


def test_merging_names_a_sample_without_the_field() -> None:
    packed = pack([{"x": torch.ones(1, 2)}, {"y": torch.ones(1)}, {"x": None}])
    with pytest.raises(ValueError, match="sample 1 has no tensor 'x'"):
        packed.merge("x", [0, 1])
    with pytest.raises(ValueError, match="sample 2 has no tensor 'x'"):
        packed.merge("x", [0, 2])


def test_zeros_without_memory_are_packed() -> None:
    zeros = torch._efficientzerotensor((2, 3))  # as autograd makes them up
    assert zeros.data_ptr() == 0
    expected = torch.zeros(24, dtype=torch.uint8)
    assert torch.equal(pack_samples([{"x": zeros}], out=torch.ones_like(expected)), expected)


class MadeWhenAsked(Mapping[str, Tensor | None]):
    """A sample whose tensors nobody else holds."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.full((50,), len(key))

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "bb", "ccc"])

    def __len__(self) -> int:
        return 3


def test_tensors_that_a_mapping_makes_live_until_they_are_packed() -> None:
    expected = pack_samples([dict(MadeWhenAsked())] * 20)
    assert torch.equal(pack_samples([MadeWhenAsked()] * 20), expected)


@pytest.mark.parametrize("num_threads", [1, 2])  # of Python: a large copy is cut where it is one
def test_small_and_large_copies_all_arrive(num_threads: int) -> None:
    sizes = [1, 1 << 16, (1 << 16) + 1, 0, 448 << 10, (448 << 10) + 1, 1 << 20] * 10
    source = torch.randint(256, (sum(sizes),), dtype=torch.uint8)
    target = torch.zeros_like(source)
    offsets = [*accumulate(sizes, initial=0)][:-1]
    to, start = target.data_ptr(), source.data_ptr()
    with mock.patch("threading.active_count", return_value=num_threads):
        copy_all([(to + at, start + at, size) for at, size in zip(offsets, sizes, strict=True)])
    assert torch.equal(source, target)


@pytest.mark.parametrize(("above", "num_calls"), [(0, 3), (1, 1), (31, 1), (32, 3), (4095, 3)])
def test_a_copy_is_not_cut_where_pieces_are_slow(above: int, num_calls: int) -> None:
    nbytes, page = 3 * (448 << 10), 1 << 12
    source = torch.randint(256, (nbytes + page,), dtype=torch.uint8)
    target = torch.zeros(nbytes + 2 * page, dtype=torch.uint8)
    start = source.data_ptr() + -source.data_ptr() % page
    to = target.data_ptr() + -target.data_ptr() % page + above
    memmove = ctypes.memmove
    with (
        mock.patch("threading.active_count", return_value=1),
        mock.patch("ctypes.memmove", side_effect=memmove) as called,
    ):
        copy_all([(to, start, nbytes)])
    assert called.call_count == num_calls
    assert ctypes.string_at(to, nbytes) == ctypes.string_at(start, nbytes)


def test_pieces_do_what_the_copies_do() -> None:
    copies = [(100, 900, 7), (200, 800, 0), (300, 700, 6), (400, 600, 3)]
    assert in_pieces(copies, 3) == [
        *[(100, 900, 3), (103, 903, 3), (106, 906, 1)],
        *[(300, 700, 3), (303, 703, 3)],
        (400, 600, 3),
    ]


def test_what_lies_elsewhere_can_be_fetched_first() -> None:
    source, target = filled(torch.uint8, 3), torch.zeros(3, dtype=torch.uint8)
    seen: list[Copy] = []
    copies = Copies()
    copies.by(copy_all).append((target.data_ptr(), source.data_ptr(), 3))
    copies.by(seen.extend).append((8, 16, 4))
    copies.fetch()
    assert seen == [(8, 16, 4)]
    assert not target.any()
    copies.make()
    assert seen == [(8, 16, 4)]
    assert torch.equal(source, target)
