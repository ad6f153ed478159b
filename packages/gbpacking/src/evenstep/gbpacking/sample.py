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

from evenstep.serialize import Leaf

Sample: TypeAlias = dict[str, torch.Tensor]
"""One unpacked sample, or one micro-batch: tensors by name."""

TOKEN_KEYS: Final = ("tokens", "labels", "loss_mask", "position_ids")
"""Fields with one element per token, in the order that a step returns them."""

INTEGER_DTYPES: Final = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint16, torch.uint32, torch.uint64}
)
"""The dtypes of integers: neither bool, nor what is rounded."""

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
        ValueError: If the lengths differ or are 0, an id or a position is not an integer, a weight
            is not a finite number, or `multiple` is not a positive integer.
    """
    _require_positive("multiple", multiple)
    if type(pad_token_id) is not int:
        raise ValueError(f"pad_token_id is {pad_token_id!r}; it must be an integer")
    token_row = _id_row("tokens", tokens)
    length = len(token_row)
    if length == 0:
        raise ValueError("tokens is empty; a sample has at least one token, drop this one")
    padded = -(-length // multiple) * multiple
    index = torch.arange(padded, dtype=torch.int64)
    rows = {
        "labels": _id_row("labels", labels),
        "loss_mask": _weight_row(
            "loss_mask", torch.ones(length) if loss_mask is None else loss_mask
        ),
        "position_ids": _id_row(
            "position_ids", index[:length] if position_ids is None else position_ids
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


def tensors_of(sample: Mapping[str, Leaf]) -> Sample:
    """Return the tensors of a sample as it came from the exchange, which knows plain values too."""
    return {key: value for key, value in sample.items() if isinstance(value, torch.Tensor)}


def _id_row(name: str, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
    row = _row(name, values)
    if len(row) and row.dtype not in INTEGER_DTYPES:  # an empty list is of no type
        raise ValueError(
            f"{name} holds {row[0].item()!r}, of {row.dtype}; ids and positions are integers, and "
            "nothing is rounded: convert them where they are made"
        )
    return row.to(torch.int64)


def _weight_row(name: str, values: Sequence[float] | torch.Tensor) -> torch.Tensor:
    row = _row(name, values)
    if row.is_complex():
        raise ValueError(f"{name} holds {row[0].item()!r}, of {row.dtype}; weights are real")
    # Python's floats afresh: the default dtype, which they had become, may be narrower.
    row = torch.as_tensor(row if isinstance(values, torch.Tensor) else values, dtype=torch.float32)
    if not torch.isfinite(row).all():
        wrong = int((~torch.isfinite(row)).nonzero()[0])
        raise ValueError(
            f"{name}[{wrong}] is {row[wrong].item()} in float32; a weight must be a finite number, "
            "0 where a label does not count"
        )
    return row


def _row(name: str, values: Sequence[float] | torch.Tensor) -> torch.Tensor:
    try:
        row = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} is no row of numbers: {error}") from error
    if row.dim() != 1:
        raise ValueError(f"{name} has shape {list(row.shape)}; a sample's fields are one row, [n]")
    if row.is_meta:
        raise ValueError(f"{name} is on the meta device and has no data")
    return row


def _padded(row: torch.Tensor, index: torch.Tensor, value: float) -> torch.Tensor:
    out = torch.full(index.shape, value, dtype=row.dtype)
    out[: len(row)] = row
    return out


def _require_positive(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
