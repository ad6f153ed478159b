"""Schemas and sizes as bytes."""

from typing import Any

import pytest
import torch
from hypothesis import given

from evenstep.serialize import DecodeError, FieldSpec, SampleSchema, TensorSample, sample_layout
from tests.serialize.samples import tensor_samples


@given(tensor_samples)
def test_schema_and_sizes_come_back(flat: TensorSample) -> None:
    layout = sample_layout(flat)
    schema = SampleSchema.decode(layout.schema.encode())
    assert schema == layout.schema
    assert hash(schema) == hash(layout.schema)
    back = schema.decode_dims(layout.encode_dims())
    assert back == layout
    assert (back.offsets, back.shapes, back.nbytes) == (
        layout.offsets,
        layout.shapes,
        layout.nbytes,
    )
    assert schema.layout(layout.dims) == layout


def test_golden_schema() -> None:
    schema = SampleSchema(
        (FieldSpec("a", torch.bool, 0), FieldSpec("é.x", torch.bfloat16, 3)), ("n",)
    )
    assert schema.encode() == bytes.fromhex("02  01 61 00 00  04 c3a92e78 07 03  01  01 6e")
    assert schema.layout((1, 300, 0)).encode_dims() == bytes.fromhex("01 ac02 00")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", torch.complex128, 1), "field 'x' has dtype torch.complex128; supported are"),
        (("x", torch.int8, 65), "field 'x' has 65 dimensions; at most 64 are supported"),
        (("x", torch.int8, -1), "field 'x' has -1 dimensions"),
        (("\ud800", torch.int8, 1), "has a lone surrogate"),
        ((1, torch.int8, 1), "key 1 is of type int; keys must be str"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FieldSpec(*arguments)


def test_schemas_that_cannot_be_are_refused() -> None:
    a, b = FieldSpec("a", torch.int8, 1), FieldSpec("b", torch.int8, 1)
    cases: list[tuple[Any, Any, str]] = [
        ((b, a), (), "key 'a' follows 'b'; keys must be sorted and unique"),
        ((a, a), (), "key 'a' follows 'a'"),
        ((a,), ("z", "y"), "key 'y' follows 'z'"),
        ((a,), ("a",), "key 'a' is both a tensor and None"),
        ((), tuple(f"{i:05}" for i in range(4097)), "sample has more than 4096 keys"),
    ]
    for fields, none_keys, message in cases:
        with pytest.raises(ValueError, match=message):
            SampleSchema(fields, none_keys)


def test_sizes_that_cannot_be_are_refused() -> None:
    schema = SampleSchema((FieldSpec("a", torch.int32, 2),))
    big = "ffffffffffffffff7f"  # 2**63 - 1
    cases = [
        ("", "dims, byte 0: ends early"),
        ("01", "dims, byte 1: ends early"),
        ("01 01 01", "dims, byte 2: 1 bytes too many"),
        ("8100 01", "varint has a superfluous last byte"),
        ("ffffffffffffffffff01 01", r"varint is 2\*\*63 or more"),
        ("80" * 40, r"ends early|2\*\*63|superfluous"),
        (big + "00", "field 'a' of shape .* exceeds 4611686018427387903 bytes"),
        (big + big, "exceeds 4611686018427387903 bytes"),
    ]
    for data, message in cases:
        with pytest.raises(DecodeError, match=message):
            schema.decode_dims(bytes.fromhex(data))
