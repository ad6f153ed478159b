"""Packing by its public door: every property that holds for every strategy and objective."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import PackingPlan, PackingStrategy, SequenceLoad, Synchronize, plan_packing

LOAD = SequenceLoad.from_hidden_size(16)


def all_sequences(plan: PackingPlan) -> list[int]:
    return [i for ranks in plan.microbatches for b in ranks for i in b]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    num_ranks=st.integers(1, 4),
    multiple=st.integers(1, 3),
    max_sequences=st.none() | st.integers(1, 6),
    synchronize=st.sampled_from(["microbatch", "step"]),
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
    def plan() -> PackingPlan:
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
        assert "sequences" in str(refused)  # noqa: PT017 - too few for the ranks is allowed
        return
    assert sorted(all_sequences(made)) == list(range(len(lengths)))
    assert made.num_ranks == num_ranks
    assert made.num_microbatches % multiple == 0
    assert made.num_microbatches >= made.fewest_microbatches
    for ranks, tokens in zip(made.microbatches, made.bin_tokens, strict=True):
        for sequences, total in zip(ranks, tokens, strict=True):
            assert 1 <= len(sequences) <= (max_sequences or len(lengths))
            assert total == sum(lengths[i] for i in sequences) <= 60
    assert made.step_load >= made.lower_bound >= made.ideal_load * (1 - 1e-12)
    assert plan() == made


def test_capacity_is_hard() -> None:
    plan = plan_packing([60, 60, 60], capacity=100)
    assert plan.num_microbatches == 3


def test_an_oversized_sequence_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] is 101, more than the capacity of 100"):
        plan_packing([1, 101], capacity=100)
