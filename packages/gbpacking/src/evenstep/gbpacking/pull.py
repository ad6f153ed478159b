"""Read this rank's samples of a step and check each against the contract."""

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

import torch

from evenstep.gbpacking.errors import IteratorEndedError, SampleError
from evenstep.gbpacking.sample import INTEGER_DTYPES, REQUIRED_KEYS, TOKEN_KEYS, Sample

LoaderItem: TypeAlias = Sample | list[Sample] | tuple[Sample, ...]
"""What a loader yields for a micro-batch: a sample, or a list of samples (`identity_collate`)."""

_TOKEN_DTYPES: Final = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}


class PulledSamples(NamedTuple):
    """One rank's samples of a step, in the order in which they were read.

    Attributes:
        samples: The samples themselves, checked.
        counts: How many samples each of the loader's micro-batches had.
        original: Tokens of each sample.
        padded: The same with alignment padding.
    """

    samples: list[Sample]
    counts: list[int]
    original: list[int]
    padded: list[int]


def pull_samples(
    data_iterator: Iterator[LoaderItem], num_microbatches: int, *, capacity: int, multiple: int
) -> PulledSamples:
    """Read `num_microbatches` items and check their samples.

    Args:
        data_iterator: The loader's iterator.
        num_microbatches: Items to read.
        capacity: Most tokens of a pack, over the whole CP group.
        multiple: What padded lengths must be a multiple of.

    Raises:
        IteratorEndedError: If the iterator ends before.
        SampleError: If a sample breaks the contract or exceeds the capacity, naming it.
    """
    if not isinstance(data_iterator, Iterator):
        raise SampleError(
            f"data_iterator is a {type(data_iterator).__name__}, which is no iterator; pass "
            "iter(loader), one for the whole epoch"
        )
    pulled = PulledSamples([], [], [], [])
    for microbatch in range(num_microbatches):
        try:
            item = next(data_iterator)
        except StopIteration:
            raise IteratorEndedError(microbatch, num_microbatches) from None
        samples = _samples_of(item, microbatch)
        pulled.counts.append(len(samples))
        for sample in samples:
            where = f"sample {len(pulled.samples)} of this rank's step"
            original, padded = _checked_lengths(sample, where)
            _check_slicing(padded, where, capacity=capacity, multiple=multiple)
            pulled.samples.append(sample)
            pulled.original.append(original)
            pulled.padded.append(padded)
    return pulled


def _samples_of(item: LoaderItem, microbatch: int) -> list[Sample]:
    samples = list(item) if isinstance(item, (list, tuple)) else [item]
    if not samples or not all(isinstance(sample, dict) for sample in samples):
        raise SampleError(
            f"micro-batch {microbatch} of the loader is {type(item).__name__} of "
            f"{type(samples[0]).__name__ if samples else 'nothing'}; it must be a sample (a dict) "
            "or a list of samples, pass collate_fn=identity_collate to the DataLoader"
        )
    return samples


def _checked_lengths(sample: Sample, where: str) -> tuple[int, int]:
    missing = [key for key in REQUIRED_KEYS if key not in sample]
    if missing:
        raise SampleError(
            f"{where} has no {', '.join(missing)}; build samples with build_unpacked_sample"
        )
    original = _length(sample, "original_seq_len", where)
    padded = _length(sample, "padded_seq_len", where)
    if not 1 <= original <= padded:
        raise SampleError(
            f"{where} has original_seq_len {original} and padded_seq_len {padded}; it must be "
            "1 <= original <= padded"
        )
    for key in TOKEN_KEYS:
        _check_row(sample[key], key, padded, where)
    return original, padded


def _length(sample: Sample, key: str, where: str) -> int:
    value = _tensor(sample[key], key, where)
    if value.dtype not in INTEGER_DTYPES or value.shape not in {(1,), ()} or value.is_meta:
        raise SampleError(f"{where} has {key} {value!r}; it must be an integer tensor [1]")
    return int(value)


def _tensor(value: object, key: str, where: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise SampleError(
            f"{where} has {key} of type {type(value).__name__}; it must be a tensor, build samples "
            "with build_unpacked_sample"
        )
    return value


def _check_row(value: object, key: str, padded: int, where: str) -> None:
    row = _tensor(value, key, where)
    if row.dim() != 1:
        raise SampleError(
            f"{where} has {key} of shape {list(row.shape)}; it must be one row, pass "
            "collate_fn=identity_collate to the DataLoader"
        )
    if len(row) != padded:
        raise SampleError(f"{where} has {len(row)} {key} and padded_seq_len {padded}")
    if row.dtype != _TOKEN_DTYPES[key]:
        raise SampleError(f"{where} has {key} of {row.dtype}; it must be {_TOKEN_DTYPES[key]}")


def _check_slicing(padded: int, where: str, *, capacity: int, multiple: int) -> None:
    if padded > capacity:
        raise SampleError(
            f"{where} has {padded} tokens, more than the capacity of {capacity}; raise "
            "max_seqlen_per_dp_cp_rank or the CP size, or shorten or drop the sample"
        )
    if padded % multiple:
        raise SampleError(
            f"{where} is padded to {padded} tokens, which is no multiple of {multiple}; build it "
            "with multiple=padding_multiple(...)"
        )
