"""The context-parallel groups of dynamic context parallelism, made once and kept.

Of each size there are as many groups as fit side by side into the domain (all DP x CP ranks of a
model), and every rank is in one of them: ranks 0 to s - 1, s to 2 s - 1, and so on. Megatron-Core
makes such groups where it is started with hybrid (releases) or dynamic (dev) context parallelism;
they are taken from there. The others are made here, by their members alone, smallest size first.
"""

import sys
from collections.abc import Iterable
from typing import Final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from evenstep.gbpacking.links import ranks_of

_MEGATRON_GETTERS: Final = (
    "get_dynamic_data_context_parallel_groups",
    "get_hybrid_data_context_parallel_groups",
)

_groups: dict[ProcessGroup, dict[int, ProcessGroup]] = {}  # by domain and size
_made: list[ProcessGroup] = []  # by us, in this order


def prepare_cp_groups(domain: ProcessGroup, sizes: Iterable[int]) -> None:
    """Make sure that this rank has its groups of these sizes; every rank of the domain must call.

    Calling it again costs nothing: groups live until `destroy_cp_groups`.

    Args:
        domain: All DP x CP ranks of a model.
        sizes: Group sizes, each dividing the domain's; 1 needs no group.
    """
    _forget_destroyed()
    known = _groups.setdefault(domain, {domain.size(): domain})
    for size in sorted({*sizes} - {1} - known.keys()):
        start = domain.rank() // size * size
        members = dist.get_process_group_ranks(domain)[start : start + size]
        known[size] = _megatrons_group(members) or _new_group(members, dist.get_backend(domain))


def cp_group_of(domain: ProcessGroup, size: int) -> ProcessGroup | None:
    """Return this rank's group of `size` ranks, None for a rank alone.

    Raises:
        RuntimeError: If `prepare_cp_groups` has not made it.
    """
    if size == 1:
        return None
    group = _groups.get(domain, {}).get(size)
    if group is None:
        raise RuntimeError(
            f"there is no context-parallel group of {size} ranks; groups are made when a step is "
            "packed: fetch micro-batches with the process groups that it was packed with"
        )
    return group


def destroy_cp_groups() -> None:
    """Destroy the groups that were made here, in the order of their making.

    Every rank must call it, after its last micro-batch and before it destroys the domain's group.
    Groups that Megatron-Core made are left to it.
    """
    _forget_destroyed()
    _groups.clear()
    while _made:
        dist.destroy_process_group(_made.pop(0))


def _new_group(members: list[int], backend: str) -> ProcessGroup:
    group = dist.new_group(
        members,
        backend=backend,
        use_local_synchronization=True,
        group_desc=f"evenstep context-parallel group of {len(members)}",
    )
    assert isinstance(group, ProcessGroup)  # this rank is a member
    _made.append(group)
    return group


def _megatrons_group(members: list[int]) -> ProcessGroup | None:
    """Return the group of exactly these ranks that Megatron-Core has made, None if it has not."""
    # Never imported for this: where it was not, it has made no groups.
    state = sys.modules.get("megatron.core.parallel_state")
    for name in _MEGATRON_GETTERS:
        getter = getattr(state, name, None)
        if getter is None:
            continue
        try:
            group: ProcessGroup = getter(group_size=len(members))
        except (AssertionError, KeyError):  # not started, or without groups of this size
            continue
        if ranks_of(group) == members:
            return group
    return None


def _forget_destroyed() -> None:
    for domain, known in [*_groups.items()]:
        for size in [size for size, group in known.items() if ranks_of(group) is None]:
            del known[size]
        if domain.size() not in known:
            del _groups[domain]
    _made[:] = [group for group in _made if ranks_of(group) is not None]
