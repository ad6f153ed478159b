"""Micro-batches of samples that are known by their number, and a cost that only depends on it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstep.exchange import ModuleGroups
from evenstep.reorder_buffer import ReorderingBuffer
from tests.exchange.samples import hold_rounds
from tests.reorder_buffer.microbatches import assert_same

LENGTH = 6
WIDTH = 5


def microbatch(
    numbers: Sequence[int], *, max_images: int = 3, names: bool = True
) -> dict[str, Any]:
    """Build the micro-batch of these samples; each has its number modulo max_images + 1 images.

    Without names it is all tensors, which are cut by arithmetic, and lent within a node.
    """
    counts = [number % (max_images + 1) for number in numbers]
    grid = [[1, number % 3, i + 1] for number in numbers for i in range(number % (max_images + 1))]
    patches = [
        torch.randn(t * h * w, WIDTH, generator=torch.Generator().manual_seed(h * 10 + w))
        for t, h, w in grid
    ]
    tokens = torch.tensor([*numbers]).view(-1, 1) * 100 + torch.arange(LENGTH)
    listed = {"names": [f"sample {number}" for number in numbers]} if names else {}
    return {
        "input_ids": tokens,
        "loss_mask": tokens.to(torch.float32) / 7,
        "attention_mask": tokens % 3 > 0,
        "position_ids": tokens.expand(3, -1, -1).contiguous(),
        "num_images": torch.tensor(counts),
        **listed,
        "modality_inputs": {
            "images": {
                "clip": {
                    "hidden_states": torch.cat([torch.empty(0, WIDTH), *patches]),
                    "grid_thw": torch.tensor(grid, dtype=torch.int64).view(-1, 3),
                }
            }
        },
    }


def numbers_in(batch: dict[str, Any]) -> list[int]:
    """Return the numbers of a micro-batch's samples."""
    found: list[int] = (batch["input_ids"][:, 0] // 100).tolist()
    return found


def image_counts(batch: dict[str, Any]) -> torch.Tensor:
    """Return the images per sample, as `image_count_of` does."""
    counts: torch.Tensor = batch["num_images"]
    return counts


def cost_of(flat: dict[str, Any], /) -> float:
    """Return a cost between 1 and 101, scattered over the numbers."""
    return float(int(flat["input_ids"].flatten()[0]) // 100 * 7919 % 101) + 1.0


def shard(slot: int, rank: int, world_size: int, size: int) -> list[int]:
    """Return the numbers that a rank reads at one slot: of all ranks together, all numbers."""
    start = (slot * world_size + rank) * size
    return [*range(start, start + size)]


def data(
    rank: int, world_size: int, *, slots: int, size: int = 4, names: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a rank's micro-batches."""
    for slot in range(slots):
        yield microbatch(shard(slot, rank, world_size, size), names=names)


def checked(batch: dict[str, Any], *, max_images: int = 3) -> list[int]:
    """Return the numbers of a micro-batch that is, byte for byte, what its samples are."""
    numbers = numbers_in(batch)
    assert_same(batch, microbatch(numbers, max_images=max_images, names="names" in batch))
    return numbers


def groups(size: int | None = None) -> ModuleGroups:
    """Create groups over the first `size` ranks of the test, and others over the rest."""
    everyone = [*range(dist.get_world_size())]
    size = size or len(everyone)
    mains = [dist.new_group(part) for part in (everyone[:size], everyone[size:]) if part]
    mine = mains[dist.get_rank() >= size]
    assert isinstance(mine, dist.ProcessGroup)
    return ModuleGroups.create(mine, overlap=True)


def over(made: ModuleGroups) -> dict[str, Any]:
    """Return the settings of a buffer that runs over these groups, one canonical group per rank."""
    return {
        "dp_rank": made.rank,
        "dp_size": made.world_size,
        "n_groups": made.world_size,
        "dp_group_gloo": made.control,
        "dp_group_nccl": made.payload,
    }


def buffer(source: Any, made: ModuleGroups, **settings: Any) -> ReorderingBuffer[dict[str, Any]]:
    """Wrap a source of numbered micro-batches; where the caller launches, rounds are over Gloo."""
    hold_rounds(over_gloo=settings.get("launch") == "caller")
    return ReorderingBuffer(
        source, image_count_of=image_counts, **{**over(made), "cost_of": cost_of, **settings}
    )


MODES: dict[str, dict[str, Any]] = {
    "inline": {"overlap": False},
    "worker": {"overlap": True, "launch": "worker"},
    "caller": {"overlap": True, "launch": "caller"},
}
"""Settings of the three ways in which a buffer can work, by name."""
