"""The dtypes that can be serialized, their codes in the wire formats, and the alignment."""

import sys

import torch

if sys.byteorder != "little":
    raise ImportError("evenstep.serialize writes elements as they lie in little-endian memory")

ALIGNMENT = 8
"""Every field starts at a multiple of this many bytes: the widest element that is supported."""

# The code of a dtype is its place here. Codes are part of every wire format: only append.
_NAMES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16",
    "float32", "float64", "complex64", "uint16", "uint32", "uint64", "complex32",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7", "bcomplex32",
)  # fmt: skip


def _known_dtypes() -> dict[int, torch.dtype]:
    """Return code -> dtype for the names that this version of torch has."""
    found = ((code, getattr(torch, name, None)) for code, name in enumerate(_NAMES))
    return {code: dtype for code, dtype in found if isinstance(dtype, torch.dtype)}


DTYPES = _known_dtypes()
"""Code -> dtype."""

DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
"""Dtype -> code; a dtype that is absent is not supported."""

# complex128 is 16 bytes wide, which the 8-byte alignment does not serve; quantized tensors carry
# a quantizer beside their bytes.
REFUSED_DTYPES = {
    torch.complex128: "send torch.view_as_real(tensor) instead",
    torch.qint8: "send tensor.int_repr() with its scale and zero point instead",
    torch.quint8: "send tensor.int_repr() with its scale and zero point instead",
    torch.qint32: "send tensor.int_repr() with its scale and zero point instead",
    torch.quint4x2: "send the dequantized tensor instead",
    torch.quint2x4: "send the dequantized tensor instead",
}
"""Dtypes refused by name -> what to do instead."""


def dtype_of_name(name: str) -> torch.dtype:
    """Return the supported dtype called ``name``, as in ``"torch.float32"`` or ``"float32"``.

    Raises:
        ValueError: If there is no such dtype or it is not supported.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_CODES:
        raise ValueError(f"dtype {name!r} is not supported; supported are {supported_names()}")
    return dtype


def supported_names() -> str:
    """Return the supported dtypes of this version of torch as text for a message."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT
