"""Dynamic context parallelism by its public door: what every plan keeps, and what is refused."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance.dynamic_cp import DynamicCpStrategy, plan_dynamic_cp
from evenstep.balance.dynamic_cp_plan import DynamicCpPlan
from evenstep.balance.packing_load import SequenceLoad

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

    def plan() -> DynamicCpPlan:
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
