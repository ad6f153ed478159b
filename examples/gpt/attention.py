"""Core attention that understands packed sequences, in plain PyTorch, on any device.

Megatron-Core's own `DotProductAttention` refuses packed sequences and context parallelism;
Transformer Engine's attention does both, but only on a GPU. This one takes its place in the local
layer spec, for runs on CPUs. It loops over the sequences and gathers keys and values over the CP
group: clear, not fast.
"""

from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch.autograd.function import FunctionCtx
from torch.nn.functional import scaled_dot_product_attention

from evenstep.gbpacking import zigzag_indices


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence of a THD pack, or over one unpacked row.

    It is built and called as Megatron-Core does with every core attention, and needs little of it:
    the attention is causal, without bias and without dropout.
    """

    def __init__(self, *_: object, layer_number: int, **__: object) -> None:
        super().__init__()
        self.layer_number = layer_number  # Megatron-Core's blocks read it

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: `[tokens, heads, dim]` when packed, else `[tokens, batch, heads, dim]`.
            key: Like `query`, perhaps with fewer heads (grouped queries).
            value: Like `key`.
            packed_seq_params: Borders of the sequences, and the CP group that shares them.

        Returns:
            `[tokens, heads * dim]` when packed, else `[tokens, batch, heads * dim]`.
        """
        if packed_seq_params is None:
            q, k, v = (rows.permute(1, 2, 0, 3) for rows in (query, key, value))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2)
        group, borders = packed_seq_params.cp_group, packed_seq_params.cu_seqlens_q_padded
        # A rank that is alone in its micro-batch (dynamic context parallelism) has no group.
        cp_size, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
        positions = zigzag_indices(borders, cp_size=cp_size, cp_rank=cp_rank)
        keys, values = (_whole_pack(rows, borders, group) for rows in (key, value))
        parts = [
            _attend(query, keys, values, positions, start, end)
            for start, end in pairwise(borders.tolist())
        ]
        return torch.cat(parts).flatten(1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    start: int,
    end: int,
) -> torch.Tensor:
    """Attend inside one sequence: this rank's queries of it, all its keys up to each query."""
    mine = (positions >= start) & (positions < end)
    visible = torch.arange(start, end, device=positions.device) <= positions[mine].unsqueeze(1)
    out = scaled_dot_product_attention(
        query[mine].transpose(0, 1).unsqueeze(0),
        keys[start:end].transpose(0, 1).unsqueeze(0),
        values[start:end].transpose(0, 1).unsqueeze(0),
        attn_mask=visible,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


def _whole_pack(
    part: torch.Tensor, cu_seqlens_padded: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the rows of all CP ranks in the order of the pack."""
    if group is None or group.size() == 1:
        return part
    gathered = cast("torch.Tensor", _Gather.apply(part, group))
    order = torch.cat(
        [
            zigzag_indices(cu_seqlens_padded, cp_size=group.size(), cp_rank=rank)
            for rank in range(group.size())
        ]
    )
    return gathered[order.argsort()]


class _Gather(torch.autograd.Function):
    """Concatenate the rows of a group; backward, each rank gets the sum of its rows' gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group  # type: ignore[attr-defined] # how autograd functions keep things
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        group = ctx.group  # type: ignore[attr-defined] # as above
        total = grads[0].contiguous()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()], None
