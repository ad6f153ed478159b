"""Dynamic context parallelism: every sequence on a group of ranks sized for it."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from evenstep.balance.dynamic_cp_bucketed import bucketed_microbatches
from evenstep.balance.dynamic_cp_plan import DynamicCpPlan, finished_dynamic_plan
from evenstep.balance.dynamic_cp_problem import DynamicProblem
from evenstep.balance.dynamic_cp_search import dynamic_microbatches, split_to_multiple
from evenstep.balance.packing_input import check_share
from evenstep.balance.packing_load import Coefficient, SequenceLoad

DynamicCpStrategy: TypeAlias = Literal["balanced", "bucketed"]
"""How micro-batches are formed: balanced (ours), or as Megatron-Core's `default_dynamic_cp`."""


def plan_dynamic_cp(
    lengths: Sequence[int],
    *,
    tokens_per_rank: int,
    num_ranks: int,
    load: SequenceLoad | None = None,
    communication: Coefficient = 0,
    min_cp_size: int = 1,
    cp_sizes: Sequence[int] | None = None,
    microbatch_multiple: int = 1,
    extra_microbatches: float = 0.35,
    strategy: DynamicCpStrategy = "balanced",
) -> DynamicCpPlan:
    """Partition the ranks of each micro-batch into context-parallel groups, with their sequences.

    A group of s ranks holds s times the tokens of one, each of its ranks computing 1/s of every
    sequence. Short sequences so stop paying for the long ones, which a fixed CP size must fit.
    Pure and deterministic: the same arguments give the same plan on every rank and machine. Call
    it with the lengths of the whole global batch, in the same order on every rank.

    Args:
        lengths: Tokens of each sequence (padding included), integers of at least 1.
        tokens_per_rank: Most tokens of a rank, a hard limit.
        num_ranks: Ranks of the domain: data-parallel times context-parallel size.
        load: Load of a sequence; its token count if None.
        communication: Price of context parallelism, as load per token and step: of the s - 1
            steps in which a group of s passes its keys and values round, each costs every rank
            this price for its L / s tokens.
        min_cp_size: Smallest group; it divides `num_ranks`.
        cp_sizes: Allowed group sizes, each dividing the next; if None, `min_cp_size` and its
            doublings. One group of all ranks is always allowed.
        microbatch_multiple: The number of micro-batches is a multiple of this.
        extra_microbatches: How many more micro-batches than the tokens need may be aimed at, as
            a share of those. More of them mean smaller CP sizes.
        strategy: "balanced", or "bucketed" to compare with.

    Returns:
        The plan; in each micro-batch every rank has a group, aligned to its size.

    Raises:
        ValueError: If an argument breaks its rule, a sequence exceeds the tokens of all ranks, or
            there are too few sequences for the number of micro-batches that they need.
    """
    if strategy not in get_args(DynamicCpStrategy):
        raise ValueError(
            f"strategy is {strategy!r}; it must be one of {get_args(DynamicCpStrategy)}"
        )
    problem = DynamicProblem.checked(
        lengths,
        tokens_per_rank=tokens_per_rank,
        num_ranks=num_ranks,
        load=load or SequenceLoad(),
        communication=communication,
        min_cp_size=min_cp_size,
        cp_sizes=cp_sizes,
        multiple=microbatch_multiple,
    )
    check_share("extra_microbatches", extra_microbatches)
    if strategy == "bucketed":
        microbatches = bucketed_microbatches(problem)
        if not split_to_multiple(problem, microbatches):
            raise ValueError(
                f"{len(lengths)} sequences need {len(microbatches)} micro-batches under the "
                f"strategy 'bucketed', which do not divide into a multiple of "
                f"{microbatch_multiple}; pass more sequences or a smaller multiple"
            )
    else:
        microbatches = dynamic_microbatches(problem, extra=extra_microbatches)
    return finished_dynamic_plan(problem, microbatches)
