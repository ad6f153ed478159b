"""Joining the process group, and leaving it together."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


class Ranks(NamedTuple):
    """This process's place among all processes of the run."""

    rank: int
    num_ranks: int
    device: torch.device


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or be the only one; leave at the end.

    Uses NCCL where each local rank has its own GPU, Gloo with CPU cores shared evenly otherwise.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= num_local_ranks:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_local_ranks))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # exported, if not by __all__
        dist.init_process_group(backend, rank=0, world_size=1, store=store)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def agreed(value: Value | ValueError, ranks: Ranks) -> Value:
    """Return the value if every rank has one; otherwise end all ranks together.

    The first rank that has an error in its place prints it, in one line.

    Raises:
        SystemExit: With code 2 on every rank, if any rank has an error.
    """
    failed = isinstance(value, ValueError)
    first = torch.tensor(ranks.rank if failed else ranks.num_ranks, device=ranks.device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if first == ranks.rank:
        print(f"{Path(sys.argv[0]).name}: error: {value}", file=sys.stderr, flush=True)
    if first < ranks.num_ranks:
        dist.all_reduce(first)  # torchrun kills the rest when one rank ends: print before that
        sys.exit(2)
    assert not isinstance(value, ValueError)
    return value
