"""Assemble THD micro-batches: sequences end to end in one row, and where each of them ends."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from evenstep.gbpacking.sample import TOKEN_KEYS, Sample
from evenstep.gbpacking.zigzag import zigzag_indices

if TYPE_CHECKING:
    # Megatron-Core is an extra: imported where a PackedSeqParams is made, and never before.
    from megatron.core.packed_seq_params import PackedSeqParams


def cumulative_lengths(lengths: Sequence[int]) -> torch.Tensor:
    """Return `[0, l0, l0 + l1, ...]` as int32 `[sequences + 1]`, as attention kernels read it."""
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    if int(ends[-1]) > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"the pack holds {int(ends[-1])} tokens; attention kernels count tokens in int32, "
            "lower max_seqlen_per_dp_cp_rank"
        )
    return ends.to(torch.int32)


def pack_metadata(original: Sequence[int], padded: Sequence[int]) -> Sample:
    """Return the borders of a pack from the lengths of its sequences alone.

    Args:
        original: Tokens of each sequence.
        padded: The same with alignment padding.

    Returns:
        `cu_seqlens` and `cu_seqlens_padded` int32 `[sequences + 1]`, `max_seqlen` int32 `[1]`: the
        longest padded sequence.
    """
    return {
        "cu_seqlens": cumulative_lengths(original),
        "cu_seqlens_padded": cumulative_lengths(padded),
        "max_seqlen": torch.tensor([max(padded)], dtype=torch.int32),
    }


def pack_microbatch(
    samples: Sequence[Sample],
    *,
    original: Sequence[int],
    padded: Sequence[int],
    keys: Collection[str] = TOKEN_KEYS,
    device: torch.device | None = None,
) -> Sample:
    """Lay samples end to end: one micro-batch in THD layout, before context-parallel slicing.

    Each field is written once, straight into the pack; the samples are not changed.

    Args:
        samples: The samples of this pack, in order, at least one.
        original: Tokens of each.
        padded: The same with alignment padding: the length of each field.
        keys: The per-token fields that this pipeline stage needs.
        device: Where the fields are put; where the samples are if None.

    Returns:
        The fields `[tokens]`, and the metadata of `pack_metadata` on the CPU: the host reads it.
    """
    fields = {key: torch.cat([sample[key] for sample in samples]).to(device) for key in keys}
    return {**fields, **pack_metadata(original, padded)}


def slice_for_cp(microbatch: Sample, *, cp_size: int, cp_rank: int) -> Sample:
    """Return the part of each per-token field that one context-parallel rank holds.

    The borders keep describing the whole pack, as attention under context parallelism expects.
    """
    if cp_size == 1:
        return microbatch
    index = zigzag_indices(microbatch["cu_seqlens_padded"], cp_size=cp_size, cp_rank=cp_rank)
    return {
        key: value.index_select(0, index.to(value.device)) if key in TOKEN_KEYS else value
        for key, value in microbatch.items()
    }


def padding_mask(
    cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor, *, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Return which tokens of a rank's slice are padding: bool `[1, tokens / cp_size]`, True there.

    It follows from the borders, so every pipeline stage has it without receiving it.
    """
    padded = cu_seqlens_padded.to(torch.int64)
    real_ends = padded[:-1] + cu_seqlens.to(torch.int64).diff()
    position = zigzag_indices(cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank)
    sequence = torch.searchsorted(padded, position, right=True) - 1
    return (position >= real_ends[sequence]).unsqueeze(0)


def make_packed_seq_params(
    cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor, max_seqlen: int
) -> "PackedSeqParams":
    """Return the installed Megatron-Core's own `PackedSeqParams` for self-attention on a pack.

    Releases differ in its fields; those that this one has are filled, the others left out.
    `total_tokens` makes a release that has it compute the sequence index that Mamba layers read.

    Args:
        cu_seqlens: int32 `[sequences + 1]`, on the device of the micro-batch.
        cu_seqlens_padded: The same with alignment padding.
        max_seqlen: The longest padded sequence.
    """
    from megatron.core.packed_seq_params import PackedSeqParams  # noqa: PLC0415 # an extra

    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    values = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "cu_seqlens_q_padded": cu_seqlens_padded,
        "cu_seqlens_kv_padded": cu_seqlens_padded,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
        "total_tokens": int(cu_seqlens_padded[-1]),
        "pad_between_seqs": not torch.equal(cu_seqlens, cu_seqlens_padded),
    }
    return PackedSeqParams(**{name: value for name, value in values.items() if name in known})
