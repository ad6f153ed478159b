"""One micro-batch on every tensor-parallel rank."""

from collections.abc import Iterator
from typing import Any

import pytest

from evenstep.gbpacking import Sample
from evenstep.gbpacking.stage import needed_keys
from tests.harness import RankPools

ALL = ("tokens", "labels", "loss_mask", "position_ids")


@pytest.mark.parametrize(
    ("pp_rank", "vp_stage", "vp_size", "mtp", "keys"),
    [
        (0, None, None, False, ("tokens", "position_ids")),
        (1, None, None, False, ()),
        (2, None, None, False, ("labels", "loss_mask")),
        (2, None, None, True, ALL),
        (0, 0, 2, False, ("tokens", "position_ids")),
        (0, 1, 2, False, ()),
        (2, 0, 2, False, ()),
        (2, 1, 2, False, ("labels", "loss_mask")),
        (2, None, 2, False, ("labels", "loss_mask")),
    ],
)
def test_a_stage_gets_what_it_reads(
    pp_rank: int, vp_stage: int | None, vp_size: int | None, mtp: bool, keys: tuple[str, ...]
) -> None:
    assert needed_keys(pp_rank, 3, vp_stage=vp_stage, vp_size=vp_size, has_mtp=mtp) == keys


def test_without_pipeline_a_stage_reads_everything() -> None:
    assert needed_keys(0, 1, vp_stage=None, vp_size=None, has_mtp=False) == ALL


def _fetch(rank: int, _: int, keys: tuple[str, ...]) -> dict[str, Any]:
    """TP over all ranks, no CP: a pack of two samples, fetched by all."""
    import torch
    import torch.distributed as dist

    from evenstep.gbpacking import build_unpacked_sample, pack_microbatch
    from evenstep.gbpacking.fetch import fetch_packed

    alone = dist.new_group([rank], use_local_synchronization=True)
    samples = [
        build_unpacked_sample([1, 2, 3], [2, 3, 4], multiple=4),
        build_unpacked_sample([5], [6], multiple=4, loss_mask=[0.5]),
    ]
    packed = pack_microbatch(samples, original=[3, 1], padded=[4, 4], keys=keys)
    iterator = iter([packed]) if rank == 0 else None
    assert isinstance(alone, dist.ProcessGroup)
    assert dist.group.WORLD is not None
    got = fetch_packed(
        iterator, keys=keys, tp=dist.group.WORLD, cp=alone, device=torch.device("cpu")
    )
    values = {key: (value.dtype, value.tolist()) for key, value in got.fields.items()}
    return {**values, "max_seqlen": got.max_seqlen}


@pytest.mark.parametrize("keys", [ALL, ("labels", "loss_mask"), ()])
def test_all_tensor_parallel_ranks_get_the_same(ranks: RankPools, keys: tuple[str, ...]) -> None:
    first, *others = ranks(4).run(_fetch, keys)
    assert others == [first] * 3
    assert set(first) == {*keys, "cu_seqlens", "cu_seqlens_padded", "max_seqlen"}
    assert first["cu_seqlens"][1] == [0, 3, 4]
    assert first["cu_seqlens_padded"][1] == [0, 4, 8]
    if keys == ALL:
        assert first["tokens"][1] == [1, 2, 3, 0, 5, 0, 0, 0]
        assert first["loss_mask"][1] == [1, 1, 1, 0, 0.5, 0, 0, 0]


def _fetch_fails(rank: int, _: int, has_iterator: bool) -> str:
    import torch
    import torch.distributed as dist

    from evenstep.gbpacking.fetch import fetch_packed

    alone = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    assert dist.group.WORLD is not None
    iterator: Iterator[Sample] | None = iter([]) if rank == 0 and has_iterator else None
    try:
        fetch_packed(iterator, keys=ALL, tp=dist.group.WORLD, cp=alone, device=torch.device("cpu"))
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("has_iterator", "message"),
    [(True, "no further packed micro-batch"), (False, "got no packed iterator")],
)
def test_tensor_parallel_ranks_fail_together(
    ranks: RankPools, has_iterator: bool, message: str
) -> None:
    first, *others = ranks(4).run(_fetch_fails, has_iterator)
    assert message in first
    for other in others:
        assert message in other
        assert "tensor-parallel rank 0 could not fetch" in other
