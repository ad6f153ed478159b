"""Samples in files: ``dump`` and ``load``."""

import mmap as memory_map
import os
from pathlib import Path
from typing import BinaryIO

from evenstep.serialize.document import HEAD_NBYTES, Head, dumps, loads
from evenstep.serialize.nested import NestedSample

# A stream is read in pieces of this size, so that a declared length alone allocates nothing.
_CHUNK_NBYTES = 1 << 24


def dump(sample: NestedSample, file: str | os.PathLike[str] | BinaryIO) -> None:
    """Write the bytes of ``sample`` to a file.

    Args:
        sample: See :func:`dumps`.
        file: A path, whose file is replaced, or a binary file opened for writing; one file object
            takes any number of samples, one after the other.
    """
    data = dumps(sample)
    if isinstance(file, (str, os.PathLike)):
        Path(file).write_bytes(data)
    else:
        file.write(data)


def load(
    file: str | os.PathLike[str] | BinaryIO, *, mmap: bool = False, verify: bool = True
) -> NestedSample:
    """Read one sample from a file.

    Args:
        file: A path, or a binary file opened for reading: a regular file, or a blocking pipe or
            socket's ``makefile("rb")``. A path must hold one sample; of a file object exactly one
            sample is read, so that the next call reads the next.
        mmap: Map the file at the path into memory instead of reading it. Pages are read when
            used; writing to the tensors does not change the file.
        verify: Whether to check the payload's checksum, which reads all of it.

    Raises:
        DecodeError: If the file does not hold a sample.
        EOFError: If a file object is at its end.
        ValueError: If ``mmap`` is asked of a file object.
    """
    if isinstance(file, (str, os.PathLike)):
        return loads(
            _map(Path(file)) if mmap else bytearray(Path(file).read_bytes()), verify=verify
        )
    if mmap:
        raise ValueError("mmap is True for a file object; give the path instead")
    data = bytearray()
    _read_up_to(file, data, HEAD_NBYTES)
    if not data:
        raise EOFError("file has no more samples")
    _read_up_to(file, data, Head.parse(bytes(data)).nbytes)
    return loads(data, verify=verify)


def _map(path: Path) -> "memory_map.mmap | bytes":
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # an empty file cannot be mapped
        return memory_map.mmap(file.fileno(), 0, access=memory_map.ACCESS_COPY)


def _read_up_to(file: BinaryIO, data: bytearray, nbytes: int) -> None:
    """Append to ``data`` until it has ``nbytes`` bytes or the file ends."""
    while len(data) < nbytes:
        chunk = file.read(min(nbytes - len(data), _CHUNK_NBYTES))
        if not chunk:
            return
        data += chunk
