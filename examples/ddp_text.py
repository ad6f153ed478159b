"""Plain DDP on texts of unequal length, balanced: `balance_loader` is the import and one call.

uv run torchrun --standalone --nproc-per-node 2 examples/ddp_text.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from evenstep.reorder_buffer import SAMPLE_LIST, TextCost, balance_loader

if "RANK" not in os.environ:
    raise SystemExit(__doc__)
torch.manual_seed(0)
dist.init_process_group("gloo")
lengths = torch.empty(128).log_normal_(3.5, 1).clip(2, 200).int().tolist()
samples: Any = [{"ids": torch.randint(1, 100, (length,))} for length in lengths]
sampler: DistributedSampler[Any] = DistributedSampler(samples)
loader = DataLoader(samples, 8, sampler=sampler, collate_fn=list, drop_last=True)
batches = balance_loader(loader, TextCost(field="ids", ignore=None), layout=SAMPLE_LIST)

layers = [torch.nn.Embedding(100, 64), torch.nn.Linear(64, 256), torch.nn.ReLU()]
model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(256, 100)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(3):
    batches.set_epoch(epoch)
    slowest = mean = 0.0
    for batch in batches:
        ids = torch.cat([sample["ids"][:-1] for sample in batch])
        targets = torch.cat([sample["ids"][1:] for sample in batch])
        total, largest = torch.tensor([[float(len(ids))]] * 2)
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        slowest, mean = slowest + largest.item(), mean + total.item() / dist.get_world_size()
        # The mean is over the global batch, wherever its samples are; DDP divides by the ranks.
        loss = cross_entropy(model(ids), targets, reduction="sum") / total
        (loss * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}, largest / mean tokens {slowest / mean:.3f}")
batches.close()
dist.destroy_process_group()
