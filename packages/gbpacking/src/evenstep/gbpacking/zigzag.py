"""Which tokens of a packed micro-batch a context-parallel rank holds.

Causal attention makes late tokens dearer than early ones. So each sequence is cut into 2 x CP
equal chunks, and rank r takes chunk r and chunk 2 x CP - 1 - r: one cheap, one dear. This is the
order that Megatron-Core's and Transformer Engine's attention expect (Transformer Engine's
`thd_get_partitioned_indices`), computed here without either.
"""

import torch


def zigzag_indices(cu_seqlens_padded: torch.Tensor, *, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Return the positions in the pack that one rank holds, in the rank's order.

    Args:
        cu_seqlens_padded: Where each sequence starts, padding included, and where the last one
            ends: integers `[sequences + 1]`, from 0.
        cp_size: Ranks that share the pack, at least 1.
        cp_rank: This rank among them.

    Returns:
        int64 `[tokens / cp_size]`, on the device of `cu_seqlens_padded`.

    Raises:
        ValueError: If a length is not a multiple of 2 x CP, or the rank is outside the group.
    """
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank} of cp_size {cp_size}; it must be 0 <= rank < size")
    starts = cu_seqlens_padded.to(torch.int64)
    if cp_size == 1:
        return torch.arange(int(starts[-1]), device=starts.device)
    lengths = starts.diff()
    chunk = lengths // (2 * cp_size)
    if bool((chunk * (2 * cp_size) != lengths).any()):
        bad = int((lengths % (2 * cp_size)).nonzero()[0])
        raise ValueError(
            f"sequence {bad} of the pack has {int(lengths[bad])} tokens; context parallelism of "
            f"{cp_size} needs a multiple of {2 * cp_size}, pad samples with padding_multiple()"
        )
    # Two chunks per sequence, in order: [first chunk, mirrored chunk] of each.
    chunk_starts = torch.stack(
        [starts[:-1] + cp_rank * chunk, starts[:-1] + (2 * cp_size - 1 - cp_rank) * chunk], dim=1
    ).flatten()
    sizes = chunk.repeat_interleave(2)
    shifts = chunk_starts - (sizes.cumsum(0) - sizes)  # of each chunk: from this rank to the pack
    held = shifts.repeat_interleave(sizes)
    return held + torch.arange(len(held), device=starts.device)
