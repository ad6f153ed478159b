"""One step through our own loop: who gets which samples, and what happens to bad ones."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import PackingPlan, SequenceLoad
from evenstep.gbpacking import (
    IteratorEndedError,
    PackingOptions,
    Sample,
    SampleError,
    build_unpacked_sample,
)
from evenstep.gbpacking.fixed_step import FixedStepScheduler
from evenstep.gbpacking.own_step import PackedStep
from evenstep.gbpacking.pull import pull_samples
from evenstep.gbpacking.sample import TOKEN_KEYS
from evenstep.gbpacking.step_lengths import StepLengths
from evenstep.gbpacking.step_plan import StepRules, deliveries
from tests.harness import RankPools

WORLD_SIZE = 4


def rules(*, capacity: int, num_ranks: int, multiple: int = 1, **changes: Any) -> StepRules:
    arguments: dict[str, Any] = {
        "scheduler": "evenstep_balanced",
        "capacity": capacity,
        "num_ranks": num_ranks,
        "multiple": multiple,
        "load": SequenceLoad.from_hidden_size(64),
        "options": PackingOptions(timeout_s=30),
        **changes,
    }
    return StepRules(**arguments)


def lengths_of(padded: Sequence[int], *, num_ranks: int) -> StepLengths:
    """Lengths of a step that rank 0 read alone."""
    counts = tuple((1, *[0] * (num_ranks - 1)) for _ in padded)
    return StepLengths(counts=counts, padded=tuple(padded), original=tuple(padded))


def numbered(lengths: Sequence[int], *, first: int = 0) -> Iterator[Sample]:
    """Samples that tell themselves apart: sample i holds the number first + i."""
    for number, length in enumerate(lengths, first):
        yield build_unpacked_sample([number] * length, [number + 1] * length)


class Alone:
    """A process group of this rank alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def scheduler(step_rules: StepRules, *, groups: Any = None, **changes: Any) -> FixedStepScheduler:
    alone = Alone()
    arguments: dict[str, Any] = {
        "keys": TOKEN_KEYS,
        "multiple": 1,
        "device": torch.device("cpu"),
        **changes,
    }
    groups = groups or SimpleNamespace(tp=alone, cp=alone, pp=alone, dp=alone)
    return FixedStepScheduler(step_rules, groups, **arguments)


# ---- plans ----


@pytest.mark.parametrize("name", ["evenstep_balanced", "dp_balanced"])
@settings(max_examples=40, deadline=None)
@given(
    padded=st.lists(st.integers(1, 40), min_size=8, max_size=40),
    num_ranks=st.integers(1, 4),
    multiple=st.integers(1, 2),
)
def test_every_sample_goes_to_one_rank_and_no_pack_is_empty_or_too_long(
    name: str, padded: list[int], num_ranks: int, multiple: int
) -> None:
    step_rules = rules(capacity=400, num_ranks=num_ranks, multiple=multiple, scheduler=name)
    plan = step_rules.plan(lengths_of(padded, num_ranks=num_ranks))
    routed = list(deliveries(plan))
    assert sorted(index for index, _ in routed) == list(range(len(padded)))
    assert plan.num_microbatches % multiple == 0
    for microbatch in range(plan.num_microbatches):
        for rank in range(num_ranks):
            pack = [i for i, route in routed if route[:2] == (microbatch, rank)]
            assert pack
            assert sum(padded[index] for index in pack) <= 400


def test_the_capacity_is_a_hard_limit() -> None:
    plan = rules(capacity=100, num_ranks=1).plan(lengths_of([60, 60, 60], num_ranks=1))
    assert plan.num_microbatches == 3


@pytest.mark.parametrize(
    ("padded", "num_ranks", "multiple", "microbatches"),
    [([4, 4], 2, 1, 1), ([4, 4, 4, 4], 2, 2, 2), ([4] * 8, 2, 4, 4)],
)
def test_feasible_steps_are_planned(
    padded: list[int], num_ranks: int, multiple: int, microbatches: int
) -> None:
    step_rules = rules(capacity=8, num_ranks=num_ranks, multiple=multiple)
    plan = step_rules.plan(lengths_of(padded, num_ranks=num_ranks))
    assert plan.num_microbatches == microbatches


