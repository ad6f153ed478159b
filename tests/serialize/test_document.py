"""Self-describing bytes."""

import array
import enum
import mmap
import zlib
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from evenstep.serialize import DecodeError, NestedSample, document, dumps, loads
from evenstep.serialize.checksum import payload_checksum
from tests.serialize.samples import SUPPORTED, filled, nested_samples, odd_tensors, same

ODD = dict(odd_tensors())

# Every kind of value, in the order of the bytes.
GOLDEN_SAMPLE: NestedSample = {
    "b": False,
    "by": b"\x00\xff",
    "d": {"": {}, "é": None},
    "f": -0.0,
    "i": -129,
    "l": [True, 0, 128],
    "s": "hé",
    "t": torch.tensor([[1, -2, 3]], dtype=torch.int16),
    "u": (torch.tensor(1.5), torch.empty(0, 2, dtype=torch.uint8)),
}
GOLDEN_BYTES = bytes.fromhex(
    "6576656e73746570"  # "evenstep"
    "01000000"  # version 1
    "4e000000"  # 78 bytes of tree
    "1000000000000000"  # 16 bytes of payload
    "56bcbd98"  # checksum of the payload
    "1c1477f6"  # checksum of head and tree
    "09 09"  # a dict of nine
    "01 62  01"  # "b": False
    "02 6279  06 02 00ff"  # "by": two bytes
    "01 64  09 02"  # "d": a dict of two
    "  00  09 00"  # "": an empty dict
    "  02 c3a9  00"  # "é": None
    "01 66  04 0000000000000080"  # "f": -0.0
    "01 69  03 02 7fff"  # "i": -129 in two bytes
    "01 6c  07 03  02  03 01 00  03 02 8000"  # "l": True, 0, 128
    "01 73  05 03 68c3a9"  # "s": "hé"
    "01 74  0a 03 02 01 03"  # "t": int16 of 2 dimensions, 1 x 3
    "01 75  08 02"  # "u": a tuple of two
    "  0a 08 00"  # float32 of 0 dimensions
    "  0a 01 02 00 02"  # uint8 of 2 dimensions, 0 x 2
    "0000"  # padding of the tree to 80 bytes
    "0100 feff 0300 0000"  # t, padded to 8 bytes
    "0000c03f 00000000"  # 1.5, padded
)


def test_golden_bytes() -> None:
    assert dumps(GOLDEN_SAMPLE) == GOLDEN_BYTES
    assert same(loads(GOLDEN_BYTES), GOLDEN_SAMPLE)


def test_golden_bytes_of_the_empty_sample() -> None:
    data = bytes.fromhex("6576656e73746570 01000000 02000000 0000000000000000 00000000 b516598e")
    assert dumps({}) == data + bytes.fromhex("0900 000000000000")


def test_golden_checksum_of_rows() -> None:
    payload = torch.arange(130, dtype=torch.int64).view(torch.uint8)
    rows = bytes.fromhex("e007000000000000 e017000000000000")  # 0 + ... + 63 and 64 + ... + 127
    rest = bytes.fromhex("8000000000000000 8100000000000000")
    assert payload_checksum(payload) == zlib.crc32(rows + rest)


@given(nested_samples)
@settings(deadline=None)
def test_every_sample_comes_back_and_has_one_form(sample: NestedSample) -> None:
    data = dumps(sample)
    assert len(data) % 8 == 0
    back = loads(data)
    assert same(back, sample)
    assert dumps(back) == data
    assert dumps(dict(reversed(sample.items()))) == data


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    sample: NestedSample = {"x": filled(dtype, 300, 5), "y": [filled(dtype), filled(dtype, 0)]}
    assert same(loads(dumps(sample)), sample)


@pytest.mark.parametrize("name", ODD)
def test_odd_memory_comes_back(name: str) -> None:
    assert same(loads(dumps({"x": ODD[name]})), {"x": ODD[name]})


def test_numbers_of_any_size_and_kind_stay_themselves() -> None:
    sample: NestedSample = {
        "ints": [0, 1, -1, 127, 128, -128, -129, 2**63, -(2**63), 10**1000, -(10**1000)],
        "bools": [True, False],
        "floats": [0.0, -0.0, float("inf"), float("-inf"), 5e-324, 1 / 3],
        "nan": torch.tensor([0x7FF8000000000001, 0x7FF0000000000001]).view(torch.float64).tolist(),
        "text": ["", "\x00", "\U0001f600", "\ufeff"],
    }
    assert same(loads(dumps(sample)), sample)


def test_shared_storage_is_not_preserved_and_the_input_is_not_kept() -> None:
    base = torch.zeros(4)
    sample: NestedSample = {"a": base, "b": base[1:]}
    data = dumps(sample)
    base.fill_(1)
    back = loads(bytearray(data))
    assert isinstance(back["a"], Tensor)
    assert isinstance(back["b"], Tensor)
    back["a"].fill_(2)
    assert back["b"].tolist() == [0, 0, 0]


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - any subclass of tuple will do
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
BYTE = torch.zeros(1, dtype=torch.int8)
DEEP: Any = 1
for _ in range(64):
    DEEP = [DEEP]
