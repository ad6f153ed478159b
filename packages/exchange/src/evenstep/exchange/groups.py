"""Process groups for the exchange: created together, destroyed in the right order."""

import hashlib
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from evenstep.exchange.waiting import is_alive


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroups:
    """The groups of one module's data-parallel ranks, and the duty to destroy the created ones.

    Use it as a context manager, or call `close` once the last exchange has ended.

    Attributes:
        rank: This rank among the module's DP ranks.
        world_size: The module's DP size.
        fingerprint: Of the members of every module's group, in order; equal on all ranks of the
            world. Put it among the settings that an exchange compares.
        control: Gloo group for the metadata.
        payload: Group for the samples.
        owned: The created ones among them, in the order in which to destroy them.
    """

    rank: int
    world_size: int
    fingerprint: str
    control: dist.ProcessGroup
    payload: dist.ProcessGroup
    owned: tuple[dist.ProcessGroup, ...]

    @classmethod
    def create(cls, main: dist.ProcessGroup, *, overlap: bool) -> Self:
        """Create the groups next to `main`; every rank of the world must call this.

        `torch.distributed.new_group` is collective over the world. So the ranks first tell each
        other the leader of their module's group, then all create every module's groups, in the
        order of the leaders.

        Args:
            main: This rank's main DP group, of any backend.
            overlap: Create a group of its own for the samples, of `main`'s backend, so that they
                can move while `main` is in use; otherwise `main` carries them.

        Raises:
            ValueError: On every rank, if a rank is not in its `main`, or two modules' overlap.
        """
        modules = _modules(main)
        mine: list[dist.ProcessGroup] = []
        backends = ["gloo", dist.get_backend(main)] if overlap else ["gloo"]
        for members in modules:
            created = [_new_group(members, backend) for backend in backends]
            if dist.get_rank() in members:
                mine = [group for group in created if isinstance(group, dist.ProcessGroup)]
        return cls(
            rank=dist.get_rank(main),
            world_size=dist.get_world_size(main),
            fingerprint=hashlib.blake2b(repr(modules).encode(), digest_size=8).hexdigest(),
            control=mine[0],
            payload=mine[1] if overlap else main,
            owned=tuple(reversed(mine)),
        )

    def close(self) -> None:
        """Destroy the created groups; no exchange may be under way on any rank."""
        for group in self.owned:
            if is_alive(group):
                dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def build_module_dp_process_groups(
    dp_group_nccl_main: dist.ProcessGroup, *, overlap: bool
) -> tuple[int, int, dist.ProcessGroup, dist.ProcessGroup]:
    """Create the Gloo group and the side group of this rank's module DP group.

    Every rank of the world must call this. See `ModuleGroups`, which also destroys them.

    Args:
        dp_group_nccl_main: This rank's main DP group; NCCL, or Gloo on a machine without GPUs.
        overlap: Create a separate group for the side-stream exchange; otherwise reuse the main one.

    Returns:
        (dp_rank, dp_size, dp_group_gloo, dp_group_nccl).

    Raises:
        ValueError: If this rank is not in the group, or two modules' groups overlap.
    """
    groups = ModuleGroups.create(dp_group_nccl_main, overlap=overlap)
    return groups.rank, groups.world_size, groups.control, groups.payload


def _modules(main: object) -> list[list[int]]:
    """Return the members of every module's group, in the order of their first rank.

    What is wrong with one rank's group is found after all have told theirs, and so by all.
    """
    me, world_size = dist.get_rank(), dist.get_world_size()
    ranks = dist.get_process_group_ranks(main) if isinstance(main, dist.ProcessGroup) else []
    mine = [ranks[0], ranks.index(me), len(ranks)] if me in ranks else [-1, -1, 0]
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    told = torch.empty(3 * world_size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(told, torch.tensor(mine, device=device))
    modules: dict[int, list[tuple[int, int, int]]] = {}
    for rank, (leader, place, size) in enumerate(told.view(-1, 3).tolist()):
        if size == 0:
            raise ValueError(
                f"dp_group_nccl_main of rank {rank} is no process group that it is in; it must be "
                "the group of that rank's data parallelism, created by torch.distributed"
            )
        modules.setdefault(leader, []).append((place, rank, size))
    for leader, members in modules.items():
        places = sorted(place for place, _, _ in members)
        if any(places != [*range(size)] for _, _, size in members):
            raise ValueError(
                f"the data-parallel groups led by rank {leader} overlap; each rank of the world "
                "must pass the one group of its own module"
            )
    return [[rank for _, rank, _ in sorted(modules[leader])] for leader in sorted(modules)]


def _new_group(members: list[int], backend: str) -> object:
    if members == sorted(members):
        return dist.new_group(members, backend=backend)
    return dist.new_group(members, backend=backend, sort_ranks=False)  # newer releases of torch