@pytest.mark.parametrize(
    ("padded", "num_ranks", "message"),
    [
        ([4, 4, 4], 8, "3 sequences cannot fill 8 ranks"),
        ([10, 2], 2, r"lengths\[0\] is 10, more than the capacity of 8"),
    ],
)
def test_impossible_steps_are_refused_with_numbers(
    padded: list[int], num_ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rules(capacity=8, num_ranks=num_ranks).plan(lengths_of(padded, num_ranks=num_ranks))


def test_statistics_are_exact_beyond_float32_and_int32() -> None:
    padded = [2**24 + 1, 2**24 + 3]
    lengths = lengths_of(padded, num_ranks=1)
    assert lengths.token_sum == 2**25 + 4
    assert lengths.token_squared_sum == (2**24 + 1) ** 2 + (2**24 + 3) ** 2
    assert [int(value) for row in lengths.rows for value in row] == [
        value for length in padded for value in (length, length)
    ]


# ---- reading ----


def sample_with(**changes: Any) -> Sample:
    return {**build_unpacked_sample([1, 2, 3, 4], [2, 3, 4, 5]), **changes}


def without(key: str) -> Sample:
    return {name: value for name, value in sample_with().items() if name != key}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (without("labels"), "sample 1 of this rank's step has no labels"),
        (without("padded_seq_len"), "has no padded_seq_len"),
        (sample_with(tokens=torch.arange(3)), "has 3 tokens and padded_seq_len 4"),
        (sample_with(labels=torch.arange(4).view(1, 4)), r"labels of shape \[1, 4\].*identity"),
        (sample_with(loss_mask=torch.ones(4, dtype=torch.int64)), "loss_mask of torch.int64"),
        (sample_with(original_seq_len=torch.tensor([5])), "original_seq_len 5 and padded_seq_len"),
        (sample_with(original_seq_len=torch.tensor([0])), "1 <= original <= padded"),
        (sample_with(original_seq_len=torch.tensor([-1])), "1 <= original <= padded"),
        (sample_with(original_seq_len=torch.tensor([2.5])), "must be an integer tensor"),
        (sample_with(original_seq_len=torch.tensor([True])), "1 of .* must be an integer tensor"),
        (sample_with(original_seq_len=torch.tensor([3 + 0j])), "must be an integer tensor"),
        (sample_with(original_seq_len=torch.tensor([[3]])), "must be an integer tensor"),
        (sample_with(original_seq_len=3), "sample 1 .* original_seq_len of type int; it must be"),
        (sample_with(tokens=None), "sample 1 of .* has tokens of type NoneType; it must be a"),
        (sample_with(labels=[1, 2, 3, 4]), "has labels of type list; it must be a tensor"),
        (build_unpacked_sample([1] * 12, [1] * 12), "12 tokens, more than the capacity of 10"),
        (build_unpacked_sample([1] * 3, [1] * 3), "padded to 3 tokens.*no multiple of 2"),
        ([], "micro-batch 1 of the loader is list of nothing"),
        (torch.ones(3), "micro-batch 1 of the loader is Tensor"),
        ([sample_with(), 7], "collate_fn=identity_collate"),
    ],
)
def test_bad_samples_are_named(item: Any, message: str) -> None:
    loader = iter([[sample_with()], item])
    with pytest.raises(SampleError, match=message):
        pull_samples(loader, 2, capacity=10, multiple=2)


@pytest.mark.parametrize("length", [torch.tensor(3), torch.tensor([3], dtype=torch.uint8)])
def test_a_length_may_be_any_integer_tensor_of_one_element(length: torch.Tensor) -> None:
    loader = iter([sample_with(original_seq_len=length)])
    assert pull_samples(loader, 1, capacity=10, multiple=2).original == [3]


def test_an_iterator_that_ends_inside_a_step_says_how_far_it_came() -> None:
    with pytest.raises(IteratorEndedError, match="ended after 1 of the 3 micro-batches") as error:
        pull_samples(iter([sample_with()]), 3, capacity=10, multiple=1)
    assert (error.value.pulled, error.value.wanted) == (1, 3)


def test_a_loader_is_no_iterator() -> None:
    with pytest.raises(SampleError, match=r"data_iterator is a list.* pass iter\(loader\)"):
        pull_samples([sample_with()], 1, capacity=10, multiple=1)  # type: ignore[arg-type] # on purpose


# ---- one rank ----


def tokens_of(step: PackedStep[PackingPlan]) -> list[list[int]]:
    assert step.microbatches is not None
    return [microbatch["tokens"].tolist() for microbatch in step.microbatches]


