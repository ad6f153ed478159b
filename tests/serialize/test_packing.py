"""Samples into one buffer and back as views."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenstep.serialize import (
    DecodeError,
    FieldSpec,
    SampleSchema,
    TensorSample,
    pack_samples,
    sample_layout,
    unpack_sample,
    unpack_samples,
)
from evenstep.serialize.packing_device import FieldsOfDevice
from tests.serialize.samples import SUPPORTED, filled, odd_tensors, same, tensor_samples

ODD = dict(odd_tensors())


def round_trip(flat: TensorSample) -> TensorSample:
    return unpack_sample(pack_samples([flat]), sample_layout(flat))


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    flat: TensorSample = {"x": filled(dtype, 3, 5), "scalar": filled(dtype), "none": None}
    assert same(round_trip(flat), flat)


def test_the_dtypes_are_those_that_torch_has() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    refused = {
        torch.complex128, torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4
    }  # fmt: skip
    assert every - set(SUPPORTED) == refused


@pytest.mark.parametrize("name", ODD)
def test_odd_memory_comes_back_bit_for_bit(name: str) -> None:
    tensor = ODD[name]
    back = round_trip({"x": tensor})["x"]
    assert isinstance(back, Tensor)
    assert same(back, tensor)
    assert not back.requires_grad
    assert torch.equal(back.nan_to_num(), tensor.detach().nan_to_num())


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_every_dtype_may_be_transposed_or_large(dtype: torch.dtype) -> None:
    flat: TensorSample = {"t": filled(dtype, 3, 5).t(), "large": filled(dtype, 1100, 1024)}
    assert same(round_trip(flat), flat)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_large_tensors_come_back_whatever_copies_them(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        flat: TensorSample = {
            "large": filled(torch.uint8, 2**20 + 3),
            "small": filled(torch.int32, 3),
        }
        assert same(round_trip(flat), flat)
    finally:
        torch.set_num_threads(before)


@given(st.lists(tensor_samples, max_size=4))
def test_samples_lie_end_to_end(flats: list[TensorSample]) -> None:
    layouts = [sample_layout(flat) for flat in flats]
    buffer = pack_samples(flats)
    assert buffer.numel() == sum(layout.nbytes for layout in layouts)
    assert all(layout.nbytes % 8 == 0 for layout in layouts)
    assert same(unpack_samples(buffer, layouts), [dict(flat) for flat in flats])
    offset = 0
    for flat, layout in zip(flats, layouts, strict=True):
        assert same(unpack_sample(buffer, layout, offset), flat)
        offset += layout.nbytes


@given(tensor_samples)
def test_an_accelerator_s_path_gives_the_same_bytes(flat: TensorSample) -> None:
    tensors = {key: value for key, value in sorted(flat.items()) if value is not None}
    out = torch.full((sample_layout(flat).nbytes,), 7, dtype=torch.uint8)
    fields = FieldsOfDevice(out.device)
    fields.add([*tensors], tensors)
    assert fields.nbytes == out.numel()
    fields.write(out)
    assert torch.equal(out, pack_samples([flat]))


@pytest.mark.parametrize("name", ODD)
def test_an_accelerator_s_path_takes_odd_memory(name: str) -> None:
    out = torch.empty(sample_layout({"x": ODD[name]}).nbytes, dtype=torch.uint8)
    fields = FieldsOfDevice(out.device)
    fields.add(["x"], {"x": ODD[name]})
    fields.write(out)
    assert torch.equal(out, pack_samples([{"x": ODD[name]}]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@given(tensor_samples)
@settings(max_examples=20, deadline=None)
def test_cuda_samples_are_packed_on_the_device(flat: TensorSample) -> None:
    moved = {key: value if value is None else value.cuda() for key, value in flat.items()}
    buffer = pack_samples([moved])
    assert torch.equal(buffer.cpu(), pack_samples([flat]))
    back = unpack_sample(buffer, sample_layout(moved))
    assert same({k: v if v is None else v.cpu() for k, v in back.items()}, flat)


def test_the_order_of_keys_does_not_change_the_bytes() -> None:
    one: TensorSample = {"b": torch.ones(3), "a": torch.zeros(2), "n": None}
    two: TensorSample = {"n": None, "a": torch.zeros(2), "b": torch.ones(3)}
    assert sample_layout(one) == sample_layout(two)
    assert torch.equal(pack_samples([one]), pack_samples([two]))


def test_fields_are_sorted_aligned_and_padded_with_zeros() -> None:
    flat: TensorSample = {
        "mask": torch.tensor([True, True, True]),
        "ids": torch.tensor([1, 2], dtype=torch.int32),
        "x": torch.tensor(-1, dtype=torch.int16),
    }
    layout = sample_layout(flat)
    assert layout.schema.keys == ("ids", "mask", "x")
    assert layout.offsets == (0, 8, 16)
    assert layout.shapes == ((2,), (3,), ())
    assert layout.dims == (2, 3)
    assert layout.nbytes == 24
    out = torch.full((24,), 9, dtype=torch.uint8)
    assert pack_samples([flat], out=out) is out
    assert out.tolist() == [1, 0, 0, 0, 2, 0, 0, 0, 1, 1, 1, *[0] * 5, 255, 255, *[0] * 6]


def test_unpacked_tensors_are_views_of_the_buffer() -> None:
    flat: TensorSample = {"a": torch.zeros(4), "b": torch.zeros(2, 2, dtype=torch.int64)}
    buffer = pack_samples([flat])
    back = unpack_sample(buffer, sample_layout(flat))
    for tensor in back.values():
        assert isinstance(tensor, Tensor)
        assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    buffer.fill_(255)
    assert back["b"] is not None
    assert back["b"].tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize("shift", range(9))
def test_a_sample_may_start_anywhere(shift: int, behind: int) -> None:
    flat: TensorSample = {
        "a": torch.arange(3.0, dtype=torch.float64),
        "b": torch.tensor(7),
        "c": torch.tensor([True, False, True]),
    }
    layout = sample_layout(flat)
    packed = pack_samples([flat])
    before, after = torch.zeros(shift, dtype=torch.uint8), torch.zeros(behind, dtype=torch.uint8)
    buffer = torch.cat([before, packed, packed, after])
    assert same(unpack_sample(buffer, layout, shift), flat)
    assert same(unpack_sample(buffer[shift:], layout), flat)
    assert same(unpack_samples(buffer, [layout, layout], shift), [flat, flat])


def test_packing_leaves_no_trace_of_autograd() -> None:
    weight = torch.ones(3, requires_grad=True)
    flat: TensorSample = {"x": weight * 2, "t": (weight * torch.ones(2, 3)).t()}
    out = torch.empty(sample_layout(flat).nbytes, dtype=torch.uint8)
    assert not pack_samples([flat], out=out).requires_grad
    assert not any(v.requires_grad for v in round_trip(flat).values() if v is not None)


def test_a_buffer_may_be_a_slice_of_a_larger_one() -> None:
    flat: TensorSample = {"x": torch.arange(4)}
    pool = torch.zeros(96, dtype=torch.uint8)
    pack_samples([flat], out=pool[32:64])
    assert not pool[:32].any()
    assert not pool[64:].any()
    assert same(unpack_sample(pool, sample_layout(flat), 32), flat)


def test_nothing_packs_to_nothing() -> None:
    assert pack_samples([]).numel() == 0
    assert pack_samples([{}, {"a": None}]).numel() == 0
    assert unpack_sample(torch.empty(0, dtype=torch.uint8), sample_layout({"a": None})) == {
        "a": None
    }


class Subclass(Tensor):
    pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of these kinds are beta or deprecated
    CSR = torch.eye(2).to_sparse_csr()
    QUANTIZED = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    JAGGED = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.eye(2).to_sparse(), "field 'x' is a sparse tensor of layout torch.sparse_coo"),
        (CSR, "sparse tensor of layout torch.sparse_csr"),
        (torch.zeros(2, dtype=torch.complex128), "dtype torch.complex128; send torch.view_as"),
        (QUANTIZED, "unsupported dtype torch.qint8; send tensor.int_repr"),
        (NESTED, "field 'x' is a nested tensor"),
        (JAGGED, "field 'x' is a NestedTensor"),
        (torch.nn.Parameter(torch.zeros(2)), "'x' is a Parameter, which would come back as"),
        (torch.zeros(2).as_subclass(Subclass), "field 'x' is a Subclass"),
        (torch.zeros(1).reshape([1] * 65), "65 dimensions; at most 64"),
        (3, "field 'x' is a int, not a tensor or None; .* fold_values"),
        ([torch.zeros(1)], "field 'x' is a list"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_layout({"x": value})
    with pytest.raises(ValueError, match=message):
        pack_samples([{"x": value}])


@pytest.mark.parametrize("refuse", [sample_layout, lambda flat: pack_samples([flat])])
@pytest.mark.parametrize("key", ["\ud800", "k" * 5000, 3])
def test_keys_that_cannot_be_encoded_are_refused(key: Any, refuse: Callable[..., object]) -> None:
    for value in (torch.zeros(1), None):
        with pytest.raises(ValueError, match=r"lone surrogate|at most 4096 fit|keys must be str"):
            refuse({"x": torch.zeros(1), key: value})


@pytest.mark.parametrize("refuse", [sample_layout, lambda flat: pack_samples([flat])])
def test_a_sample_that_is_too_large_is_refused(refuse: Callable[..., object]) -> None:
    byte = torch.zeros(1, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"field 'x' of shape .* exceeds 4611686018427387903 b"):
        refuse({"x": torch.empty(0, 2**62)})
    with pytest.raises(ValueError, match=r"field 'x' of shape .* exceeds 4611686018427387903 b"):
        refuse({"x": byte.expand(2**62)})
    with pytest.raises(ValueError, match="sample exceeds 4611686018427387903 bytes at field 'y'"):
        refuse({"x": byte.expand(2**61), "y": byte.expand(2**61)})
    with pytest.raises(ValueError, match="sample has more than 4096 keys"):
        refuse({f"{number:04}": byte for number in range(4097)})


def test_a_layout_of_another_sample_is_refused() -> None:
    layout = sample_layout({"x": torch.zeros(3), "n": None})
    cases: list[tuple[Any, str]] = [
        (
            {"x": torch.zeros(4), "n": None},
            r"sample 0, field 'x' is a Tensor of torch.float32 \[4\]",
        ),
        ({"x": torch.zeros(3).int(), "n": None}, "torch.int32"),
        ({"x": None, "n": None}, "field 'x' is NoneType"),
        ({"n": None}, "field 'x' is NoneType"),
        ({"x": torch.zeros(3)}, "sample 0 has other keys than its layout"),
        ({"x": torch.zeros(3), "n": torch.zeros(1)}, "sample 0 has other keys"),
        ({"x": torch.zeros(3), "n": None, "y": None}, "sample 0 has other keys"),
        ({"x": torch.zeros(3), "m": None}, "sample 0 has other keys"),
        ({"x": torch.zeros(3), "y": torch.zeros(3)}, "sample 0 has other keys"),
        ({"x": torch.zeros(3).to_sparse(), "n": None}, "field 'x' is a sparse tensor"),
        ({"x": torch.zeros(0), "n": None}, r"torch.float32 \[0\]"),
    ]
    for flat, message in cases:
        with pytest.raises(ValueError, match=message):
            pack_samples([flat], layouts=[layout])
    with pytest.raises(ValueError, match="1 layouts for 2 samples; give one for each"):
        pack_samples([{}, {}], layouts=[layout])


def test_a_layout_is_compared_with_its_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flat: TensorSample = {str(i): torch.empty(0) for i in range(50)}
    compared: list[int] = []

    def compare(index: int, *_: object) -> None:
        compared.append(index)

    monkeypatch.setattr("evenstep.serialize.packing_host.check_layout", compare)
    pack_samples([flat, flat], layouts=[sample_layout(flat)] * 2)
    assert compared == [0, 1]


class Forgetful(dict[str, Tensor]):
    """Names a field that it does not have."""

    def __iter__(self) -> Iterator[str]:
        return iter([*super().__iter__(), "gone"])

    def keys(self) -> Any:
        return [*self]


def test_a_field_that_is_named_and_missing_is_not_left_out() -> None:
    with pytest.raises(KeyError, match="gone"):
        pack_samples([Forgetful(x=torch.zeros(3))])


def test_an_offset_may_be_a_number_of_few_bits() -> None:
    buffer = torch.arange(32, dtype=torch.uint8)
    layout = sample_layout({"x": torch.zeros(2)})
    assert same(
        unpack_sample(buffer, layout, torch.tensor(8, dtype=torch.int8)),  # type: ignore[arg-type]
        {"x": buffer[8:16].view(torch.float32)},
    )


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    flat: TensorSample = {"x": torch.zeros(4)}
    pool = torch.zeros(64, dtype=torch.uint8)
    cases: list[tuple[Tensor, str]] = [
        (pool, "out has 64 bytes, the samples take 16"),
        (pool[:32:2], "must be a contiguous 1-D uint8 tensor"),
        (torch.zeros(4), "out is a Tensor of torch.float32"),
        (pool[:16].view(4, 4), "must be a contiguous 1-D uint8 tensor"),
        (pool[4:20], "not a multiple of 8"),
        (pool[:16].to_sparse(), "must be a contiguous 1-D uint8 tensor"),
        (pool[:16].to("meta"), "field 'x' is on cpu, the buffer is on meta"),
    ]  # fmt: skip
    for out, message in cases:
        with pytest.raises(ValueError, match=message):
            pack_samples([flat], out=out)


def test_tensors_on_two_devices_are_refused() -> None:
    flat: TensorSample = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}
    with pytest.raises(ValueError, match="field 'b' is on the meta device and has no data"):
        pack_samples([flat])


def test_tensors_without_data_have_a_layout_and_no_bytes() -> None:
    flat: TensorSample = {"b": torch.zeros(2, device="meta")}
    assert sample_layout(flat) is sample_layout({"b": torch.zeros(2)})
    with pytest.raises(ValueError, match="field 'b' is on the meta device and has no data"):
        pack_samples([flat])


def test_a_buffer_that_is_too_short_is_refused() -> None:
    layout = sample_layout({"x": torch.zeros(4)})
    buffer = torch.zeros(24, dtype=torch.uint8)
    with pytest.raises(DecodeError, match="ends before the 16 bytes at byte 9 do"):
        unpack_sample(buffer, layout, 9)
    with pytest.raises(ValueError, match="offset is -8; it must be >= 0"):
        unpack_sample(buffer, layout, -8)
    with pytest.raises(ValueError, match="must be a contiguous 1-D uint8 tensor"):
        unpack_sample(torch.zeros(24), layout)
    with pytest.raises(DecodeError, match="ends before the 32 bytes"):
        unpack_samples(buffer, [layout, layout])


def test_layouts_are_compiled_once() -> None:
    flat: TensorSample = {"x": torch.zeros(4), "y": None}
    assert sample_layout(flat) is sample_layout({"x": torch.ones(4), "y": None})
    assert sample_layout(flat).schema is sample_layout({"x": torch.ones(5), "y": None}).schema


def test_a_schema_lays_out_sizes() -> None:
    schema = SampleSchema((FieldSpec("a", torch.int16, 2), FieldSpec("b", torch.bool, 0)))
    layout = schema.layout((3, 2))
    assert (layout.shapes, layout.offsets, layout.nbytes) == (((3, 2), ()), (0, 16), 24)
    with pytest.raises(ValueError, match="3 sizes given for a schema of 2"):
        schema.layout((1, 2, 3))
    with pytest.raises(ValueError, match="has the size -1; sizes are ints >= 0"):
        schema.layout((-1, 2))
    schema.layout((1, 2))  # what is kept of these sizes must not let equal ones of no int pass
    with pytest.raises(ValueError, match=r"has the size 1\.0"):
        schema.layout((1.0, 2))  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ValueError, match="exceeds 4611686018427387903 bytes"):
        schema.layout((2**61, 2))
    with pytest.raises(ValueError, match="exceeds"):
        schema.layout((2**62, 0))
