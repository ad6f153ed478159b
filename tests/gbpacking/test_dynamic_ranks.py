"""Dynamic context parallelism on four ranks: who gets which slices, which groups there are."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstep.balance import SequenceLoad
from evenstep.gbpacking import DynamicCpOptions, Sample, build_unpacked_sample, zigzag_indices
from evenstep.gbpacking.dynamic_plan import DynamicStepRules
from evenstep.gbpacking.dynamic_step import DynamicStepScheduler
from evenstep.gbpacking.sample import TOKEN_KEYS
from tests.harness import RankPools

WORLD_SIZE = 4

LENGTHS = [[40, 3, 9, 2], [17, 5, 1, 24], [4, 4, 31, 6], [12, 7, 8, 2]]
"""Tokens of the samples of two steps, by data-parallel rank."""

Layout = tuple[int, int, int, int]
"""Ranks along TP, CP, DP and PP."""


def _groups(layout: Layout) -> Any:
    """Return this rank's groups, laid out as Megatron-Core does: TP fastest, then CP, DP, PP."""
    import torch.distributed as dist

    tp, cp, dp, pp = layout
    ranks = torch.arange(WORLD_SIZE).view(pp, dp, cp, tp)
    p, d, c, t = (int(i) for i in (ranks == dist.get_rank()).nonzero()[0])
    members = {
        "tp": ranks[p, d, c, :],
        "cp": ranks[p, d, :, t],
        "dp": ranks[p, :, c, t],
        "dp_cp": ranks[p, :, :, t].flatten(),
        "pp": ranks[:, d, c, t],
    }
    return SimpleNamespace(
        **{
            name: dist.new_group(of_group.tolist(), use_local_synchronization=True)
            for name, of_group in members.items()
        }
    )


def _scheduler(groups: Any, layout: Layout, **options: Any) -> DynamicStepScheduler:
    stage, last = groups.pp.rank(), groups.pp.size() - 1
    rules = DynamicStepRules(
        scheduler=options.get("scheduler", "evenstep_dynamic_cp"),
        tokens_per_rank=48 // groups.dp_cp.size(),
        num_ranks=groups.dp_cp.size(),
        multiple=options.get("multiple", 1),
        min_cp_size=1,
        load=SequenceLoad.from_hidden_size(64),
        options=DynamicCpOptions(
            timeout_s=30, communication=options.get("communication", [0.0] * 4)[groups.dp.rank()]
        ),
    )
    return DynamicStepScheduler(
        rules,
        groups,
        keys=() if 0 < stage < last else TOKEN_KEYS,
        multiple=2 * layout[1] * layout[2],
        device=torch.device("cpu"),
    )


def _sample(number: int, length: int, multiple: int) -> Sample:
    """Return a sample whose tokens tell sample and position apart."""
    tokens = [1000 * number + position for position in range(1, length + 1)]
    return build_unpacked_sample(tokens, tokens, multiple=multiple)


def _run(_: int, __: int, layout: Layout, options: dict[str, Any]) -> dict[str, Any]:
    """Run two steps; return this rank's packs, or the error's text."""
    from evenstep.gbpacking import cp_group_of, destroy_cp_groups

    groups = _groups(layout)
    multiple = 2 * layout[1] * layout[2]
    numbered = [(10 * groups.dp.rank() + i, n) for i, n in enumerate(LENGTHS[groups.dp.rank()])]
    samples = [_sample(number, length, multiple) for number, length in numbered]
    before = [sample["tokens"].clone() for sample in samples]
    reads = groups.tp.rank() == 0 and groups.pp.rank() in {0, groups.pp.size() - 1}
    scheduler = _scheduler(groups, layout, **options)
    steps = []
    try:
        for attempt in range(2):
            loader: Iterator[Sample] = iter(samples)
            for _step in range(2):
                step = scheduler.run(loader if reads else None, options.get("pulls", 2))
                if attempt:  # a step that is rerun gives the same packs
                    continue
                steps.append((step.plan, step.lengths, step.microbatches))
                for microbatch in range(step.plan.num_microbatches):
                    size = step.plan.group_of(microbatch, groups.dp_cp.rank()).size
                    found = cp_group_of(groups.dp_cp, size)
                    assert (found is None) is (size == 1)
                    assert found is cp_group_of(groups.dp_cp, size)
            if attempt:
                last = [step.microbatches, steps[-1][2]]
                for again, first in zip(*(packs or () for packs in last), strict=True):
                    assert all(torch.equal(again[key], first[key]) for key in first)
    except Exception as error:  # noqa: BLE001 - its text is the result
        return {"error": f"{type(error).__name__}: {error}"}
    assert all(torch.equal(a, s["tokens"]) for a, s in zip(before, samples, strict=True))
    destroy_cp_groups()
    return {"rank": groups.dp_cp.rank(), "steps": steps}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ((1, 1, 4, 1), {}),
        ((1, 1, 4, 1), {"scheduler": "default_dynamic_cp"}),
        ((1, 2, 2, 1), {}),
        ((1, 4, 1, 1), {}),
        ((2, 1, 2, 1), {}),
        ((1, 1, 2, 2), {"multiple": 2}),
        ((1, 1, 1, 4), {}),
    ],
    ids=["dp4", "bucketed", "dp2-cp2", "cp4", "dp2-tp2", "dp2-pp2", "pp4"],
)
def test_every_rank_holds_its_slices_of_every_sample_of_its_groups(
    ranks: RankPools, layout: Layout, options: dict[str, Any]
) -> None:
    results = ranks(WORLD_SIZE).run(_run, layout, options)
    multiple = 2 * layout[1] * layout[2]
    for number in range(2):
        plan, lengths, _ = results[0]["steps"][number]
        numbers = [
            (10 * rank + i, LENGTHS[rank][i])
            for i in (2 * number, 2 * number + 1)
            for rank in range(layout[2])
        ]
        assert list(lengths.original) == [length for _, length in numbers]
        assert plan.num_microbatches % options.get("multiple", 1) == 0
        held = 0
        for result in results:
            other_plan, other_lengths, microbatches = result["steps"][number]
            assert other_plan == plan
            assert other_lengths == lengths
            for i, microbatch in enumerate(microbatches or ()):
                group = plan.group_of(i, result["rank"])
                samples = [numbers[index] for index in group.sequences]
                whole = [_sample(drawn, length, multiple) for drawn, length in samples]
                assert int(microbatch["local_cp_size"]) == group.size
                index = zigzag_indices(
                    microbatch["cu_seqlens_padded"],
                    cp_size=group.size,
                    cp_rank=result["rank"] - group.start,
                )
                for key in set(TOKEN_KEYS) & microbatch.keys():
                    expected = torch.cat([sample[key] for sample in whole])[index]
                    assert torch.equal(microbatch[key], expected)
                held += len(microbatch.get("tokens", ()))
        readers = {1: 1, 2: 2, 4: 2}[layout[3]]
        assert held == readers * sum(lengths.padded)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ((1, 1, 4, 1), {"pulls": 5}, "ended after 4 of the 5 micro-batches"),
        ((2, 1, 2, 1), {"pulls": 5}, "ended after 4 of the 5 micro-batches"),
        ((1, 1, 4, 1), {"communication": [0.0, 0.0, 0.5, 0.0]}, "rank 2 has communication = 0.5"),
        ((1, 1, 4, 1), {"multiple": 16}, "8 sequences cannot fill a multiple of 16"),
    ],
    ids=["ended", "ended-tp", "settings", "plan"],
)
def test_ranks_fail_together(
    ranks: RankPools, layout: Layout, options: dict[str, Any], message: str
) -> None:
    for result in ranks(WORLD_SIZE).run(_run, layout, options):
        assert message in result["error"]


