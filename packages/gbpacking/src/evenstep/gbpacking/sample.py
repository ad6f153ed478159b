"""The sample contract: one unpacked sequence, padded so that it can be sliced and packed.

An unpacked sample is a flat dict:

| key | dtype, shape | meaning |
|---|---|---|
| `tokens` | int64 `[L]` | input ids |
| `labels` | int64 `[L]` | ids to predict, already shifted |
| `position_ids` | int64 `[L]` | positions, 0 for the first token |
| `loss_mask` | float32 `[L]` | weight of each label in the loss, 0 over padding |
| `original_seq_len` | int32 `[1]` | tokens of the sequence itself |
| `padded_seq_len` | int32 `[1]` | L: with the padding that slicing needs |
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch

from evenstep.serialize import FlatSample

Sample: TypeAlias = dict[str, torch.Tensor]
"""One unpacked sample, or one micro-batch: tensors by name."""

TOKEN_KEYS: Final = ("tokens", "labels", "loss_mask", "position_ids")
"""Fields with one element per token, in the order that a step returns them."""

REQUIRED_KEYS: Final = (*TOKEN_KEYS, "original_seq_len", "padded_seq_len")
"""Every field of an unpacked sample."""


def padding_multiple(
    *,
    context_parallel_size: int = 1,
    data_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    dynamic_context_parallel: bool = False,
) -> int:
    """Return the number of tokens that every sequence is padded to a multiple of.

    Context parallelism cuts a sequence into two chunks per rank, so a multiple of 2 x CP; alone on
    its rank a sequence is not cut. With dynamic context parallelism the CP size may become as large
    as DP x CP, whatever it is now. Sequence parallelism cuts what a rank holds over the TP ranks.

    Args:
        context_parallel_size: Ranks that share a sequence.
        data_parallel_size: Data-parallel ranks, without context parallelism.
        tensor_parallel_size: Ranks that share a layer.
        sequence_parallel: Whether Megatron-Core's sequence parallelism is on.
        dynamic_context_parallel: Whether the CP size is chosen per micro-batch.
    """
    _require_positive("context_parallel_size", context_parallel_size)
    _require_positive("data_parallel_size", data_parallel_size)
    _require_positive("tensor_parallel_size", tensor_parallel_size)
    if dynamic_context_parallel:
        multiple = 2 * data_parallel_size * context_parallel_size
    else:
        multiple = 2 * context_parallel_size if context_parallel_size > 1 else 1
    return multiple * tensor_parallel_size if sequence_parallel else multiple


def build_unpacked_sample(
    tokens: Sequence[int] | torch.Tensor,
    labels: Sequence[int] | torch.Tensor,
    *,
    loss_mask: Sequence[float] | torch.Tensor | None = None,
    position_ids: Sequence[int] | torch.Tensor | None = None,
    multiple: int = 1,
    pad_token_id: int = 0,
) -> Sample:
    """Return one sample that follows the contract, padded at its end.

    Args:
        tokens: Input ids `[n]`, n >= 1.
        labels: Ids to predict `[n]`, already shifted against `tokens`.
        loss_mask: Weight of each label `[n]`; 1 everywhere if None. Padding has 0.
        position_ids: Positions `[n]`; 0 .. n-1 if None. Padding continues with its own index, so
            that it stays inside a learned table.
        multiple: The sequence is padded to a multiple of this (see `padding_multiple`).
        pad_token_id: What pads `tokens` and `labels`.

    Raises:
        ValueError: If the lengths differ or are 0, or `multiple` is not a positive integer.
    """
    _require_positive("multiple", multiple)
    token_row = _row("tokens", tokens, torch.int64)
    length = len(token_row)
    if length == 0:
        raise ValueError("tokens is empty; a sample has at least one token, drop this one")
    padded = -(-length // multiple) * multiple
    index = torch.arange(padded, dtype=torch.int64)
    rows = {
        "labels": _row("labels", labels, torch.int64),
        "loss_mask": _row(
            "loss_mask", torch.ones(length) if loss_mask is None else loss_mask, torch.float32
        ),
        "position_ids": _row(
            "position_ids", index[:length] if position_ids is None else position_ids, torch.int64
        ),
    }
    for name, row in rows.items():
        if len(row) != length:
            raise ValueError(f"{name} has {len(row)} elements and tokens {length}; they must agree")
    return {
        "tokens": _padded(token_row, index, pad_token_id),
        "labels": _padded(rows["labels"], index, pad_token_id),
        "loss_mask": _padded(rows["loss_mask"], index, 0.0),
        "position_ids": torch.cat([rows["position_ids"], index[length:]]),
        "original_seq_len": torch.tensor([length], dtype=torch.int32),
        "padded_seq_len": torch.tensor([padded], dtype=torch.int32),
    }


def fold_alignment_padding(sample: Mapping[str, torch.Tensor]) -> Sample:
    """Return the sample with its alignment padding counted as part of the sequence.

    Some attention kernels cannot skip padding between sequences. After folding, `cu_seqlens`
    equals `cu_seqlens_padded`; since attention is causal and padding comes last, no real token
    sees it, and its `loss_mask` stays 0. The tensors are shared, the given dict is left alone.

    Raises:
        ValueError: If `padded_seq_len` is missing.
    """
    if "padded_seq_len" not in sample:
        raise ValueError("the sample has no 'padded_seq_len'; build it with build_unpacked_sample")
    return {**sample, "original_seq_len": sample["padded_seq_len"].clone()}


def identity_collate(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of a micro-batch as a list: nothing is stacked, padded or copied.

    Pass it as `collate_fn` to the `DataLoader` whose micro-batches the scheduler packs.
    """
    return list(samples)


def folding_collate(samples: Sequence[Sample]) -> list[Sample]:
    """Like `identity_collate`, with the alignment padding of each sample folded into its length."""
    return [fold_alignment_padding(sample) for sample in samples]


def tensors_of(sample: FlatSample) -> Sample:
    """Return the tensors of a sample as it came from the exchange, which knows plain values too."""
    return {key: value for key, value in sample.items() if isinstance(value, torch.Tensor)}


def _row(
    name: str, values: Sequence[int] | Sequence[float] | torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    row = torch.as_tensor(values, dtype=dtype)
    if row.dim() != 1:
        raise ValueError(f"{name} has shape {list(row.shape)}; a sample's fields are one row, [n]")
    return row


def _padded(row: torch.Tensor, index: torch.Tensor, value: float) -> torch.Tensor:
    out = torch.full(index.shape, value, dtype=row.dtype)
    out[: len(row)] = row
    return out


def _require_positive(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
