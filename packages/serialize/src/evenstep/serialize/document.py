"""Self-describing bytes of one nested sample: a head, a tree of values, a payload of tensor bytes.

``FORMAT.md`` specifies them byte by byte.
"""

import ctypes
import io
import struct
import warnings
import zlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from evenstep.serialize.checksum import payload_checksum
from evenstep.serialize.dtypes import aligned
from evenstep.serialize.errors import DecodeError
from evenstep.serialize.limits import MAX_NBYTES
from evenstep.serialize.nested import NestedSample
from evenstep.serialize.packing import write_fields
from evenstep.serialize.packing_checks import describe
from evenstep.serialize.tree_reader import TreeReader
from evenstep.serialize.tree_writer import TreeWriter
from evenstep.serialize.unpacking import sample_region

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"evenstep"
VERSION = 1

_HEAD = struct.Struct("<8sIIQI")  # magic, version, tree bytes, payload bytes, payload checksum
_CRC = struct.Struct("<I")  # CRC-32 of the head so far and of the padded tree
HEAD_NBYTES = _HEAD.size + _CRC.size

_MAX_TREE_NBYTES = 2**32 - 1

# bytes(n) would fill memory with zeros that dumps writes over at once.
_bytes_to_fill = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


class Head(NamedTuple):
    """The head of a document.

    Attributes:
        tree_nbytes: Bytes of the tree, without the zeros that pad it to ``ALIGNMENT``.
        payload_nbytes: Bytes of the payload.
        payload_checksum: See :func:`payload_checksum`.
        head_checksum: CRC-32 of the head before this field and of the padded tree.
    """

    tree_nbytes: int
    payload_nbytes: int
    payload_checksum: int
    head_checksum: int

    @classmethod
    def parse(cls, data: bytes) -> "Head":
        """Read the head from the first ``HEAD_NBYTES`` of a document.

        Raises:
            DecodeError: If ``data`` is shorter, or not the head of a document of this version.
        """
        if len(data) < HEAD_NBYTES:
            raise DecodeError(f"document of {len(data)} bytes; the head alone has {HEAD_NBYTES}")
        magic, version, *sizes = _HEAD.unpack_from(data)
        if magic != MAGIC:
            raise DecodeError(f"document starts with {magic!r}, not with {MAGIC!r}")
        if version != VERSION:
            raise DecodeError(
                f"document has format version {version}; this package reads {VERSION}"
            )
        head = cls(*sizes, *_CRC.unpack_from(data, _HEAD.size))
        if head.payload_nbytes > MAX_NBYTES or head.payload_nbytes != aligned(head.payload_nbytes):
            raise DecodeError(f"document declares a payload of {head.payload_nbytes} bytes")
        return head

    @property
    def payload_start(self) -> int:
        """Where the payload starts in the document."""
        return HEAD_NBYTES + aligned(self.tree_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole document."""
        return self.payload_start + self.payload_nbytes


def dumps(sample: NestedSample) -> bytes:
    """Return the self-describing bytes of a nested sample.

    Keys are sorted at every level, so samples that compare equal key by key give the same bytes
    whatever the order of insertion. Each tensor byte is copied once.

    Args:
        sample: A dict of tensors, ``None``, bool, int, float, str, bytes, and of lists, tuples
            and dicts of these, with str keys. Tensors on an accelerator are copied to the CPU.

    Raises:
        ValueError: If something in the sample would not come back as it is (a subclass, a
            sparse, nested, quantized or complex128 tensor, a lone surrogate, a key that is no
            ``str``), or a limit is exceeded; the message has its place in the sample.
    """
    if type(sample) is not dict:
        raise ValueError(f"sample is a {type(sample).__name__}; it must be a dict")
    writer = TreeWriter()
    writer.write(sample)
    tree = writer.tree
    if len(tree) > _MAX_TREE_NBYTES:
        raise ValueError(f"plain values take {len(tree)} bytes, at most {_MAX_TREE_NBYTES} fit")
    tree_nbytes = len(tree)
    tree += bytes(aligned(tree_nbytes) - tree_nbytes)
    payload_nbytes = writer.payload_nbytes
    # BytesIO hands out the bytes object that it was made of, so the payload is copied only once.
    stream = io.BytesIO(_bytes_to_fill(None, HEAD_NBYTES + len(tree) + payload_nbytes))
    with stream.getbuffer() as view:
        view[HEAD_NBYTES : HEAD_NBYTES + len(tree)] = tree
        checksum = _write_payload(view[HEAD_NBYTES + len(tree) :], writer.tensors)
        _HEAD.pack_into(view, 0, MAGIC, VERSION, tree_nbytes, payload_nbytes, checksum)
        _CRC.pack_into(view, _HEAD.size, zlib.crc32(tree, zlib.crc32(view[: _HEAD.size])))
    return stream.getvalue()


def _write_payload(view: memoryview, tensors: Sequence[Tensor]) -> int:
    """Copy the tensors into ``view`` and return the checksum of the payload."""
    if not view.nbytes:
        return 0
    payload = torch.frombuffer(view, dtype=torch.uint8)
    write_fields(payload, {str(index): tensor for index, tensor in enumerate(tensors)})
    return payload_checksum(payload)


def loads(buffer: "Buffer | Tensor", *, verify: bool = True) -> NestedSample:
    """Return the sample whose :func:`dumps` is ``buffer``.

    Tensors are views of ``buffer`` and keep it alive; where its address is not a multiple of
    ``ALIGNMENT`` they are views of one copy. Views of a read-only buffer must not be written to:
    ``clone()`` first. Nothing from the buffer is executed, and no length is believed.

    Args:
        buffer: Any contiguous object with the buffer protocol (``bytes``, ``memoryview``,
            ``mmap``, shared memory, ...), or a contiguous 1-D ``uint8`` tensor. It must hold one
            document and nothing else.
        verify: Whether to check the payload's checksum, which reads all of it. ``False`` leaves
            a memory-mapped file unread until its tensors are used; head and tree are always
            checked.

    Raises:
        DecodeError: If ``buffer`` is not the bytes of a sample.
        ValueError: If ``buffer`` is not contiguous.
    """
    whole = _as_tensor(buffer)
    head = Head.parse(_read(whole, 0, HEAD_NBYTES))
    if head.nbytes != whole.numel():
        raise DecodeError(f"document declares {head.nbytes} bytes, the buffer has {whole.numel()}")
    tree = _read(whole, HEAD_NBYTES, head.payload_start)
    if zlib.crc32(tree, zlib.crc32(_read(whole, 0, _HEAD.size))) != head.head_checksum:
        raise DecodeError("head and tree do not match their checksum; the document is damaged")
    if any(tree[head.tree_nbytes :]):
        raise DecodeError("padding after the tree is not zero")
    payload = sample_region(whole, head.payload_nbytes, head.payload_start)
    if verify and payload_checksum(payload) != head.payload_checksum:
        raise DecodeError("payload does not match its checksum; tensor bytes are damaged")
    return TreeReader(tree[: head.tree_nbytes], payload).read_sample()


def _as_tensor(buffer: "Buffer | Tensor") -> Tensor:
    """Return the bytes of ``buffer`` as a 1-D ``uint8`` tensor on the CPU, without a copy."""
    if isinstance(buffer, Tensor):
        if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(
                f"buffer is {describe(buffer)}; it must be a contiguous 1-D uint8 tensor"
            )
        return buffer.detach().cpu()
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("buffer is not contiguous; copy it with bytes(buffer)")
    if view.readonly:
        _accept_read_only_buffers()
    return (
        torch.frombuffer(view, dtype=torch.uint8)
        if view.nbytes
        else torch.empty(0, dtype=torch.uint8)
    )


@cache
def _accept_read_only_buffers() -> None:
    """Use up the warning that torch gives once per process; :func:`loads` documents the matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


def _read(whole: Tensor, start: int, stop: int) -> bytes:
    """Return the bytes from ``start`` to ``stop``, or as far as there are any."""
    stop = min(stop, whole.numel())
    return ctypes.string_at(whole.data_ptr() + start, stop - start) if start < stop else b""