def test_a_step_on_one_rank_packs_its_own_samples() -> None:
    step = scheduler(rules(capacity=10, num_ranks=1)).run(numbered([4, 9, 6, 1]), 4)
    assert sorted(map(sorted, tokens_of(step))) == [[0] * 4 + [2] * 6, [1] * 9 + [3]]
    assert step.lengths.token_sum == 20
    assert step.lengths.token_squared_sum == 16 + 81 + 36 + 1


def test_samples_are_not_changed_and_a_rerun_packs_alike() -> None:
    samples = list(numbered([4, 9, 6, 1]))
    before = [{key: value.clone() for key, value in sample.items()} for sample in samples]
    runs = [scheduler(rules(capacity=10, num_ranks=1)).run(iter(samples), 4) for _ in range(2)]
    assert tokens_of(runs[0]) == tokens_of(runs[1])
    assert runs[0].microbatches is not None
    for microbatch in runs[0].microbatches:
        microbatch["tokens"].zero_()
    for old, sample in zip(before, samples, strict=True):
        assert all(torch.equal(value, sample[key]) for key, value in old.items())


def test_without_any_iterator_the_step_says_what_is_missing() -> None:
    message = "data_iterator is None on data-parallel rank 0 of pipeline stage 0, which reads tok"
    with pytest.raises(ValueError, match=message):
        scheduler(rules(capacity=10, num_ranks=1)).run(None, 1)


# ---- several ranks ----


def _groups(layout: Sequence[int]) -> Any:
    """Return groups over four ranks of sizes (tp, cp, dp, pp), tp fastest, as Megatron-Core's."""
    from itertools import product

    import torch.distributed as dist

    rank = dist.get_rank()
    names = ("tp", "cp", "dp", "pp")
    groups = {}
    for axis, name in enumerate(names):
        others = [range(size) if i != axis else (0,) for i, size in enumerate(layout)]
        for place in product(*others):
            members = []
            for step in range(layout[axis]):
                place_of = [*place]
                place_of[axis] = step
                number = 0
                for position, size in reversed(list(zip(place_of, layout, strict=True))):
                    number = number * size + position
                members.append(number)
            if rank in members:
                groups[name] = dist.new_group(members, use_local_synchronization=True)
    return SimpleNamespace(**groups)


