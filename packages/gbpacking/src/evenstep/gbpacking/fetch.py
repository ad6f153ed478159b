"""Bring one packed micro-batch to every tensor-parallel rank of this CP rank.

Only TP rank 0 has the iterator. It sends a header of fixed size, then one buffer with all that the
stage needs, so a micro-batch costs two broadcasts whatever fields it has. A failure travels in the
header: no TP rank waits for a buffer that never comes.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from evenstep.gbpacking.sample import Sample
from evenstep.gbpacking.thd import slice_for_cp

_DTYPES: Final = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "loss_mask": torch.float32,
    "cu_seqlens": torch.int32,
    "cu_seqlens_padded": torch.int32,
}
"""What travels, the widest types first: each field then starts aligned."""

_BORDERS: Final = ("cu_seqlens", "cu_seqlens_padded")


class _Header(NamedTuple):
    """What a receiver must know before the buffer comes; `error_bytes` > 0 announces a failure."""

    tokens: int
    sequences: int
    max_seqlen: int
    local_cp_size: int
    error_bytes: int


class PackedFields(NamedTuple):
    """One micro-batch as this rank holds it.

    Attributes:
        fields: Per-token fields `[tokens of the slice]` of this stage, and both borders.
        max_seqlen: Longest padded sequence of the pack.
        local_cp_size: Size of its CP group where that is chosen per micro-batch, else 0.
    """

    fields: Sample
    max_seqlen: int
    local_cp_size: int


def fetch_packed(
    data_iterator: Iterator[Sample] | None,
    *,
    keys: Sequence[str],
    tp: ProcessGroup,
    cp: ProcessGroup,
    device: torch.device,
) -> PackedFields:
    """Take the next micro-batch, slice it for this CP rank and hand it to all TP ranks.

    One with a CP group of its own (`local_cp_size`) was cut before it came here.

    Called by every rank of `tp`, in the same order.

    Args:
        data_iterator: The packed iterator on TP rank 0; not looked at elsewhere.
        keys: Per-token fields that this model chunk needs.
        tp: The tensor-parallel group.
        cp: The context-parallel group.
        device: Where the fields are wanted, and where `tp` communicates.

    Raises:
        RuntimeError: On every TP rank, if there is no next micro-batch or it cannot be sliced.
    """
    names = [name for name in _DTYPES if name in (*keys, *_BORDERS)]
    if tp.rank() > 0:
        return _receive(names, tp, device)
    try:
        packed = _next_slice(data_iterator, names, cp)
    except Exception as error:
        if tp.size() > 1:
            _send_failure(error, tp, device)
        raise
    packed = packed._replace(fields={k: value.to(device) for k, value in packed.fields.items()})
    if tp.size() > 1:
        _send(packed, names, tp, device)
    return packed


def _next_slice(
    data_iterator: Iterator[Sample] | None, names: Sequence[str], cp: ProcessGroup
) -> PackedFields:
    if data_iterator is None:
        raise RuntimeError(
            "tensor-parallel rank 0 got no packed iterator; pass the first element of what "
            "wrap_data_iterator_for_global_batch_packing returned"
        )
    try:
        microbatch = next(data_iterator)
    except StopIteration:
        raise RuntimeError(
            "the step has no further packed micro-batch; run as many as "
            "wrap_data_iterator_for_global_batch_packing returned, not num_microbatches"
        ) from None
    missing = [name for name in names if name not in microbatch]
    if missing:
        raise RuntimeError(f"the packed micro-batch has no {', '.join(missing)}")
    local_cp_size = int(microbatch.get("local_cp_size", 0))
    # With a group of its own, a micro-batch came as slices.
    held = (
        microbatch
        if local_cp_size
        else slice_for_cp(microbatch, cp_size=cp.size(), cp_rank=cp.rank())
    )
    return PackedFields(
        {name: held[name] for name in names}, int(microbatch["max_seqlen"]), local_cp_size
    )


def _send(
    packed: PackedFields, names: Sequence[str], tp: ProcessGroup, device: torch.device
) -> None:
    sequences = len(packed.fields["cu_seqlens"]) - 1
    tokens = next((len(packed.fields[n]) for n in names if n not in _BORDERS), 0)
    header = _Header(tokens, sequences, packed.max_seqlen, packed.local_cp_size, 0)
    _broadcast_header(header, tp, device)
    parts = [packed.fields[name].contiguous().view(torch.uint8) for name in names]
    dist.broadcast(torch.cat(parts), group=tp, group_src=0)


def _receive(names: Sequence[str], tp: ProcessGroup, device: torch.device) -> PackedFields:
    header = _broadcast_header(None, tp, device)
    if header.error_bytes:
        text = torch.empty(header.error_bytes, dtype=torch.uint8, device=device)
        dist.broadcast(text, group=tp, group_src=0)
        raise RuntimeError(
            "tensor-parallel rank 0 could not fetch the packed micro-batch: "
            + bytes(text.tolist()).decode()
        )
    counts = [
        (header.sequences + 1 if name in _BORDERS else header.tokens) * _DTYPES[name].itemsize
        for name in names
    ]
    buffer = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, group=tp, group_src=0)
    parts = torch.split(buffer, counts)
    fields = {name: part.view(_DTYPES[name]) for name, part in zip(names, parts, strict=True)}
    return PackedFields(fields, header.max_seqlen, header.local_cp_size)


def _send_failure(error: Exception, tp: ProcessGroup, device: torch.device) -> None:
    text = f"{type(error).__name__}: {error}".encode()
    _broadcast_header(_Header(0, 0, 0, 0, len(text)), tp, device)
    dist.broadcast(
        torch.tensor(list(text), dtype=torch.uint8, device=device), group=tp, group_src=0
    )


def _broadcast_header(header: _Header | None, tp: ProcessGroup, device: torch.device) -> _Header:
    values = torch.tensor(header or _Header(0, 0, 0, 0, 0), dtype=torch.int64, device=device)
    dist.broadcast(values, group=tp, group_src=0)
    return _Header(*values.tolist())
