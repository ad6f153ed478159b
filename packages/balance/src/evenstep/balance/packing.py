"""Packing: sequences into bins under a token capacity, the load of the bins balanced."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from evenstep.balance.packing_fill import best_fit_decreasing
from evenstep.balance.packing_load import SequenceLoad
from evenstep.balance.packing_plan import PackingPlan, finished_plan
from evenstep.balance.packing_problem import PackingProblem, Synchronize

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
    if not 0 <= extra_microbatches < float("inf"):
        raise ValueError(
            f"extra_microbatches is {extra_microbatches!r}; it must be finite and not negative"
        )
    if strategy not in get_args(PackingStrategy):
        raise ValueError(f"strategy is {strategy!r}; it must be one of {get_args(PackingStrategy)}")
    bins = best_fit_decreasing(
        problem.lengths, capacity=problem.capacity, max_sequences=problem.max_sequences
    )
    wanted = problem.num_ranks * problem.multiple
    count = -(-len(bins) // wanted) * wanted
    if count > len(problem.lengths):
        raise ValueError(
            f"{len(problem.lengths)} sequences need {len(bins)} bins of {capacity} tokens, which "
            f"{num_ranks} ranks x a multiple of {microbatch_multiple} round up to {count}, and no "
            "bin may be empty; pass more sequences, or raise the capacity"
        )
    loads = [sum(problem.loads[i] for i in b) for b in bins]
    while len(bins) < count:
        costliest = max(
            (b for b in range(len(bins)) if len(bins[b]) > 1), key=lambda b: (loads[b], -b)
        )
        moved: list[int] = []
        load_moved = 0
        for index in bins[costliest][1:]:
            if 2 * (load_moved + problem.loads[index]) <= loads[costliest] or not moved:
                moved.append(index)
                load_moved += problem.loads[index]
        bins[costliest] = [i for i in bins[costliest] if i not in moved]
        loads[costliest] -= load_moved
        bins.append(moved)
        loads.append(load_moved)
    order = sorted(range(count), key=lambda b: (-loads[b], b))
    ranks = problem.num_ranks
    microbatches = [[bins[b] for b in order[m : m + ranks]] for m in range(0, count, ranks)]
    return finished_plan(
        problem,
        microbatches,
        lower_bound=-(-sum(problem.loads) // ranks),
        fewest_microbatches=problem.multiple * -(-sum(problem.lengths) // (capacity * wanted)),
    )