WIDE: Any = 1
for _ in range(21):
    WIDE = [WIDE, WIDE]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"a": {"b": [1, Colour.RED]}}, r"field 'a\.b\[1\]' is a .*Colour, which"),
        ({"a": Text("x")}, r"field 'a' is a .*Text, which would not come back"),
        ({"a": Pair(1, 2)}, r"field 'a' is a .*Pair"),
        ({"a": OrderedDict()}, "field 'a' is a collections.OrderedDict"),
        ({"a": {1, 2}}, "field 'a' is a builtins.set"),
        ({"a": 1j}, "field 'a' is a builtins.complex"),
        ({"a": bytearray(b"x")}, "field 'a' is a builtins.bytearray"),
        ({"a": array.array("i", [1])}, "field 'a' is a array.array"),
        ({"a": torch.float32}, "field 'a' is a torch.dtype"),
        ({"a": torch.nn.Parameter(torch.zeros(1))}, "field 'a' is a Parameter, which would come"),
        ({"a": [torch.eye(2).to_sparse()]}, r"field 'a\[0\]' is a sparse tensor"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, "field 'a' has .* dtype torch.complex128"),
        ({"a": torch.zeros([1] * 65)}, "field 'a' has 65 dimensions; at most 64"),
        ({"a": torch.zeros(1, device="meta")}, "field 'a' is on the meta device and has no data"),
        ({"a": "\ud800"}, "field 'a' has a lone surrogate"),
        ({"a": {"\ud800": 1}}, "key '.ud800' of 'a' has a lone surrogate"),
        ({"a": {1: 2}}, "key 1 of 'a' is of type int; keys must be str"),
        ({Text("a"): 2}, "key 'a' is of type Text; keys must be str"),
        ({"k" * 5000: 2}, "has 5000 bytes, at most 4096 fit"),
        ({"a": CYCLE}, r"field 'a\[0\]\[0\]'... is nested deeper than 64, or in itself"),
        ({"a": DEEP}, "is nested deeper than 64"),
        ({"a": [torch.empty(0, 2**62)]}, r"field 'a\[0\]' of shape .* exceeds 4611686018427387903"),
        ({"a": BYTE.expand(2**62)}, "field 'a' of shape .* exceeds 4611686018427387903 bytes"),
        ({"a": torch.zeros(1).expand(2**61 + 1)}, "field 'a' of shape .* exceeds 461168601842738"),
        ({"a": [BYTE.expand(2**61)] * 2}, r"sample exceeds 4611686018427387903 bytes at 'a\[1\]'"),
        ({"a": WIDE}, "sample has over 1048576 values; put numbers into tensors"),
        (OrderedDict(a=1), "sample is a OrderedDict; it must be a dict"),
        ([1], "sample is a list; it must be a dict"),
    ],
)  # fmt: skip
def test_what_would_not_come_back_is_refused_by_name(sample: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dumps(sample)


def test_numpy_scalars_and_arrays_are_refused_by_name() -> None:
    numpy = pytest.importorskip("numpy")
    for value in (
        numpy.float64(1),
        numpy.int64(1),
        numpy.bool_(True),
        numpy.str_("x"),
        numpy.zeros(2),
    ):
        with pytest.raises(ValueError, match=r"field 'a' is a numpy.*, which would not come back"):
            dumps({"a": value})


def test_the_deepest_sample_comes_back() -> None:
    sample: Any = 1
    for _ in range(63):
        sample = [sample]
    assert loads(dumps({"a": sample})) == {"a": sample}


def test_loads_takes_any_contiguous_buffer_without_a_copy(tmp_path: Path) -> None:
    sample: NestedSample = {"x": torch.arange(5)}
    data = dumps(sample)
    path = tmp_path / "sample"
    path.write_bytes(data)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    writable = bytearray(data)
    buffers: list[Any] = [
        data,
        writable,
        memoryview(data),
        memoryview(b"abcdefgh" + data)[8:],
        array.array("Q", data),
        mapped,
        torch.frombuffer(bytearray(data), dtype=torch.uint8),
    ]
    for buffer in buffers:
        assert same(loads(buffer), sample)
    tensor = loads(writable)["x"]
    assert isinstance(tensor, Tensor)
    tensor[0] = 7
    assert loads(writable, verify=False)["x"].tolist() == [7, 1, 2, 3, 4]  # type: ignore[union-attr]  # a tensor


@pytest.mark.parametrize("shift", range(1, 8))
def test_a_buffer_at_any_address_is_read(shift: int) -> None:
    sample: NestedSample = {"x": torch.arange(5), "y": "text", "z": torch.tensor(1.5)}
    shifted = memoryview(bytes(shift) + dumps(sample))[shift:]
    assert same(loads(shifted), sample)


def test_read_only_buffers_give_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    loads(dumps({"x": torch.zeros(3)}))
    assert not recwarn.list


def test_buffers_of_the_wrong_kind_are_refused() -> None:
    data = dumps({"x": torch.zeros(4)})
    with pytest.raises(ValueError, match="buffer is not contiguous; copy it with bytes"):
        loads(memoryview(data)[::2])
    with pytest.raises(ValueError, match="must be a contiguous 1-D uint8 tensor"):
        loads(torch.zeros(8))
    with pytest.raises(TypeError, match="bytes-like"):
        loads("text")  # type: ignore[arg-type]  # what is tested


def test_verify_decides_whether_damaged_tensors_are_noticed() -> None:
    data = bytearray(dumps({"x": torch.arange(2000)}))
    data[-1] ^= 64
    with pytest.raises(DecodeError, match="payload does not match its checksum"):
        loads(data)
    assert isinstance(loads(data, verify=False)["x"], Tensor)


@pytest.mark.parametrize(
    "sample",
    [{}, GOLDEN_SAMPLE, {"odd": torch.arange(99, dtype=torch.uint8), "z": torch.ones(3)}],
    ids=["empty", "golden", "padded"],
)
def test_dumps_sets_every_byte_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, sample: NestedSample
) -> None:
    monkeypatch.setattr(document, "_bytes_to_fill", lambda _, nbytes: bytes(nbytes))
    expected = dumps(sample)
    monkeypatch.setattr(document, "_bytes_to_fill", lambda _, nbytes: b"\xff" * nbytes)

    assert dumps(sample) == expected
