"""Dynamic context parallelism by its public door: what every plan keeps, and what is refused."""

import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import DynamicCpPlan, DynamicCpStrategy, SequenceLoad, plan_dynamic_cp
from tests.balance.packing_oracle import exact_load, partitions

LOAD = SequenceLoad.from_hidden_size(16)


def check(plan: DynamicCpPlan, lengths: list[int], tokens_per_rank: int) -> None:
    """Assert what is hard: every sequence once, the tokens of a rank, aligned groups, no idling."""
    seen = [i for groups in plan.microbatches for group in groups for i in group.sequences]
    assert sorted(seen) == list(range(len(lengths)))
    for groups in plan.microbatches:
        ranks = [r for g in groups for r in range(g.start, g.start + g.size)]
        assert ranks == list(range(plan.num_ranks))
        for group in groups:
            assert group.sequences
            assert group.start % group.size == 0
            assert group.tokens == sum(lengths[i] for i in group.sequences)
            assert group.tokens <= group.size * tokens_per_rank
    assert plan.step_load >= plan.lower_bound * (1 - 1e-12)
    assert plan.mean_cp_size >= plan.least_mean_cp_size
    assert plan.max_loads == pytest.approx(
        [max(g.load for g in groups) for groups in plan.microbatches]
    )


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100) | st.integers(1, 16), min_size=1, max_size=50),
    num_ranks=st.integers(1, 12),
    tokens_per_rank=st.integers(8, 40),
    communication=st.sampled_from([0, 0.25, Fraction(1, 3), 4]),
    multiple=st.integers(1, 4),
    strategy=st.sampled_from(["balanced", "bucketed"]),
)
def test_every_plan_keeps_the_rules(
    lengths: list[int],
    num_ranks: int,
    tokens_per_rank: int,
    communication: float | Fraction,
    multiple: int,
    strategy: DynamicCpStrategy,
) -> None:
    lengths = [min(length, num_ranks * tokens_per_rank) for length in lengths]

    def plan(strategy: DynamicCpStrategy = strategy) -> DynamicCpPlan:
        return plan_dynamic_cp(
            lengths,
            tokens_per_rank=tokens_per_rank,
            num_ranks=num_ranks,
            load=LOAD,
            communication=communication,
            microbatch_multiple=multiple,
            strategy=strategy,
        )

    try:
        made = plan()
    except ValueError as refused:
        assert "sequences" in str(refused)  # noqa: PT017 - too few for the multiple is allowed
        return
    check(made, lengths, tokens_per_rank)
    assert made.num_microbatches % multiple == 0
    assert plan() == made
    ours = plan("balanced")
    assert (
        ours.step_load <= max(made.step_load, 1.005 * ours.lower_bound)
        or ours.mean_cp_size < made.mean_cp_size
    )


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "multiple"),
    [
        ([1, 6], 7, 1),
        ([5, 5], 5, 1),
        ([8, 4], 3, 2),
        ([17], 3, 1),
        ([4, 4], 2, 1),
        ([4, 4, 4, 4], 2, 4),
        ([10, 2], 2, 1),
    ],
)
def test_feasible_inputs_are_scheduled(lengths: list[int], num_ranks: int, multiple: int) -> None:
    plan = plan_dynamic_cp(
        lengths, tokens_per_rank=8, num_ranks=num_ranks, microbatch_multiple=multiple
    )
    check(plan, lengths, 8)
    assert plan.num_microbatches % multiple == 0


def best_microbatch(
    lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, price: Fraction
) -> Fraction | None:
    """Return the smallest largest load of one micro-batch, by looking at all groups and sizes."""
    sizes = [1 << k for k in range(num_ranks.bit_length()) if 1 << k < num_ranks] + [num_ranks]

    def loads(parts: list[list[int]], free: int) -> Iterator[Fraction]:
        if not parts:
            if free == 0:
                yield Fraction(0)
            return
        for size in sizes:
            if size <= free and sum(parts[0]) <= size * tokens_per_rank:
                work = sum((exact_load(LOAD, n) + price * n * (size - 1) for n in parts[0]), 0)
                for rest in loads(parts[1:], free - size):
                    yield max(Fraction(work) / size, rest)

    found = [
        load
        for parts in partitions(lengths)
        if len(parts) <= num_ranks
        for load in loads(parts, num_ranks)
    ]
    return min(found, default=None)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    num_ranks=st.integers(1, 5),
    multiple=st.integers(1, 3),
    price=st.sampled_from([Fraction(0), Fraction(1, 3), Fraction(3)]),
)
def test_against_every_plan(
    lengths: list[int], num_ranks: int, multiple: int, price: Fraction
) -> None:
    lengths = [min(length, 8 * num_ranks) for length in lengths]
    steps = []
    for microbatches in partitions(range(len(lengths))):
        if len(microbatches) % multiple == 0:
            best = [
                best_microbatch([lengths[i] for i in m], num_ranks, 8, price) for m in microbatches
            ]
            if all(load is not None for load in best):
                steps.append(sum(load for load in best if load is not None))

    def plan() -> DynamicCpPlan:
        return plan_dynamic_cp(
            lengths,
            tokens_per_rank=8,
            num_ranks=num_ranks,
            load=LOAD,
            communication=price,
            microbatch_multiple=multiple,
        )

    if not steps:
        with pytest.raises(ValueError, match="sequences"):
            plan()
        return
    made = plan()
    check(made, lengths, 8)
    assert made.lower_bound <= float(min(steps)) * (1 + 1e-12)
    assert made.step_load >= float(min(steps)) * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_long_lengths_reach_the_targets(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [min(126527, max(895, round(rng.lognormvariate(8.89, 1.05)))) for _ in range(1024)]
    plan = plan_dynamic_cp(
        lengths, tokens_per_rank=8192, num_ranks=64, load=SequenceLoad.from_hidden_size(4096)
    )
    check(plan, lengths, 8192)
    assert plan.step_load <= 1.025 * plan.ideal_load
    assert plan.mean_cp_size <= 1.15 * plan.least_mean_cp_size


def test_short_sequences_stay_on_one_rank() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(64, 4000) for _ in range(256)]
    plan = plan_dynamic_cp(lengths, tokens_per_rank=8192, num_ranks=8, load=LOAD)
    check(plan, lengths, 8192)
    assert plan.mean_cp_size == 1
    assert plan.step_load <= 1.01 * plan.ideal_load


