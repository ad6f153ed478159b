"""The five functions of the reorder buffer's contract."""

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from evenstep.serialize import (
    DecodeError,
    FlatSample,
    TensorSample,
    deserialize_sample,
    flatten_nested,
    sample_byte_size,
    sample_keys,
    serialize_sample,
    tensor_metadata,
)
from tests.serialize.samples import filled, nested_samples, same, tensor_samples

FLAT: FlatSample = {
    "vision.hidden_states": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "ids": torch.tensor([[1, 2, 3]]),
    "mask": torch.tensor([True, False, True]),
    "position_ids": None,
    "path": "a.png",
    "sizes": [1, (2, 3)],
}


def test_metadata_says_shape_dtype_and_values() -> None:
    meta = tensor_metadata(FLAT)
    assert meta == {
        "vision.hidden_states": {"shape": (2, 3), "dtype": "torch.bfloat16"},
        "ids": {"shape": (1, 3), "dtype": "torch.int64"},
        "mask": {"shape": (3,), "dtype": "torch.bool"},
        "position_ids": None,
        "path": {"non_tensor": "a.png"},
        "sizes": {"non_tensor": [1, (2, 3)]},
    }
    assert list(meta) == list(FLAT)
    assert sample_keys(meta) == ["ids", "mask", "vision.hidden_states"]


def test_the_buffer_is_aligned_and_in_key_order() -> None:
    meta = tensor_metadata(FLAT)
    keys = sample_keys(meta)
    buffer = serialize_sample(FLAT, keys)
    assert buffer.dtype is torch.uint8
    assert buffer.shape == (48,)
    assert sample_byte_size(meta, keys) == 48
    assert buffer[:24].view(torch.int64).tolist() == [1, 2, 3]
    assert buffer[24:32].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert buffer[32:44].view(torch.bfloat16).tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer[44:].tolist() == [0, 0, 0, 0]


def test_a_sample_comes_back_with_the_offset_behind_it() -> None:
    meta = tensor_metadata(FLAT)
    keys = sample_keys(meta)
    one = serialize_sample(FLAT, keys)
    buffer = torch.cat([one, one])
    first, offset = deserialize_sample(buffer, 0, meta, keys)
    second, end = deserialize_sample(buffer, offset, meta, keys)
    assert (offset, end) == (48, 96)
    assert same(first, FLAT)
    assert same(second, FLAT)
    assert list(first) == list(FLAT)
    third, end = deserialize_sample(
        torch.cat([torch.zeros(3, dtype=torch.uint8), one]), 3, meta, keys
    )
    assert end == 51
    assert same(third, FLAT)


@given(tensor_samples)
def test_every_tensor_sample_round_trips(flat: TensorSample) -> None:
    meta = tensor_metadata(dict(flat))
    keys = sample_keys(meta)
    buffer = serialize_sample(dict(flat), keys)
    assert buffer.numel() == sample_byte_size(meta, keys)
    assert same(deserialize_sample(buffer, 0, meta, keys), (flat, buffer.numel()))


@given(nested_samples)
def test_plain_values_travel_in_the_metadata(nested: Any) -> None:
    flat = flatten_nested(nested)
    meta = tensor_metadata(flat)
    keys = sample_keys(meta)
    assert same(deserialize_sample(serialize_sample(flat, keys), 0, meta, keys)[0], flat)


def test_none_is_skipped_and_keys_keep_their_order() -> None:
    flat: FlatSample = {"a": torch.tensor([1]), "b": None, "c": torch.tensor([2])}
    assert serialize_sample(flat, ["c", "b", "a"]).view(torch.int64).tolist() == [2, 1]
    meta = tensor_metadata(flat)
    back, end = deserialize_sample(serialize_sample(flat, ["c", "a"]), 0, meta, ["c", "a"])
    assert same(back, flat)
    assert end == 16


def test_lists_as_shapes_and_short_dtype_names_are_understood() -> None:
    meta: Any = {"x": {"shape": [2, 2], "dtype": "int16"}}
    assert sample_byte_size(meta, ["x"]) == 8


def test_tensors_are_views_of_the_buffer() -> None:
    flat: FlatSample = {"x": filled(torch.float32, 4)}
    meta = tensor_metadata(flat)
    buffer = serialize_sample(flat, ["x"])
    tensor = deserialize_sample(buffer, 0, meta, ["x"])[0]["x"]
    assert isinstance(tensor, Tensor)
    assert tensor.data_ptr() == buffer.data_ptr()


def test_unsupported_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"field 'x' has the unsupported dtype torch\.complex128"):
        tensor_metadata({"x": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(ValueError, match="field 'x' is a sparse tensor"):
        serialize_sample({"x": torch.eye(2).to_sparse()}, ["x"])
    with pytest.raises(ValueError, match="field 's' is a str, not a tensor or None"):
        serialize_sample({"s": "text"}, ["s"])
    meta_device: FlatSample = {"a": torch.zeros(2), "x": torch.zeros(2, device="meta")}
    for keys in (["x"], ["a", "x"], ["x", "a"]):
        with pytest.raises(ValueError, match="field 'x' is on the meta device and has no data"):
            serialize_sample(meta_device, keys)
    with pytest.raises(ValueError, match=r"keys \['y'\] are not in the sample"):
        serialize_sample({"x": torch.zeros(2)}, ["x", "y"])


def test_a_short_buffer_and_broken_metadata_are_refused() -> None:
    flat: FlatSample = {"x": torch.zeros(4)}
    meta = tensor_metadata(flat)
    buffer = serialize_sample(flat, ["x"])
    with pytest.raises(DecodeError, match="buffer of 8 bytes ends before the 16 bytes at byte 0"):
        deserialize_sample(buffer[:8], 0, meta, ["x"])
    with pytest.raises(DecodeError, match="ends before the 16 bytes at byte 8"):
        deserialize_sample(buffer, 8, meta, ["x"])
    broken: list[tuple[Any, str]] = [
        ({}, r"key 'x' is not in the metadata, which has \[\]; take keys from sample_keys"),
        (None, "meta is a NoneType; it must be a dict of key and entry, from tensor_metadata"),
        ([("x", None)], "meta is a list; it must be a dict"),
        ({"x": 3}, "metadata of key 'x' is 3; it must be a dict of shape and dtype"),
        ({"x": {"non_tensor": 3}}, "it must be a dict of shape and dtype"),
        ({"x": {"shape": (2,), "dtype": "float33"}}, "dtype 'float33' is not supported"),
        ({"x": {"shape": (2,), "dtype": "complex128"}}, "dtype 'complex128' is not supported"),
        ({"x": {"shape": (-2,), "dtype": "int8"}}, "has the size -2"),
        ({"x": {"shape": (2**62, 2), "dtype": "int8"}}, "exceeds"),
        ({"x": {"shape": [1] * 65, "dtype": "int8"}}, "has 65 dimensions; at most 64"),
    ]
    for bad, message in broken:
        with pytest.raises(ValueError, match=message):
            sample_byte_size(bad, ["x"])
        with pytest.raises(ValueError, match=message):
            deserialize_sample(buffer, 0, bad, ["x"])
    with pytest.raises(ValueError, match="meta is a NoneType; it must be a dict"):
        sample_keys(None)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match="metadata of key 'y' is 3; it must be a dict"):
        deserialize_sample(buffer, 0, {**meta, "y": 3}, ["x"])  # type: ignore[dict-item]  # likewise
