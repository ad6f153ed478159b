"""Packing by its public door: what every plan keeps, what is refused, and how good it is."""

import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import PackingPlan, PackingStrategy, SequenceLoad, Synchronize, plan_packing
from tests.balance.packing_oracle import best_step, exact_load, packings

LOAD = SequenceLoad.from_hidden_size(16)

OBJECTIVES = st.sampled_from(["microbatch", "step"])


def long_lengths(count: int, seed: int, *, longest: int = 126527) -> list[int]:
    """Draw lengths with a heavy tail: median 7k, a hundredth above 80k."""
    rng = random.Random(seed)
    drawn = (max(895, round(rng.lognormvariate(8.89, 1.05))) for _ in range(50 * count))
    return [min(126527, length) for length in drawn if length <= longest or longest == 126527][
        :count
    ]


def check(plan: PackingPlan, lengths: list[int], max_sequences: int | None = None) -> None:
    """Assert what is hard: every sequence once, the capacity, the maximum, no empty bin."""
    assert sorted(i for ranks in plan.microbatches for b in ranks for i in b) == list(
        range(len(lengths))
    )
    for ranks, tokens, loads in zip(
        plan.microbatches, plan.bin_tokens, plan.bin_loads, strict=True
    ):
        assert len(ranks) == plan.num_ranks
        for sequences, total, load in zip(ranks, tokens, loads, strict=True):
            assert 1 <= len(sequences) <= (max_sequences or len(lengths))
            assert total == sum(lengths[i] for i in sequences) <= plan.capacity
            assert load == float(sum(exact_load(LOAD, lengths[i]) for i in sequences))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    num_ranks=st.integers(1, 4),
    multiple=st.integers(1, 3),
    max_sequences=st.none() | st.integers(1, 6),
    synchronize=OBJECTIVES,
    strategy=st.sampled_from(["balanced", "arrival"]),
)
def test_every_plan_keeps_the_rules(
    lengths: list[int],
    num_ranks: int,
    multiple: int,
    max_sequences: int | None,
    synchronize: Synchronize,
    strategy: PackingStrategy,
) -> None:
    def plan(strategy: PackingStrategy = strategy) -> PackingPlan:
        return plan_packing(
            lengths,
            capacity=60,
            num_ranks=num_ranks,
            load=LOAD,
            microbatch_multiple=multiple,
            max_sequences=max_sequences,
            synchronize=synchronize,
            strategy=strategy,
        )

    try:
        made = plan()
    except ValueError as refused:
        assert "sequences" in str(refused)  # noqa: PT017 - too few for the bins is allowed
        return
    check(made, lengths, max_sequences)
    assert made.num_ranks == num_ranks
    assert made.num_microbatches % multiple == 0
    assert made.num_microbatches >= made.fewest_microbatches
    assert made.step_load >= made.lower_bound >= made.ideal_load
    assert plan() == made
    if strategy == "arrival":
        ours = plan("balanced")
        if made.num_microbatches <= ours.num_microbatches:
            assert ours.step_load <= made.step_load


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    num_ranks=st.integers(1, 3),
    multiple=st.integers(1, 2),
    max_sequences=st.none() | st.integers(1, 3),
    synchronize=OBJECTIVES,
)
def test_against_every_packing(
    lengths: list[int],
    num_ranks: int,
    multiple: int,
    max_sequences: int | None,
    synchronize: Synchronize,
) -> None:
    allowed = list(
        packings(
            lengths,
            capacity=12,
            num_ranks=num_ranks,
            multiple=multiple,
            max_sequences=max_sequences,
        )
    )

    def plan() -> PackingPlan:
        return plan_packing(
            lengths,
            capacity=12,
            num_ranks=num_ranks,
            load=LOAD,
            microbatch_multiple=multiple,
            max_sequences=max_sequences,
            synchronize=synchronize,
        )

    if not allowed:
        with pytest.raises(ValueError, match="sequences"):
            plan()
        return
    made = plan()
    loads = [exact_load(LOAD, length) for length in lengths]
    best = min(
        best_step([sum((loads[i] for i in b), Fraction(0)) for b in bins], num_ranks, synchronize)
        for bins in allowed
    )
    fewest = min(len(bins) for bins in allowed) // num_ranks
    assert made.fewest_microbatches <= fewest <= made.num_microbatches
    assert made.lower_bound <= float(best) <= made.step_load * (1 + 1e-12)
    assert made.step_load <= 1.5 * float(best)


