"""Samples to test with: tensors of every dtype and memory, strategies, and exact equality."""

import math
import struct
from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch import Tensor

from evenstep.serialize import (
    LaidOutSample,
    Leaf,
    NestedSample,
    Part,
    SampleLayout,
    TensorSample,
    sample_layout,
)
from evenstep.serialize.dtypes import DTYPES

SUPPORTED = list(DTYPES.values())


class InPlace(LaidOutSample):
    """A sample of tensors that lie anywhere: contiguous, or as rows that are a step apart."""

    def __init__(
        self, flat: TensorSample, *, is_cpu: bool = True, is_pageable: bool = False
    ) -> None:
        self._flat = flat
        self._layout = sample_layout(flat)
        self._is_cpu, self._is_pageable = is_cpu, is_pageable

    def __getitem__(self, key: str) -> Tensor | None:
        return self._flat[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat)

    def __len__(self) -> int:
        return len(self._flat)

    @property
    def layout(self) -> SampleLayout:
        return self._layout

    @property
    def is_cpu(self) -> bool:
        return self._is_cpu

    @property
    def is_pageable(self) -> bool:
        return self._is_pageable

    def parts(self) -> list[Part]:
        parts = []
        for field in self._layout.placed:
            tensor = self._flat[field.key]
            assert tensor is not None
            step = 0 if tensor.is_contiguous() else tensor.stride(0) * tensor.itemsize
            parts.append((tensor.data_ptr(), step))
        return parts


def filled(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Return a contiguous tensor of any dtype with random bytes (0 or 1 for bool)."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    return data.view(dtype).view(shape)


def raw(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor in C order, whatever its dtype and memory."""
    if tensor.numel() == 0:
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    plain = plain.view(bits) if plain.dtype is not bits else plain
    return bytes(plain.contiguous().view(-1).view(torch.uint8).tolist())


def same(left: object, right: object) -> bool:
    """Tell whether two values are equal in type, shape, dtype and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype is right.dtype and left.shape == right.shape and raw(left) == raw(right)
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def odd_tensors() -> Iterator[tuple[str, Tensor]]:
    """Yield tensors whose memory is not what a serializer would like."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    complex64 = torch.complex(base, -base)
    yield "0-dim", torch.tensor(3.5)
    yield "no elements", torch.empty(0, 7, dtype=torch.int64)
    yield "no elements, transposed", torch.empty(3, 0, dtype=torch.int16).t()
    yield "transposed", base.t()
    yield "sliced with steps", base[::2, 1::2]
    yield "expanded", torch.tensor([1, 2, 3], dtype=torch.int16).expand(5, 3)
    yield "expanded scalar", torch.tensor(True).expand(3, 3)
    yield "flipped view", base.flip(0)[1:]
    yield (
        "channels last",
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    )
    yield "conjugate", complex64.conj()
    yield "conjugate, transposed", complex64.conj().t()
    yield "negative view", complex64.conj().imag
    yield "imaginary part", complex64.imag
    yield "requires grad", torch.arange(3.0, requires_grad=True)
    yield "result of a computation", torch.arange(3.0, requires_grad=True) * 2
    yield "misaligned", torch.arange(40, dtype=torch.uint8)[3:19]
    yield "misaligned storage", torch.frombuffer(bytearray(33), dtype=torch.int32, offset=1)
    yield "many dimensions", torch.arange(4).reshape([1] * 30 + [4] + [1] * 33)
    yield (
        "NaN payloads",
        torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32),
    )
    yield "negative zero", torch.tensor([-0.0, 0.0, math.inf, -math.inf])


keys = st.text(max_size=4) | st.sampled_from(
    ["", ".", "a.b", "\\", "a\\.b", "..", "é", "\x00", "\U0001f600"]
)
small_shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda dtype, shape, seed: filled(dtype, *shape, seed=seed),
    st.sampled_from(SUPPORTED),
    small_shapes,
    st.integers(0, 1000),
)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
values: st.SearchStrategy[Leaf] = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)
nested_samples: st.SearchStrategy[NestedSample] = st.dictionaries(keys, values, max_size=5)
tensor_samples: st.SearchStrategy[dict[str, Tensor | None]] = st.dictionaries(
    keys, tensors | st.none(), max_size=5
)
