"""The way back from a tree of tagged bytes and a payload to nested values."""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from evenstep.serialize.dtypes import ALIGNMENT
from evenstep.serialize.errors import DecodeError
from evenstep.serialize.limits import MAX_DEPTH, MAX_KEY_BYTES, MAX_NBYTES, MAX_TENSORS, MAX_VALUES
from evenstep.serialize.nested import Leaf, NestedSample
from evenstep.serialize.placement import PlacedField, place_fields
from evenstep.serialize.schema import read_dtype, read_ndim
from evenstep.serialize.tree_writer import DICT, FLOAT64, int_nbytes
from evenstep.serialize.unpacking import FieldViews
from evenstep.serialize.wire import Reader


class TreeReader:
    """Decodes one sample; tensors become views of the payload.

    Args:
        tree: The tree.
        payload: Its bytes at an aligned address, on the CPU, from :func:`sample_region`.
    """

    __slots__ = ("_end", "_num_tensors", "_num_values", "_payload", "_reader", "_size", "_views")

    def __init__(self, tree: bytes, payload: Tensor) -> None:
        self._reader = Reader(tree, "tree")
        self._payload = payload
        self._size = payload.numel()
        self._views = FieldViews(payload)
        self._end = 0
        self._num_values = 0
        self._num_tensors = 0

    def read_sample(self) -> NestedSample:
        """Read the whole tree, a dict.

        Raises:
            DecodeError: If tree and payload are not those of a sample.
        """
        tag = self._reader.byte()
        if tag != DICT:
            raise self._reader.error(f"tag {tag} where the sample's dict ({DICT}) must be")
        sample = self.read_dict(1)
        self._reader.finish()
        if self._end != self._size:
            raise DecodeError(
                f"payload has {self._size} bytes, the tree's tensors take {self._end}"
            )
        return sample

    def _value(self, depth: int) -> Leaf:
        reader = self._reader
        tag = reader.byte()
        if tag >= len(_READERS):
            raise reader.error(f"unknown tag {tag}")
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise reader.error(f"more than {MAX_VALUES} values")
        return _READERS[tag](self, depth)

    def read_int(self, _depth: int) -> int:
        """Read a Python int."""
        reader = self._reader
        data = reader.take(reader.varint())
        value = int.from_bytes(data, "little", signed=True)
        if len(data) != int_nbytes(value):
            raise reader.error(f"int in {len(data)} bytes where {int_nbytes(value)} hold it")
        return value

    def read_float(self, _depth: int) -> float:
        """Read a Python float."""
        value: float = FLOAT64.unpack(self._reader.take(8))[0]
        return value

    def read_str(self, _depth: int) -> str:
        """Read a str."""
        return self._reader.text()

    def read_bytes(self, _depth: int) -> bytes:
        """Read bytes."""
        return self._reader.take(self._reader.varint())

    def read_list(self, depth: int) -> list[Leaf]:
        """Read a list."""
        count = self._open(depth, 1)
        return [self._value(depth + 1) for _ in range(count)]

    def read_tuple(self, depth: int) -> tuple[Leaf, ...]:
        """Read a tuple."""
        return tuple(self.read_list(depth))

    def read_dict(self, depth: int) -> dict[str, Leaf]:
        """Read a dict; its keys must increase."""
        reader = self._reader
        found: dict[str, Leaf] = {}
        before: str | None = None
        for _ in range(self._open(depth, 2)):
            key = reader.text(MAX_KEY_BYTES)
            if before is not None and key <= before:
                raise reader.error(f"key {key!r} follows {before!r}; keys are sorted and unique")
            found[key] = self._value(depth + 1)
            before = key
        return found

    def _open(self, depth: int, item_nbytes: int) -> int:
        """Read the count of a container at ``depth`` (1 is the sample's own dict)."""
        if depth > MAX_DEPTH:
            raise self._reader.error(f"nested deeper than {MAX_DEPTH}")
        return self._reader.count(item_nbytes, MAX_VALUES, "items")

    def read_tensor(self, _depth: int) -> Tensor:
        """Read a tensor as a view of the payload."""
        reader = self._reader
        self._num_tensors += 1
        if self._num_tensors > MAX_TENSORS:
            raise reader.error(f"more than {MAX_TENSORS} tensors")
        dtype = read_dtype(reader)
        shape = tuple([reader.varint() for _ in range(read_ndim(reader))])
        try:
            field = _place(dtype, shape)
        except ValueError:
            raise reader.error(f"tensor of shape {shape} exceeds {MAX_NBYTES} bytes") from None
        return self._views.tensor(field, self._claim(field.nbytes))

    def _claim(self, nbytes: int) -> int:
        """Return the start of the next tensor's bytes, checked with the padding behind them."""
        start = self._end
        padding = -nbytes % ALIGNMENT
        end = start + nbytes + padding
        if end > self._size:
            raise self._reader.error(
                f"tensor of {nbytes} bytes declared, {self._size - start} bytes of the payload "
                "remain"
            )
        if padding and any(ctypes.string_at(self._payload.data_ptr() + end - padding, padding)):
            raise self._reader.error(f"padding before byte {end} of the payload is not zero")
        self._end = end
        return start


@lru_cache(4096)
def _place(dtype: torch.dtype, shape: tuple[int, ...]) -> PlacedField:
    """Place a tensor at 0; shapes repeat from sample to sample."""
    (field,), _ = place_fields([("", dtype, shape)])
    return field


# By tag.
_READERS: tuple[Callable[[TreeReader, int], Leaf], ...] = (
    lambda _reader, _depth: None,
    lambda _reader, _depth: False,
    lambda _reader, _depth: True,
    TreeReader.read_int,
    TreeReader.read_float,
    TreeReader.read_str,
    TreeReader.read_bytes,
    TreeReader.read_list,
    TreeReader.read_tuple,
    TreeReader.read_dict,
    TreeReader.read_tensor,
)
