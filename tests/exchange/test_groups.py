"""Process groups of modules: created together, checked together, destroyed in order."""

import re
from typing import Any

import pytest

from evenstep.exchange import ModuleGroups, build_module_dp_process_groups
from tests.exchange.samples import gloo_group
from tests.harness import RankPools


def _two_modules(rank: int, _world_size: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    swapped = gloo_group([2, 0], sort_ranks=False)  # ranks of the group in another order
    alone = gloo_group([1])
    main = alone if rank == 1 else swapped
    seen: dict[str, Any] = {}
    for overlap in (True, False):
        with ModuleGroups.create(main, overlap=overlap) as groups:
            seen[f"place, {overlap}"] = (groups.rank, groups.world_size)
            seen[f"fingerprint, {overlap}"] = groups.fingerprint
            members = [dist.get_process_group_ranks(g) for g in (groups.control, groups.payload)]
            seen[f"members, {overlap}"] = members
            seen[f"shares main, {overlap}"] = groups.payload is main
            total = torch.tensor(rank)
            dist.all_reduce(total, group=groups.control)
            seen[f"sum, {overlap}"] = int(total)
        groups.close()  # a second time does nothing
        assert dist.get_process_group_ranks(main)  # not ours, so it lives on
        with pytest.raises((KeyError, ValueError)):
            dist.get_process_group_ranks(groups.control)
    dp_rank, dp_size, control, payload = build_module_dp_process_groups(main, overlap=True)
    seen["contract"] = (dp_rank, dp_size, control is payload, payload is main)
    return seen


def test_each_module_gets_its_groups(ranks: RankPools) -> None:
    results = ranks(3).run(_two_modules)
    assert len({seen["fingerprint, True"] for seen in results}) == 1
    for overlap in (True, False):
        assert [seen[f"place, {overlap}"] for seen in results] == [(1, 2), (0, 1), (0, 2)]
        assert [seen[f"sum, {overlap}"] for seen in results] == [2, 1, 2]
        assert results[0][f"members, {overlap}"] == [[2, 0], [2, 0]]
        assert results[1][f"members, {overlap}"] == [[1], [1]]
        assert all(seen[f"shares main, {overlap}"] is not overlap for seen in results)
    assert [seen["contract"] for seen in results] == [
        (1, 2, False, False),
        (0, 1, False, False),
        (0, 2, False, False),
    ]


def _bad_mains(rank: int, _world_size: int) -> list[str]:
    first, second = gloo_group([0, 1]), gloo_group([1, 2])
    everyone = gloo_group()
    told = []
    for main in (
        second if rank == 2 else first,
        "dp" if rank == 1 else everyone,
        first,  # which rank 2 is not in
    ):
        with pytest.raises(ValueError, match=r"data.parallel") as error:
            ModuleGroups.create(main, overlap=False)  # type: ignore[arg-type] # on purpose
        told.append(str(error.value))
    return told


def test_a_bad_group_on_one_rank_is_refused_by_all(ranks: RankPools) -> None:
    for overlapping, no_group, outside in ranks(3).run(_bad_mains):
        assert re.match("the data-parallel groups led by rank 1 overlap", overlapping)
        assert re.match("dp_group_nccl_main of rank 1 is no process group that it is in", no_group)
        assert re.match("dp_group_nccl_main of rank 2 is no process group that it is in", outside)