def _too_long(rank: int, _: int) -> str:
    groups = _groups((1, 1, 4, 1))
    loader = iter([_sample(0, 8, 8), _sample(1, 56 if rank == 2 else 8, 8)])
    try:
        _scheduler(groups, (1, 1, 4, 1)).run(loader, 2)
    except Exception as error:  # noqa: BLE001 - its text is the result
        return str(error)
    return "nothing raised"


def test_a_sample_longer_than_all_ranks_hold_is_named_everywhere(ranks: RankPools) -> None:
    for text in ranks(WORLD_SIZE).run(_too_long):
        assert "sample 1 of this rank's step has 56 tokens, more than the capacity of 48" in text


def _sizes(rank: int, _: int, sizes: Sequence[int]) -> dict[str, Any]:
    import torch.distributed as dist

    from evenstep.gbpacking import cp_group_of, destroy_cp_groups, prepare_cp_groups

    domain: dist.ProcessGroup = _groups((1, 1, 4, 1)).dp_cp
    prepare_cp_groups(domain, sizes)
    made = {size: cp_group_of(domain, size) for size in sizes}
    prepare_cp_groups(domain, sizes)
    assert all(cp_group_of(domain, size) is group for size, group in made.items())
    assert cp_group_of(domain, 4) is domain
    members, sums = {}, {}
    for size, group in made.items():
        if group is not None:
            members[size] = dist.get_process_group_ranks(group)
            total = torch.tensor([rank])
            dist.all_reduce(total, group=group)
            sums[size] = int(total)
    dist.destroy_process_group(made[2])  # by somebody else
    prepare_cp_groups(domain, sizes)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=cp_group_of(domain, 2))
    assert int(total) == sums[2]
    destroy_cp_groups()
    destroy_cp_groups()  # twice is once
    try:
        cp_group_of(domain, 2)
    except RuntimeError:
        return {"members": members, "sums": sums, "destroyed": True}
    return {}


def test_groups_are_aligned_made_once_and_destroyed(ranks: RankPools) -> None:
    for rank, result in enumerate(ranks(WORLD_SIZE).run(_sizes, (1, 2, 4))):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert result["members"] == {2: pair, 4: [0, 1, 2, 3]}
        assert result["sums"] == {2: sum(pair), 4: 6}
        assert result["destroyed"]


def _megatrons(_: int, __: int) -> bool:
    from megatron.core import parallel_state

    from evenstep.gbpacking import cp_group_of, destroy_cp_groups, prepare_cp_groups

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(hybrid_context_parallel=True)
    domain = parallel_state.get_data_parallel_group(with_context_parallel=True)
    theirs = parallel_state.get_hybrid_data_context_parallel_groups(group_size=2)
    prepare_cp_groups(domain, (1, 2, 4))
    taken = cp_group_of(domain, 2) is theirs
    destroy_cp_groups()
    alive: bool = theirs.size() == 2
    parallel_state.destroy_model_parallel()
    return taken and alive


def test_groups_that_megatron_has_made_are_taken(ranks: RankPools) -> None:
    pytest.importorskip("megatron.core")
    assert all(ranks(WORLD_SIZE).run(_megatrons, deadline_s=400))
