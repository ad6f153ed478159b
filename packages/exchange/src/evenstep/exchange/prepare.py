"""The exchange plan as the reorder buffer's contract has it, with metadata as dicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenstep.balance import Route
from evenstep.exchange.moves import Moves, Placement, plan_moves
from evenstep.serialize import (
    FlatSample,
    SampleMeta,
    pack_samples,
    sample_byte_size,
    sample_keys,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedExchange:
    """What one rank needs to run one `all_to_all_single`; also answers `plan["send_buf"]`.

    Attributes:
        local_samples: `(dst_slot, canonical_pos, local_idx)` of the samples kept here.
        send_buf: uint8 [sum of send_splits], the samples by destination.
        send_splits: Bytes for each rank.
        recv_splits: Bytes from each rank.
        recv_schedule: For each other rank with samples for this one, their
            `(dst_slot, canonical_pos, src_local_idx)` in the order of their bytes.
        moves: The plan behind it.
    """

    local_samples: list[Placement]
    send_buf: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    recv_schedule: dict[int, list[Placement]]
    moves: Moves

    def __getitem__(self, name: str) -> Any:  # the contract's dict of mixed values
        if name not in self.__slots__:
            raise KeyError(name)
        return getattr(self, name)


def prepare_sample_exchange(
    local_flats: Sequence[FlatSample],
    local_global_indices: Sequence[int],
    route: Sequence[tuple[int, int, int]],
    all_global_indices: Sequence[Sequence[int]],
    all_tensor_meta: Sequence[Sequence[SampleMeta]],
    dp_rank: int,
    dp_size: int,
    *,
    window_size: int = 1,
) -> PreparedExchange:
    """Build the kept-local partition, the packed send buffer and the splits of one exchange.

    Sender and receiver sort by (dst_slot, canonical_pos, src_local_idx), so the packed bytes and
    `recv_schedule` line up without further communication.

    Args:
        local_flats: This rank's flat samples in local order.
        local_global_indices: Global index of each of them.
        route: `(dst_slot, owner_rank, canonical_pos)` per global sample index.
        all_global_indices: Global indices that each rank holds.
        all_tensor_meta: `tensor_metadata` of each rank's samples.
        dp_rank: This rank.
        dp_size: Number of ranks.
        window_size: Number of slots; every `dst_slot` must be in [0, window_size).

    Returns:
        The prepared exchange.

    Raises:
        ValueError: If a `dst_slot` is outside the window, or the arguments do not fit together.
        RuntimeError: If the route names a rank that does not exist.
    """
    routes = [Route(*entry) for entry in route]
    for index, (slot, _, _) in enumerate(routes):
        if not 0 <= slot < window_size:
            raise ValueError(
                f"route[{index}] has dst_slot {slot}; it must be in [0, {window_size}), the window"
            )
    _check_indices(
        local_flats, local_global_indices, all_global_indices, all_tensor_meta, dp_rank, dp_size
    )
    holders = _holders(all_global_indices, len(routes))
    nbytes = [
        sample_byte_size(meta, sample_keys(meta))
        for meta in (all_tensor_meta[rank][local] for rank, local in holders)
    ]
    moves = plan_moves(
        enumerate(routes),
        holders=torch.tensor(holders, dtype=torch.int64).view(-1, 2),
        nbytes=torch.tensor(nbytes, dtype=torch.int64),
        rank=dp_rank,
        world_size=dp_size,
    )
    outgoing = [_tensors(local_flats[place.local_idx]) for to in moves.sends for place in to]
    return PreparedExchange(
        local_samples=[*moves.kept],
        send_buf=pack_samples(outgoing),
        send_splits=[*moves.send_splits],
        recv_splits=[*moves.recv_splits],
        recv_schedule={peer: [*places] for peer, places in enumerate(moves.receives) if places},
        moves=moves,
    )


def _tensors(flat: FlatSample) -> dict[str, torch.Tensor | None]:
    """Return the tensors of a flat sample; its plain values travel in the metadata."""
    return {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}


def _holders(all_global_indices: Sequence[Sequence[int]], total: int) -> list[tuple[int, int]]:
    holders: list[tuple[int, int] | None] = [None] * total
    for rank, indices in enumerate(all_global_indices):
        for local, index in enumerate(indices):
            if not 0 <= index < total:
                raise ValueError(
                    f"rank {rank} holds the global index {index}, but route has {total} entries"
                )
            if holders[index] is not None:
                raise ValueError(f"global index {index} is held twice, the second time by {rank}")
            holders[index] = (rank, local)
    found = [holder for holder in holders if holder is not None]
    if len(found) < total:
        raise ValueError(f"no rank holds the global index {holders.index(None)} of route")
    return found


def _check_indices(
    local_flats: Sequence[FlatSample],
    local_global_indices: Sequence[int],
    all_global_indices: Sequence[Sequence[int]],
    all_tensor_meta: Sequence[Sequence[Mapping[str, object]]],
    dp_rank: int,
    dp_size: int,
) -> None:
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank is {dp_rank}; it must be in [0, {dp_size})")
    for name, given in (
        ("all_global_indices", all_global_indices),
        ("all_tensor_meta", all_tensor_meta),
    ):
        if len(given) != dp_size:
            raise ValueError(f"{name} has {len(given)} entries; it needs one per rank, {dp_size}")
    for rank, (indices, metas) in enumerate(zip(all_global_indices, all_tensor_meta, strict=True)):
        if len(indices) != len(metas):
            raise ValueError(
                f"rank {rank} has {len(indices)} global indices and metadata of {len(metas)}"
            )
    if [*local_global_indices] != [*all_global_indices[dp_rank]]:
        raise ValueError("local_global_indices differs from all_global_indices[dp_rank]")
    if len(local_flats) != len(local_global_indices):
        raise ValueError(
            f"{len(local_flats)} local_flats for {len(local_global_indices)} global indices"
        )