def test_best_fit_decreasing_is_not_the_last_word() -> None:
    lengths = [8, 8, 8, 4, 3, 3, 2, 2, 2]  # best fit needs six bins, and ten would be too many
    plan = plan_packing(lengths, capacity=8, num_ranks=5, load=LOAD)
    check(plan, lengths)
    assert plan.num_microbatches == 1


@pytest.mark.parametrize(
    ("lengths", "capacity", "num_ranks", "multiple", "expected"),
    [
        ([60, 60, 60], 100, 1, 1, 3),
        ([4, 4], 8, 2, 1, 1),
        ([4, 4, 4, 4], 8, 2, 4, None),
        ([95] * 5 + [25] * 4, 100, 2, 1, 3),  # one rank drew 475 tokens, the other 100
    ],
)
def test_hard_limits(
    lengths: list[int], capacity: int, num_ranks: int, multiple: int, expected: int | None
) -> None:
    def plan() -> PackingPlan:
        return plan_packing(
            lengths,
            capacity=capacity,
            num_ranks=num_ranks,
            load=LOAD,
            microbatch_multiple=multiple,
        )

    if expected is None:
        with pytest.raises(ValueError, match="4 sequences cannot fill 2 ranks x 4 micro-batches"):
            plan()
    else:
        check(plan(), lengths)
        assert plan().num_microbatches == expected


@pytest.mark.parametrize(
    ("count", "longest", "capacity", "num_ranks", "limit"),
    [
        (256, 16384, 16384, 8, 1.015),
        (512, 126527, 131072, 8, 1.10),
        (1024, 126527, 131072, 32, 1.28),
    ],
)
def test_long_lengths_reach_the_targets(
    count: int, longest: int, capacity: int, num_ranks: int, limit: float
) -> None:
    lengths = long_lengths(count, 1, longest=longest)
    load = SequenceLoad.from_hidden_size(4096)
    plan = plan_packing(lengths, capacity=capacity, num_ranks=num_ranks, load=load)
    assert plan.step_load <= limit * plan.ideal_load or plan.gap <= 0.02
    assert plan.num_microbatches <= 1.5 * plan.fewest_microbatches
    step = plan_packing(
        lengths, capacity=capacity, num_ranks=num_ranks, load=load, synchronize="step"
    )
    assert step.step_load <= 1.01 * step.ideal_load


def test_figures_of_a_plan() -> None:
    plan = plan_packing([6, 5, 4, 3, 2], capacity=10, num_ranks=2, load=SequenceLoad())
    assert plan.microbatches == (((0, 2), (1, 3, 4)),)
    assert plan.max_loads == (10.0,)
    assert plan.step_load == plan.ideal_load == plan.lower_bound == 10
    assert plan.gap == 0
    assert plan.tokens == 20
    assert plan.fill == 1
    assert plan.padding_tokens == 0
    assert plan.unpacked_padding_tokens == 10


def test_similar_bins_share_a_micro_batch() -> None:
    plan = plan_packing([1, 9, 1, 9], capacity=9, num_ranks=2, extra_microbatches=0)
    assert plan.bin_tokens == ((9, 9), (1, 1))
    assert plan.step_load == 10


def test_arrival_order_is_as_described() -> None:
    plan = plan_packing([5, 4, 3, 9, 2, 2], capacity=10, num_ranks=2, strategy="arrival")
    # [0 1] [2] [3] [4 5]: bins close when the next sequence does not fit; four are a multiple
    assert plan.microbatches == (((0, 1), (2,)), ((3,), (4, 5)))
    odd = plan_packing([5, 4, 9, 2, 2], capacity=10, num_ranks=2, strategy="arrival")
    assert odd.microbatches == (((0, 1), (2,)), ((3,), (4,)))


