"""Process groups for the exchange: created together, destroyed in the right order."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroups:
    """The groups of one module's data-parallel ranks, and the duty to destroy the created ones.

    Use it as a context manager, or call `close` once the last exchange has ended.

    Attributes:
        rank: This rank among the module's DP ranks.
        world_size: The module's DP size.
        control: Gloo group for the metadata.
        payload: Group for the samples.
        owned: The created ones among them, in the order in which to destroy them.
    """

    rank: int
    world_size: int
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
            ValueError: If this rank is not in `main`, or two modules' groups overlap.
        """
        ranks = _members(main)
        mine: list[dist.ProcessGroup] = []
        backends = ["gloo", dist.get_backend(main)] if overlap else ["gloo"]
        for members in _modules(ranks):
            created = [_new_group(members, backend) for backend in backends]
            if members == ranks:
                mine = [group for group in created if isinstance(group, dist.ProcessGroup)]
        return cls(
            rank=dist.get_rank(main),
            world_size=len(ranks),
            control=mine[0],
            payload=mine[1] if overlap else main,
            owned=tuple(reversed(mine)),
        )

    def close(self) -> None:
        """Destroy the created groups; no exchange may be under way on any rank."""
        for group in self.owned:
            if _is_alive(group):
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


def _members(main: dist.ProcessGroup) -> list[int]:
    if not isinstance(main, dist.ProcessGroup):
        raise ValueError(
            f"dp_group_nccl_main is {main!r}; it must be the process group of this rank's data "
            "parallelism, created by torch.distributed"
        )
    return dist.get_process_group_ranks(main)


def _modules(ranks: list[int]) -> list[list[int]]:
    """Return the members of every module's group, in the order of their first rank."""
    world_size = dist.get_world_size()
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    mine = torch.tensor([ranks[0], ranks.index(dist.get_rank())], device=device)
    places = torch.empty(2 * world_size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(places, mine)
    modules: dict[int, list[tuple[int, int]]] = {}
    for rank, (leader, place) in enumerate(places.view(-1, 2).tolist()):
        modules.setdefault(leader, []).append((place, rank))
    for leader, members in modules.items():
        if sorted(place for place, _ in members) != [*range(len(members))]:
            raise ValueError(
                f"the data-parallel groups led by rank {leader} overlap; each rank of the world "
                "must pass the one group of its own module"
            )
    return [[rank for _, rank in sorted(modules[leader])] for leader in sorted(modules)]


def _new_group(members: list[int], backend: str) -> object:
    if members == sorted(members):
        return dist.new_group(members, backend=backend)
    return dist.new_group(members, backend=backend, sort_ranks=False)  # newer releases of torch


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True
