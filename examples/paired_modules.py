"""An encoder on some ranks and a language model on others, which balance without talking.

uv run torchrun --standalone --nproc-per-node 3 examples/paired_modules.py

Ranks 0 and 1 are the encoder (DP 2), rank 2 the language model (DP 1). Both read the same global
micro-batches, each rank its own contiguous share, and derive the same order from the same costs.
So the encoder's activations go to the language model by position alone, and sample i stays
sample i: each picture is a number drawn many times, and the text of its sample names that number.
"""

import math
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from evenstep.reorder_buffer import (
    BatchLayout,
    PairedCheck,
    ReorderingBuffer,
    SampleCost,
    build_module_dp_process_groups,
)

MODULES = {"encoder": [0, 1], "language": [2]}  # global ranks
GRID = math.lcm(*(len(ranks) for ranks in MODULES.values()))  # the canonical grid, n_groups
SAMPLES, STEPS, WINDOW = 8, 6, 2
IMAGE_TOKEN, LENGTH, WIDTH = 1, 12, 4


def main() -> None:
    """Run both modules side by side."""
    if "RANK" not in os.environ:  # not started by torchrun
        raise SystemExit(__doc__)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    modules = {name: new_group(ranks) for name, ranks in MODULES.items()}
    everyone = new_group([rank for ranks in MODULES.values() for rank in ranks])  # for the check
    name = next(name for name, ranks in MODULES.items() if rank in ranks)
    dp_rank, dp_size, gloo, payload = build_module_dp_process_groups(modules[name], overlap=True)
    with ReorderingBuffer(
        shard(name, dp_rank, dp_size),
        dp_rank=dp_rank,
        dp_size=dp_size,
        n_groups=GRID,
        # Tokens that stand for pictures are counted in the ids, which both modules hold.
        cost_of=SampleCost(encoder_cost_weight=1.0, image_token_id=IMAGE_TOKEN),
        dp_group_gloo=gloo,
        dp_group_nccl=payload,
        layout=BatchLayout(),
        window_size=WINDOW,
        paired=PairedCheck(group=everyone, every=2),
    ) as batches:
        step = encode if name == "encoder" else understand
        for batch in batches:
            step(batch)
    dist.destroy_process_group()


def new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Create a group; all ranks call this, also those outside."""
    group: dist.ProcessGroup = dist.new_group(ranks)  # type: ignore[assignment]  # -100 if outside
    return group


def shard(name: str, dp_rank: int, dp_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's contiguous share of each global micro-batch, with its module's fields."""
    size = SAMPLES // dp_size
    for step in range(STEPS):
        numbers = torch.arange(dp_rank * size, (dp_rank + 1) * size) + step * SAMPLES
        image_tokens = numbers * 7919 % (LENGTH - 2) + 1  # 1 to 10 per sample, scattered
        ids = torch.where(torch.arange(LENGTH) < image_tokens[:, None], IMAGE_TOKEN, 0)
        if name == "encoder":
            pictures = numbers[:, None].expand(-1, WIDTH).float()
            yield {"input_ids": ids, "pictures": pictures}
        else:
            yield {"input_ids": ids, "named": numbers}


def encode(batch: dict[str, torch.Tensor]) -> None:
    """Send this rank's activations to the language model."""
    activations = batch["pictures"].square()
    load = int((batch["input_ids"] == IMAGE_TOKEN).sum())
    (receiver,) = MODULES["language"]
    dist.send(torch.cat([activations, torch.full((1, WIDTH), float(load))]), receiver)


def understand(batch: dict[str, torch.Tensor]) -> None:
    """Join the encoder ranks' activations in rank order, and compare them with the text."""
    shares, loads = [], []
    for sender in MODULES["encoder"]:
        received = torch.empty(SAMPLES // len(MODULES["encoder"]) + 1, WIDTH)
        dist.recv(received, sender)
        shares.append(received[:-1])
        loads.append(int(received[-1, 0]))
    seen = torch.cat(shares)[:, 0].sqrt().round().long()
    assert torch.equal(seen, batch["named"]), (seen, batch["named"])
    print(f"order {batch['named'].tolist()}: pictures match; image tokens per encoder rank {loads}")


if __name__ == "__main__":
    main()
