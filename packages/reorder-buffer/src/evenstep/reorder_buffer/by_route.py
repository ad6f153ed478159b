"""The contract's two steps below a window: one all-to-all for a given route, and its reassembly."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from evenstep.exchange import Patience, PayloadGroup, PreparedExchange, prepare_sample_exchange
from evenstep.reorder_buffer.layout import MicroBatch
from evenstep.reorder_buffer.microbatch import merge_samples
from evenstep.serialize import FlatSample, SampleMeta, deserialize_sample, sample_keys

__all__ = ["exchange_by_route", "reassemble_window"]


def exchange_by_route(
    local_flats: Sequence[FlatSample],
    route: Sequence[tuple[int, int, int]],
    all_global_indices: Sequence[Sequence[int]],
    all_tensor_meta: Sequence[Sequence[SampleMeta]],
    *,
    dp_rank: int,
    dp_size: int,
    window_size: int,
    local: int,
    dp_group_nccl: dist.ProcessGroup | None,
    nccl_stream: torch.cuda.Stream | None = None,
) -> list[MicroBatch]:
    """Run one ragged `all_to_all_single` for `route` and reassemble W micro-batches.

    Every rank must call this with the same route, indices and metadata.

    Args:
        local_flats: This rank's input samples.
        route: `(dst_slot, owner_rank, canonical_pos)` per global sample index.
        all_global_indices: Global indices held by each rank.
        all_tensor_meta: `tensor_metadata` of each rank's samples.
        dp_rank: This rank's module-local DP rank.
        dp_size: This module's DP size.
        window_size: Number of micro-batch slots W.
        local: Samples per slot on this rank.
        dp_group_nccl: Process group for the samples, NCCL or Gloo; None if `dp_size` is 1.
        nccl_stream: Optional CUDA stream to run the all-to-all on.

    Returns:
        W micro-batches for this rank, slot s at index s.

    Raises:
        ValueError: If the arguments do not fit together.
        RuntimeError: If the route or what arrives is broken.
    """
    if local < 1:
        raise ValueError(f"local is {local}; a rank must own at least one sample of each slot")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(
            f"dp_rank is {dp_rank}; it must be in [0, {dp_size}), the DP group's ranks"
        )
    if dp_group_nccl is None and dp_size > 1:
        raise ValueError(f"dp_group_nccl is None; {dp_size} ranks need a group to move samples")
    plan = prepare_sample_exchange(
        local_flats,
        all_global_indices[dp_rank],
        route,
        all_global_indices,
        all_tensor_meta,
        dp_rank,
        dp_size,
        window_size=window_size,
    )
    payload = PayloadGroup(dp_group_nccl, stream=nccl_stream)
    with payload.scope():
        sent = plan.send_buf.to(payload.device)
        received = torch.empty(sum(plan.recv_splits), dtype=torch.uint8, device=payload.device)
        works = payload.start(sent, received, plan.moves)
    payload.finish(works, Patience())
    return reassemble_window(
        local_flats,
        plan,
        received.to(plan.send_buf.device),
        all_tensor_meta,
        dp_size=dp_size,
        window_size=window_size,
        local=local,
    )


def reassemble_window(
    local_flats: Sequence[FlatSample],
    plan: PreparedExchange,
    recv_buf: torch.Tensor,
    all_tensor_meta: Sequence[Sequence[SampleMeta]],
    *,
    dp_size: int,
    window_size: int,
    local: int,
) -> list[MicroBatch]:
    """Rebuild this rank's W micro-batches from kept-local and received samples.

    Args:
        local_flats: This rank's input samples; kept-local ones are indexed by `local_idx`.
        plan: Output of `prepare_sample_exchange`.
        recv_buf: uint8, the output buffer of the all-to-all.
        all_tensor_meta: `tensor_metadata` of each rank's samples, to decode `recv_buf`.
        dp_size: This module's DP size.
        window_size: Number of micro-batch slots W.
        local: Expected samples per slot on this rank.

    Returns:
        W micro-batches, slot s at index s, each in canonical order.

    Raises:
        RuntimeError: If the received byte count, a slot's sample count, or the canonical
            positions do not match `plan`.
    """
    expected = sum(plan["recv_splits"])
    if recv_buf.numel() != expected:
        raise RuntimeError(
            f"recv_buf has {recv_buf.numel()} bytes, and recv_splits are {expected} together"
        )
    slots: list[dict[int, FlatSample]] = [{} for _ in range(window_size)]
    for slot, position, index in plan["local_samples"]:
        _place(slots, slot, position, local_flats[index])
    offset = 0
    for source in range(dp_size):
        for slot, position, index in plan["recv_schedule"].get(source, ()):
            meta = all_tensor_meta[source][index]
            flat, offset = deserialize_sample(recv_buf, offset, meta, sample_keys(meta))
            _place(slots, slot, position, flat)
    if offset != expected:
        raise RuntimeError(f"the samples end at byte {offset} of {expected} in recv_buf")
    return [merge_samples(_in_order(slot, placed, local)) for slot, placed in enumerate(slots)]


def _place(slots: list[dict[int, FlatSample]], slot: int, position: int, flat: FlatSample) -> None:
    if not 0 <= slot < len(slots):
        raise RuntimeError(f"the plan names slot {slot} in a window of {len(slots)}")
    if position in slots[slot]:
        raise RuntimeError(f"slot {slot}: the plan has canonical position {position} twice")
    slots[slot][position] = flat


def _in_order(slot: int, placed: dict[int, FlatSample], local: int) -> list[FlatSample]:
    if len(placed) != local:
        raise RuntimeError(f"slot {slot}: {len(placed)} samples arrived, {local} were expected")
    first = min(placed)
    if first % local or max(placed) != first + local - 1:
        raise RuntimeError(
            f"slot {slot}: canonical positions {sorted(placed)} are not those of one rank, a block "
            f"of {local} consecutive ones"
        )
    return [placed[position] for position in sorted(placed)]
