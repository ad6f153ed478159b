"""Many samples in one buffer behind a manifest."""

import copy
import pickle
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep.serialize import (
    DecodeError,
    FieldSpec,
    Manifest,
    NestedSample,
    PackedSamples,
    SampleSchema,
    pack,
)
from tests.serialize.samples import nested_samples, same


def received(packed: PackedSamples) -> PackedSamples:
    """Return what a peer makes of the manifest's bytes and the buffer's."""
    buffer = packed.buffer.clone()
    return PackedSamples(
        Manifest.decode(packed.manifest.encode(), max_nbytes=buffer.numel()), buffer
    )


@given(st.lists(nested_samples, max_size=4))
def test_samples_come_back_as_they_were(samples: list[NestedSample]) -> None:
    packed = received(pack(samples))
    assert len(packed) == len(samples)
    assert same([sample.nested() for sample in packed], samples)


def test_a_copy_of_packed_samples_has_bytes_of_its_own() -> None:
    samples = pack([{"a": torch.zeros(3), "b": torch.ones(2, dtype=torch.int64)}])
    assert samples[0]["a"] is not None  # views have been made
    for other in (copy.deepcopy(samples), pickle.loads(pickle.dumps(samples))):
        view = other[0]["a"]
        assert view is not None
        view.fill_(7.0)
        assert same(dict(samples[0]), {"a": torch.zeros(3), "b": torch.ones(2).long()})
        assert same(dict(other[0]), {"a": torch.full((3,), 7.0), "b": torch.ones(2).long()})


def test_the_manifest_writes_the_schema_once_and_sizes_as_small_integers() -> None:
    one: list[NestedSample] = [{"input_ids": torch.zeros(1, 100), "mask": None}]
    many = one * 1000
    per_sample = (len(pack(many).manifest.encode()) - len(pack(one).manifest.encode())) / 999
    assert per_sample < 3.01  # the schema's number, 1 and 100


def test_golden_manifest() -> None:
    packed = pack([{"x": torch.zeros(2, 300)}, {"x": torch.zeros(0, 1)}, {}])
    content = bytes.fromhex(
        "01"  # version
        "02"  # schemas
        "06  01 01 78 08 02 00"  # 6 bytes: one field "x", float32 of 2 dimensions; no None keys
        "02  00 00"  # 2 bytes: no fields, no None keys
        "03"  # samples
        "00 02 ac02"  # schema 0, 2 x 300
        "00 00 01"  # schema 0, 0 x 1
        "01"  # schema 1
    )
    assert packed.manifest.encode() == content + zlib.crc32(content).to_bytes(4, "little")
    assert packed.manifest.offsets == (0, 2400, 2400, 2400)


def test_fields_are_made_when_asked_for() -> None:
    packed = pack([{"v": {"h": torch.arange(3)}, "n": None, "s": "x"}, {"y": torch.zeros(1)}])
    sample = packed[0]
    tensor = sample["v.h"]
    assert isinstance(tensor, Tensor)
    assert tensor.untyped_storage().data_ptr() == packed.buffer.untyped_storage().data_ptr()
    assert list(sample) == ["\\values", "v.h", "n"]
    assert len(sample) == 3
    assert sample["n"] is None
    assert "y" not in sample
    assert "y" in packed[-1]
    assert sample.layout is packed.manifest.layouts[0]
    with pytest.raises(KeyError, match="absent"):
        sample["absent"]
    with pytest.raises(IndexError, match="sample 2 of 2"):
        packed[2]
    assert [list(s) for s in packed[1:]] == [["y"]]


def test_fields_merge_straight_from_the_buffer() -> None:
    packed = pack([{"x": torch.full((i, 2), i), "n": None} for i in range(4)])
    assert packed.merge("x").tolist() == [[1, 1], [2, 2], [2, 2], [3, 3], [3, 3], [3, 3]]
    assert packed.merge("x", [3, 1]).tolist() == [[3, 3]] * 3 + [[1, 1]]
    assert packed.merge("x", [1, 1], dim=1).tolist() == [[1, 1, 1, 1]]


def test_fields_that_do_not_merge_are_refused() -> None:
    packed = pack(
        [
            {"x": torch.zeros(1, 2)},
            {"x": torch.zeros(1, 3)},
            {"x": torch.zeros(1).int()},
            {"x": None},
        ]
    )
    with pytest.raises(ValueError, match="field 'x' does not merge along dimension 0"):
        packed.merge("x", [0, 1])
    with pytest.raises(ValueError, match="field 'x' does not merge along dimension 5"):
        packed.merge("x", [0], dim=5)
    with pytest.raises(ValueError, match=r"'x' is torch.int32 in sample 2, torch.float32 before"):
        packed.merge("x", [0, 2])
    with pytest.raises(ValueError, match="sample 3 has no tensor 'x'"):
        packed.merge("x", [3])
    with pytest.raises(ValueError, match="no samples to merge 'x' of"):
        packed.merge("x", [])


def test_samples_go_to_the_buffer_that_is_given() -> None:
    out = torch.zeros(100, dtype=torch.uint8)
    packed = pack([{"x": torch.arange(4)}], out=out)
    assert packed.buffer.data_ptr() == out.data_ptr()
    assert packed.buffer.numel() == 32
    with pytest.raises(ValueError, match="out has 16 bytes, the samples take 32"):
        pack([{"x": torch.arange(4)}], out=out[:16])
    with pytest.raises(ValueError, match="must be a contiguous 1-D uint8 tensor"):
        pack([{"x": torch.arange(4)}], out=torch.zeros(4, 4))


def test_a_buffer_of_another_size_is_refused() -> None:
    packed = pack([{"x": torch.arange(4)}])
    with pytest.raises(DecodeError, match="buffer has 24 bytes, its manifest 32"):
        PackedSamples(packed.manifest, packed.buffer[:24])
    with pytest.raises(DecodeError, match="sample 0 exceeds the 24 bytes allowed"):
        Manifest.decode(packed.manifest.encode(), max_nbytes=24)


def test_few_bytes_cannot_declare_many_fields() -> None:
    """A scalar costs the manifest nothing per sample, so its bytes in the buffer are counted."""
    fields = (
        FieldSpec("\0", torch.uint8, 1),
        *(FieldSpec(f"{i:04}", torch.int64, 0) for i in range(4000)),
    )
    layouts = [SampleSchema(fields).layout((i,)) for i in range(3)]
    data = Manifest(tuple(layouts)).encode()
    with pytest.raises(DecodeError, match="sample 1 exceeds the 40000 bytes allowed"):
        Manifest.decode(data, max_nbytes=40000)
