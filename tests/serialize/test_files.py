"""Samples in files, pipes and sockets."""

import io
import os
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evenstep.serialize import DecodeError, NestedSample, dump, dumps, load
from tests.serialize.samples import same

SAMPLE: NestedSample = {"x": torch.arange(1000), "name": "a", "e": {}}


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_holds_one_sample(tmp_path: Path, mmap: bool) -> None:
    for path in (tmp_path / "a", os.fspath(tmp_path / "b")):
        dump(SAMPLE, path)
        assert Path(path).read_bytes() == dumps(SAMPLE)
        assert same(load(path, mmap=mmap), SAMPLE)


def test_a_mapped_file_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a"
    dump(SAMPLE, path)
    tensor = load(path, mmap=True, verify=False)["x"]
    assert isinstance(tensor, Tensor)
    tensor.zero_()
    assert same(load(path), SAMPLE)


def test_a_stream_holds_many_samples() -> None:
    stream = io.BytesIO()
    samples: list[NestedSample] = [{}, SAMPLE, {"y": None}]
    for sample in samples:
        dump(sample, stream)
    stream.seek(0)
    assert same([load(stream) for _ in samples], samples)
    with pytest.raises(EOFError, match="file has no more samples"):
        load(stream)


def test_a_socket_is_a_stream() -> None:
    near, far = socket.socketpair()
    with near, far, near.makefile("wb") as writer, far.makefile("rb") as reader:
        dump(SAMPLE, writer)
        dump({"y": 1}, writer)
        writer.flush()
        assert same(load(reader), SAMPLE)
        assert load(reader) == {"y": 1}


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    data = dumps(SAMPLE)
    path = tmp_path / "a"
    for content in (b"", data[:-8], data + b"\0", data[:20]):
        path.write_bytes(content)
        for mmap in (False, True):
            with pytest.raises(DecodeError, match="document"):
                load(path, mmap=mmap)
    with pytest.raises(DecodeError, match=r"declares .* bytes, the buffer has"):
        load(io.BytesIO(data[:-8]))
    with pytest.raises(ValueError, match="mmap is True for a file object; give the path"):
        load(io.BytesIO(data), mmap=True)


def test_a_stream_is_read_no_further_than_it_goes() -> None:
    """A head that declares 4 EiB costs no memory: what follows is read in bounded pieces."""
    head = bytearray(dumps({}))
    head[16:24] = (2**62 - 8).to_bytes(8, "little")
    with pytest.raises(DecodeError, match="declares 4611686018427387936 bytes, the buffer has 40"):
        load(io.BytesIO(head))
