"""What one sample may contain at most.

Decoding checks every limit before it allocates, and encoding refuses what decoding would refuse.
"""

MAX_DEPTH = 64
"""Containers inside each other. Deeper input is a mistake, a cycle or an attack on the stack."""

MAX_NDIM = 64
"""Dimensions of a tensor; most operators of torch accept no more."""

MAX_KEY_BYTES = 4096
"""UTF-8 bytes of one key, dotted path included."""

MAX_FIELDS = 2**12
"""Keys of one schema."""

MAX_TENSORS = 2**16
"""Tensors of one self-describing document."""

MAX_VALUES = 2**20
"""Values of one self-describing document, containers included. More numbers belong in a tensor."""

MAX_NBYTES = 2**62 - 1
"""Bytes of one tensor and of one sample, so that sums of two stay within int64."""


def ndim_refusal(key: str, ndim: int) -> str:
    """Return why a field of more than ``MAX_NDIM`` dimensions is refused."""
    return f"field {key!r} has {ndim} dimensions; at most {MAX_NDIM} are supported"