def test_lengths_of_other_integer_types() -> None:
    class Int64:
        def __index__(self) -> int:
            return 7

    assert plan_packing([Int64()], capacity=8).tokens == 7  # type: ignore[list-item] # like NumPy's


PACK: dict[str, Callable[[], object]] = {
    "lengths is empty; packing needs at least one": lambda: plan_packing([], capacity=8),
    r"lengths\[1\] is 101, more than the capacity of 100 tokens; raise": lambda: plan_packing(
        [1, 101], capacity=100
    ),
    r"lengths\[0\] is 10, more than the capacity of 8": lambda: plan_packing([10, 2], capacity=8),
    r"lengths\[2\] is 0; it must be an integer >= 1": lambda: plan_packing([1, 1, 0], capacity=8),
    r"lengths\[0\] is -3; it must be": lambda: plan_packing([-3], capacity=8),
    r"lengths\[0\] is 2\.5; it must be": lambda: plan_packing([2.5], capacity=8),  # type: ignore[list-item] # bad on purpose
    r"lengths\[0\] is True; it must be": lambda: plan_packing([True], capacity=8),
    "capacity is 0; it must be an integer": lambda: plan_packing([1], capacity=0),
    "num_ranks is 0; it must be": lambda: plan_packing([1], capacity=8, num_ranks=0),
    "microbatch_multiple is -1; it must be": lambda: plan_packing(
        [1], capacity=8, microbatch_multiple=-1
    ),
    "max_sequences is 0; it must be": lambda: plan_packing([1], capacity=8, max_sequences=0),
    "3 sequences cannot fill 8 ranks x 1 micro-batches": lambda: plan_packing(
        [1, 2, 3], capacity=8, num_ranks=8
    ),
    "5 sequences need 5 bins of 8 tokens, which 4 ranks x a multiple of 1 micro-batches round up "
    "to 8 bins, and none may be empty": lambda: plan_packing([8] * 5, capacity=8, num_ranks=4),
    "synchronize is 'never'; it must be one of": lambda: plan_packing(
        [1],
        capacity=8,
        synchronize="never",  # type: ignore[arg-type] # bad on purpose
    ),
    "strategy is 'worst'; it must be one of": lambda: plan_packing(
        [1],
        capacity=8,
        strategy="worst",  # type: ignore[arg-type] # bad on purpose
    ),
    "extra_microbatches is -0.5; it must be finite": lambda: plan_packing(
        [1], capacity=8, extra_microbatches=-0.5
    ),
    "linear is nan; it must be finite": lambda: SequenceLoad(linear=float("nan")),
    "quadratic is inf; it must be finite": lambda: SequenceLoad(quadratic=float("inf")),
    "linear is '1'; it must be an int": lambda: SequenceLoad(linear="1"),  # type: ignore[arg-type] # bad on purpose
    "linear and quadratic are both 0": lambda: SequenceLoad(linear=0),
    "hidden_size is 0; it must be": lambda: SequenceLoad.from_hidden_size(0),
}


@pytest.mark.parametrize("message", PACK)
def test_bad_input_is_refused_by_name_and_number(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PACK[message]()


def test_loads_are_exact() -> None:
    assert SequenceLoad.from_hidden_size(4096)(49152) == 2 * 49152
    assert SequenceLoad.from_hidden_size(4096, causal=False)(24576) == 2 * 24576
    assert SequenceLoad(linear=0.1, quadratic=0.5)(3) == float(3 * 0.1 + 4.5)
    huge = plan_packing([2**40, 2**40 - 1], capacity=2**40, load=SequenceLoad(quadratic=1))
    assert huge.step_load == float(2**80 + 2**40 + (2**40 - 1) ** 2 + 2**40 - 1)
