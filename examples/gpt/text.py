"""Real text with a heavy tail of lengths: the sources of Python's standard library, as bytes."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from evenstep.gbpacking import Sample, build_unpacked_sample


def standard_library_documents(*, max_bytes: int, min_bytes: int = 16) -> list[bytes]:
    """Return top-level definitions of the standard library's modules, one document each.

    Files are split before lines that begin a class or a function, so lengths reach from one line to
    whole classes. The order is by file name; the set depends on the Python version.

    Args:
        max_bytes: Documents are cut after this many bytes.
        min_bytes: Shorter documents are left out.
    """
    documents = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_bytes().replace(b"\nclass ", b"\n\0class ").replace(b"\ndef ", b"\n\0def ")
        documents += [part[:max_bytes] for part in text.split(b"\0") if len(part) >= min_bytes]
    return documents


def shuffled(documents: list[bytes], seed: int) -> list[bytes]:
    """Return the documents in an order that depends on the seed alone."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))
    return [documents[index] for index in order.tolist()]


def sample_of(document: bytes, *, multiple: int = 1) -> Sample:
    """Return a next-byte prediction sample of one document, of at least two bytes."""
    values = list(document)
    return build_unpacked_sample(values[:-1], values[1:], multiple=multiple)


def samples_of_rank(
    documents: list[bytes], *, rank: int, num_ranks: int, num_microbatches: int, multiple: int
) -> Iterator[Sample]:
    """Yield one rank's samples, step after step, without end.

    A step's documents are dealt out to the ranks in turn, as Megatron-Core's sampler does.
    """
    per_step = num_ranks * num_microbatches
    for start in range(0, 1 << 62, per_step):
        for index in range(start + rank, start + per_step, num_ranks):
            yield sample_of(documents[index % len(documents)], multiple=multiple)
