"""Packing: sequences into bins under a token capacity, the load of the bins balanced."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from evenstep.balance.packing_arrival import arrival_microbatches
from evenstep.balance.packing_bounds import step_bound
from evenstep.balance.packing_input import check_share
from evenstep.balance.packing_load import SequenceLoad
from evenstep.balance.packing_plan import PackingPlan, finished_plan
from evenstep.balance.packing_problem import PackingProblem
from evenstep.balance.packing_search import balanced_microbatches
from evenstep.balance.synchronize import Synchronize

PackingStrategy: TypeAlias = Literal["balanced", "arrival"]
"""How bins are filled: balanced (ours), or in arrival order as Megatron-Core's `dp_balanced`."""


def plan_packing(
    lengths: Sequence[int],
    *,
    capacity: int,
    num_ranks: int = 1,
    load: SequenceLoad | None = None,
    microbatch_multiple: int = 1,
    max_sequences: int | None = None,
    synchronize: Synchronize = "microbatch",
    extra_microbatches: float = 0.5,
    strategy: PackingStrategy = "balanced",
) -> PackingPlan:
    """Pack the sequences of a step into micro-batches of one bin per rank.

    Pure and deterministic: the same arguments give the same plan on every rank and machine. Call
    it with the lengths of the whole global batch, in the same order on every rank.

    Args:
        lengths: Tokens of each sequence (padding included), integers of at least 1.
        capacity: Most tokens of a bin, a hard limit. Under context parallelism, the tokens that
            the group holds together: tokens per rank x CP size.
        num_ranks: Bins of a micro-batch: the data-parallel size.
        load: Load of a sequence; its token count if None.
        microbatch_multiple: The number of micro-batches is a multiple of this (what interleaved
            pipeline schedules demand).
        max_sequences: Most sequences of a bin; unlimited if None.
        synchronize: The objective: "microbatch" if ranks wait for each other in every
            micro-batch (minimise the sum of their largest loads), "step" if only the step does
            (minimise the largest total of a rank).
        extra_microbatches: How many more micro-batches than the fewest possible may be planned,
            as a share of those, where that makes the step shorter.
        strategy: "balanced", or "arrival" to compare with.

    Returns:
        The plan, with bins of similar load in the same micro-batch.

    Raises:
        ValueError: If an argument breaks its rule, a sequence exceeds the capacity, or there are
            too few sequences for a bin on every rank.
    """
    problem = PackingProblem.checked(
        lengths,
        capacity=capacity,
        load=load or SequenceLoad(),
        num_ranks=num_ranks,
        multiple=microbatch_multiple,
        max_sequences=max_sequences,
        synchronize=synchronize,
    )
    check_share("extra_microbatches", extra_microbatches)
    if strategy not in get_args(PackingStrategy):
        raise ValueError(f"strategy is {strategy!r}; it must be one of {get_args(PackingStrategy)}")
    bound = step_bound(problem)
    if strategy == "arrival":
        microbatches = arrival_microbatches(problem)
    else:
        microbatches = balanced_microbatches(problem, extra=extra_microbatches, bound=bound)
    return finished_plan(problem, microbatches, lower_bound=bound)