def _run(
    _: int,
    __: int,
    layout: Sequence[int],
    lengths_by_dp_rank: list[list[int]],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Run two steps of half the samples each; return what this rank got, or the error's text."""
    groups = _groups(layout)
    pp, dp = groups.pp.rank(), groups.dp.rank()
    last = groups.pp.size() - 1
    lengths = list(lengths_by_dp_rank[dp])
    if options.get("other_data_on_cp", False) and groups.cp.rank() == 1:
        lengths[0] += 1
    reads = groups.tp.rank() == 0 and (pp in {0, last} or options.get("all_stages_read", False))
    loader = numbered(lengths, first=100 * dp) if reads else None
    keys = [] if 0 < pp < last else TOKEN_KEYS
    per_step = options.get("num_microbatches", [len(lengths_by_dp_rank[0]) // 2] * 4)[dp]
    packer = scheduler(
        rules(
            capacity=options.get("capacity_by_dp_rank", [100] * 4)[dp],
            num_ranks=groups.dp.size(),
            multiple=options.get("multiple", 1),
        ),
        groups=groups,
        keys=keys,
    )
    steps = []
    try:
        for _step in range(2):
            packed = packer.run(loader, per_step)
            microbatches = packed.microbatches
            steps.append(
                {
                    "num_microbatches": packed.plan.num_microbatches,
                    "sums": (packed.lengths.token_sum, packed.lengths.token_squared_sum),
                    "packs": None
                    if microbatches is None
                    else [
                        {key: value.tolist() for key, value in sorted(microbatch.items())}
                        for microbatch in microbatches
                    ],
                }
            )
    except Exception as error:  # noqa: BLE001 - its text is the result
        return {"error": f"{type(error).__name__}: {error}", "steps": steps}
    return {"steps": steps}


LENGTHS = [[9, 3, 3, 60, 5, 40], [4, 4, 8, 8, 2, 1], [30, 30, 30, 7, 7, 7], [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ((1, 1, 4, 1), {}),
        ((1, 2, 2, 1), {}),
        ((2, 1, 2, 1), {}),
        ((1, 1, 2, 2), {}),
        ((1, 1, 1, 4), {}),
        ((1, 1, 1, 4), {"all_stages_read": True}),
        ((1, 1, 2, 2), {"multiple": 2}),
    ],
    ids=["dp4", "dp2-cp2", "dp2-tp2", "dp2-pp2", "pp4", "pp4-all-read", "multiple"],
)
def test_all_ranks_share_each_step(
    ranks: RankPools, layout: Sequence[int], options: dict[str, Any]
) -> None:
    results = ranks(WORLD_SIZE).run(_run, layout, LENGTHS, options)
    num_dp = layout[2]
    for step in range(2):
        steps = [result["steps"][step] for result in results]
        drawn = [
            (100 * dp + index, LENGTHS[dp][index])
            for dp in range(num_dp)
            for index in range(3 * step, 3 * step + 3)
        ]
        counts = {one["num_microbatches"] for one in steps}
        assert len(counts) == 1
        assert counts.pop() % options.get("multiple", 1) == 0
        assert {one["sums"] for one in steps} == {
            (sum(n for _, n in drawn), sum(n * n for _, n in drawn))
        }
        held = [
            token
            for one in steps
            for pack in one["packs"] or ()
            for token in pack.get("tokens", ())
        ]
        readers = sum(bool(one["packs"] and "tokens" in one["packs"][0]) for one in steps)
        copies = readers // num_dp
        assert sorted(held) == sorted(n for n, length in drawn for _ in range(length * copies))
        _assert_same_borders(steps, layout)


def _assert_same_borders(steps: list[dict[str, Any]], layout: Sequence[int]) -> None:
    """Ranks of the same data-parallel index pack alike, with tokens or without."""
    tp, cp, dp, _ = layout
    borders: dict[int, list[Any]] = {}
    for rank, one in enumerate(steps):
        if one["packs"] is not None:
            mine = [pack["cu_seqlens_padded"] for pack in one["packs"]]
            assert borders.setdefault(rank // (tp * cp) % dp, mine) == mine


def test_a_stage_in_the_middle_gets_borders_and_no_tokens(ranks: RankPools) -> None:
    results = ranks(WORLD_SIZE).run(_run, (1, 1, 1, 4), LENGTHS, {})
    for rank, result in enumerate(results):
        for pack in result["steps"][0]["packs"]:
            assert ("tokens" in pack) is (rank in {0, 3})
            assert {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"} <= set(pack)


@pytest.mark.parametrize(
    ("layout", "options", "cause", "together"),
    [
        (
            (1, 1, 4, 1),
            {"num_microbatches": [5, 5, 5, 5]},
            "ended after 1 of the 5 micro-batches",
            "ended after 1 of the 5 micro-batches",
        ),
        (
            (1, 1, 4, 1),
            {"num_microbatches": [3, 3, 2, 3]},
            "num_microbatches is 2 on data-parallel rank 2 and 3 on rank 0",
            "num_microbatches is 2 on data-parallel rank 2 and 3 on rank 0",
        ),
        (
            (1, 1, 4, 1),
            {"capacity_by_dp_rank": [100, 100, 50, 100]},
            "rank 2 has capacity = 50",
            "rank 2 has capacity = 50",
        ),
        (
            (1, 2, 2, 1),
            {"other_data_on_cp": True},
            "rank 1 of the cp group read other samples than rank 0",
            "rank 1 of the cp group read other samples than rank 0",
        ),
        (
            (2, 1, 2, 1),
            {"num_microbatches": [4, 9, 0, 0]},
            "ended after 6 of the 9",
            "ended after 6 of the 9",
        ),
        (
            (1, 1, 1, 4),
            {"num_microbatches": [7]},
            "ended after 6 of the 7",
            "ended after 6 of the 7",
        ),
    ],
    ids=["ended", "unequal", "settings", "cp-data", "tp", "pp"],
)
def test_ranks_fail_together(
    ranks: RankPools, layout: Sequence[int], options: dict[str, Any], cause: str, together: str
) -> None:
    results = ranks(WORLD_SIZE).run(_run, layout, LENGTHS, options)
    assert any(cause in result["error"] for result in results)
    assert all(together in result["error"] for result in results)


def test_ranks_with_very_unequal_tokens_run_the_same_number_of_microbatches(
    ranks: RankPools,
) -> None:
    lengths = [[95] * 10, [20] * 10]
    results = ranks(WORLD_SIZE).run(_run, (2, 1, 2, 1), lengths, {"multiple": 2})
    counts = {step["num_microbatches"] for result in results for step in result["steps"]}
    assert len(counts) == 1
    assert counts.pop() % 2 == 0
