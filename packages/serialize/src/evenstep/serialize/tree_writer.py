"""Nested values as a tree of tagged bytes.

The tree holds everything but the bytes of the tensors: those lie in the payload, in the order in
which the tree names them. ``FORMAT.md`` specifies both.
"""

import struct
from collections.abc import Callable
from typing import TypeAlias, cast

from torch import Tensor

from evenstep.serialize.dtypes import DTYPE_CODES, aligned
from evenstep.serialize.layout import is_supported, refusal
from evenstep.serialize.limits import (
    MAX_DEPTH,
    MAX_KEY_BYTES,
    MAX_NBYTES,
    MAX_TENSORS,
    MAX_VALUES,
)
from evenstep.serialize.nested import Leaf
from evenstep.serialize.placement import place_fields
from evenstep.serialize.schema import check_key
from evenstep.serialize.wire import write_varint

NONE, FALSE, TRUE, INT, FLOAT, STR, BYTES, LIST, TUPLE, DICT, TENSOR = range(11)
"""The tag in front of each value."""

FLOAT64 = struct.Struct("<d")

_Path: TypeAlias = tuple[str | int, ...]


def _path_text(path: _Path) -> str:
    """Return a path as in ``a.b[3]``, for messages."""
    text = "".join([f"[{part}]" if isinstance(part, int) else f".{part}" for part in path])
    return text.removeprefix(".")


class TreeWriter:
    """Encodes one sample.

    Attributes:
        tree: The tree so far.
        tensors: The tensors in the order of the tree, on the CPU.
        payload_nbytes: Bytes of the tensors, each padded to ``ALIGNMENT``.
    """

    __slots__ = ("_num_values", "payload_nbytes", "tensors", "tree")

    def __init__(self) -> None:
        self.tree = bytearray()
        self.tensors: list[Tensor] = []
        self.payload_nbytes = 0
        self._num_values = 0

    def write(self, value: Leaf, path: _Path = ()) -> None:
        """Append ``value``; ``path`` says where it is in the sample.

        Raises:
            ValueError: If a value would not come back as it is, a key is not an encodable
                ``str``, or a limit is exceeded; the message has the path.
        """
        write = _WRITERS.get(type(value))
        if write is None:
            raise ValueError(_value_refusal(value, path))
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ValueError(f"sample has over {MAX_VALUES} values; put numbers into tensors")
        write(self, value, path)

    def write_constant(self, value: bool | None, _path: _Path) -> None:
        """Append None, False or True."""
        self.tree.append(NONE if value is None else TRUE if value else FALSE)

    def write_int(self, value: int, _path: _Path) -> None:
        """Append an int."""
        self._sized(INT, value.to_bytes(int_nbytes(value), "little", signed=True))

    def write_float(self, value: float, _path: _Path) -> None:
        """Append a float."""
        self.tree.append(FLOAT)
        self.tree += FLOAT64.pack(value)

    def write_str(self, value: str, path: _Path) -> None:
        """Append a str."""
        try:
            self._sized(STR, value.encode())
        except UnicodeEncodeError:
            raise ValueError(
                f"field {_path_text(path)!r} has a lone surrogate, which UTF-8 cannot encode"
            ) from None

    def write_bytes(self, value: bytes, _path: _Path) -> None:
        """Append bytes."""
        self._sized(BYTES, value)

    def _sized(self, tag: int, data: bytes) -> None:
        self.tree.append(tag)
        write_varint(self.tree, len(data))
        self.tree += data

    def write_sequence(self, value: list[Leaf] | tuple[Leaf, ...], path: _Path) -> None:
        """Append a list or tuple."""
        self._open(LIST if type(value) is list else TUPLE, len(value), path)
        for index, item in enumerate(value):
            self.write(item, (*path, index))

    def write_dict(self, value: dict[str, Leaf], path: _Path) -> None:
        """Append a dict."""
        for key in value:
            if type(key) is not str or not key.isascii() or len(key) > MAX_KEY_BYTES:
                check_key(key, _path_text(path))
        self._open(DICT, len(value), path)
        for key in sorted(value):
            data = key.encode()
            write_varint(self.tree, len(data))
            self.tree += data
            self.write(value[key], (*path, key))

    def _open(self, tag: int, count: int, path: _Path) -> None:
        if len(path) >= MAX_DEPTH:
            raise ValueError(
                f"field {_path_text(path[:3])!r}... is nested deeper than {MAX_DEPTH}, or in itself"
            )
        self.tree.append(tag)
        write_varint(self.tree, count)

    def write_tensor(self, value: Tensor, path: _Path) -> None:
        """Append a tensor."""
        if not is_supported(value):
            raise ValueError(refusal(_path_text(path), value))
        if value.is_meta:
            raise ValueError(f"field {_path_text(path)!r} is on the meta device and has no data")
        if len(self.tensors) == MAX_TENSORS:
            raise ValueError(f"sample has over {MAX_TENSORS} tensors; join some")
        dtype, shape = value.dtype, value.shape
        nbytes = value.numel() * dtype.itemsize
        self.payload_nbytes += aligned(nbytes)
        if not nbytes or self.payload_nbytes > MAX_NBYTES:
            place_fields([(_path_text(path), dtype, shape)])  # refuses sizes that are too large
            if nbytes:
                raise ValueError(f"sample exceeds {MAX_NBYTES} bytes at {_path_text(path)!r}")
        self.tree += bytes((TENSOR, DTYPE_CODES[dtype], len(shape)))
        for size in shape:
            write_varint(self.tree, size)
        self.tensors.append(value if value.is_cpu else value.cpu())


# By exact type: what is of a subclass would come back as something else.
_WRITERS = cast(
    "dict[type, Callable[[TreeWriter, Leaf, _Path], None]]",
    {
        type(None): TreeWriter.write_constant,
        bool: TreeWriter.write_constant,
        int: TreeWriter.write_int,
        float: TreeWriter.write_float,
        str: TreeWriter.write_str,
        bytes: TreeWriter.write_bytes,
        list: TreeWriter.write_sequence,
        tuple: TreeWriter.write_sequence,
        dict: TreeWriter.write_dict,
        Tensor: TreeWriter.write_tensor,
    },
)


def _value_refusal(value: object, path: _Path) -> str:
    if isinstance(value, Tensor):
        return refusal(_path_text(path), value)
    kind = type(value)
    return (
        f"field {_path_text(path)!r} is a {kind.__module__}.{kind.__qualname__}, which would not "
        "come back as it is; convert it to a tensor, None, bool, int, float, str, bytes, list, "
        "tuple or dict"
    )


def int_nbytes(value: int) -> int:
    """Return the least bytes that hold ``value`` in two's complement, at least one."""
    return (value if value >= 0 else ~value).bit_length() // 8 + 1