def test_dear_communication_keeps_groups_small() -> None:
    lengths = [4, 4, 4, 40]
    free = plan_dynamic_cp(lengths, tokens_per_rank=40, num_ranks=4)
    dear = plan_dynamic_cp(lengths, tokens_per_rank=40, num_ranks=4, communication=100)
    assert free.mean_cp_size > 1
    assert dear.mean_cp_size == 1
    assert dear.max_loads == (40,)


def test_smallest_and_other_group_sizes() -> None:
    lengths = [3, 9, 20, 5, 30, 7, 11, 2]
    pairs = plan_dynamic_cp(lengths, tokens_per_rank=8, num_ranks=12, min_cp_size=2)
    check(pairs, lengths, 8)
    assert {g.size for groups in pairs.microbatches for g in groups} <= {2, 4, 8, 12}
    thirds = plan_dynamic_cp(lengths, tokens_per_rank=8, num_ranks=12, cp_sizes=[1, 3, 6])
    check(thirds, lengths, 8)
    assert {g.size for groups in thirds.microbatches for g in groups} <= {1, 3, 6, 12}


def test_a_rank_finds_its_group() -> None:
    plan = plan_dynamic_cp([16, 8, 8], tokens_per_rank=8, num_ranks=4)
    assert [plan.group_of(0, rank).sequences for rank in range(4)] == [(0,), (0,), (1,), (2,)]
    assert plan.fill == 1
    assert plan.padding_tokens == 0
    assert plan.gap == 0


BAD: dict[str, Callable[[], object]] = {
    "lengths is empty": lambda: plan_dynamic_cp([], tokens_per_rank=8, num_ranks=2),
    r"lengths\[1\] is 17, more than the 16 tokens of all 2 ranks of 8": lambda: plan_dynamic_cp(
        [1, 17], tokens_per_rank=8, num_ranks=2
    ),
    r"lengths\[0\] is 0; it must be": lambda: plan_dynamic_cp([0], tokens_per_rank=8, num_ranks=2),
    "tokens_per_rank is 0; it must be": lambda: plan_dynamic_cp(
        [1], tokens_per_rank=0, num_ranks=2
    ),
    "num_ranks is 0; it must be": lambda: plan_dynamic_cp([1], tokens_per_rank=8, num_ranks=0),
    "microbatch_multiple is 0; it must be": lambda: plan_dynamic_cp(
        [1], tokens_per_rank=8, num_ranks=2, microbatch_multiple=0
    ),
    "1 sequences cannot fill a multiple of 2 micro-batches": lambda: plan_dynamic_cp(
        [1], tokens_per_rank=8, num_ranks=2, microbatch_multiple=2
    ),
    "3 sequences need 3 micro-batches of 16 tokens, which a multiple of 2 rounds up to 4": lambda: (
        plan_dynamic_cp([9, 9, 9], tokens_per_rank=8, num_ranks=2, microbatch_multiple=2)
    ),
    "communication is -1; it must be finite": lambda: plan_dynamic_cp(
        [1], tokens_per_rank=8, num_ranks=2, communication=-1
    ),
    "min_cp_size is 0; it must be": lambda: plan_dynamic_cp(
        [1], tokens_per_rank=8, num_ranks=2, min_cp_size=0
    ),
    "the smallest group size is 2 and num_ranks is 3": lambda: plan_dynamic_cp(
        [1], tokens_per_rank=8, num_ranks=3, min_cp_size=2
    ),
    "the smallest group size is 4 and num_ranks is 2": lambda: plan_dynamic_cp(
        [1], tokens_per_rank=8, num_ranks=2, min_cp_size=4
    ),
    "cp_sizes has 2 and 3; each size must divide the next": lambda: plan_dynamic_cp(
        [1], tokens_per_rank=8, num_ranks=6, cp_sizes=[1, 2, 3]
    ),
    "extra_microbatches is nan; it must be finite": lambda: plan_dynamic_cp(
        [1], tokens_per_rank=8, num_ranks=2, extra_microbatches=float("nan")
    ),
    "strategy is 'best'; it must be one of": lambda: plan_dynamic_cp(
        [1],
        tokens_per_rank=8,
        num_ranks=2,
        strategy="best",  # type: ignore[arg-type] # bad on purpose
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_by_name_and_number(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BAD[message]()
