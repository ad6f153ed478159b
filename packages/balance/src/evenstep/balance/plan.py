"""Groups as a value that says what it achieves: loads, bound, gap, and what moves."""

from collections.abc import Sequence
from itertools import chain
from math import fsum
from typing import Literal, NamedTuple, TypeAlias

from evenstep.balance.bounds import max_load_bound
from evenstep.balance.checks import checked_costs, checked_count, checked_groups
from evenstep.balance.refine import refined_groups
from evenstep.balance.strategy import (
    LeastMove,
    Refined,
    Strategy,
    StrategyName,
    check_settings,
    resolve,
)


class Sizes(NamedTuple):
    """How many samples a group may have."""

    least: int = 1
    """Fewest samples of a group."""
    most: int | None = None
    """Most samples of a group; None: no limit."""


SizeRule: TypeAlias = Literal["equal", "within_one", "free"]
"""Counts all equal, within one of each other (the larger groups first), or any (0 too)."""


class GroupPlan(NamedTuple):
    """Samples divided into groups."""

    groups: tuple[tuple[int, ...], ...]
    """The sample indices of each group, in canonical order."""
    loads: tuple[float, ...]
    """Total cost of each group (`math.fsum`: independent of the order of its samples)."""
    max_load: float
    """Largest load."""
    lower_bound: float
    """What the largest load of no division under the same counts can be below."""
    gap: float
    """`max_load / lower_bound - 1`, or 0 where the bound is 0."""
    moved_share: float | None
    """Share of the cost that leaves its home group; None where samples have no home."""


def plan_groups(
    costs: Sequence[float],
    n_groups: int,
    *,
    strategy: StrategyName | str | Strategy = "refined",
    sizes: SizeRule | Sizes = "equal",
    homes: Sequence[int] | None = None,
) -> GroupPlan:
    """Divide samples into groups of balanced total cost.

    Args:
        costs: Cost per sample, finite and >= 0.
        n_groups: Number of groups.
        strategy: Name or object of the strategy. Counts other than equal need `"refined"`.
        sizes: How many samples a group may have.
        homes: Group that each sample is in now; equally many samples per group where the strategy
            is `LeastMove`. None: under equal counts, the contiguous blocks of the sample order;
            otherwise samples have no home.

    Returns:
        The checked plan.

    Raises:
        ValueError: A cost, a count or a home is bad, the sizes cannot be kept, or the strategy does
            not offer them.
    """
    values = checked_costs(costs)
    chosen = resolve(strategy)
    if sizes == "equal":
        size = checked_groups(len(values), n_groups)
        least, most = size, size
        if homes is None:
            homes = [i // size for i in range(len(values))]
        _check_homes(homes, len(values), n_groups)
        if isinstance(chosen, LeastMove):
            check_settings(chosen)
            _check_even_homes(homes, n_groups, size)
            groups: Sequence[Sequence[int]] = chosen.groups(values, homes, n_groups)
        else:
            groups = chosen.window([values], n_groups)[0]
    else:
        least, most = _size_range(sizes, len(values), n_groups)
        if not isinstance(chosen, Refined):
            raise ValueError(
                f"strategy is {strategy!r}, but sizes is {sizes!r}; only 'refined' divides into "
                "groups of unequal counts"
            )
        check_settings(chosen)
        if homes is not None:
            _check_homes(homes, len(values), n_groups)
        groups = refined_groups(
            values, n_groups, least=least, most=most, tolerance=chosen.tolerance
        )
        if sizes == "within_one":
            groups = sorted(groups, key=len, reverse=True)  # 9 into 4 is 3, 2, 2, 2
    check_groups(groups, len(values), n_groups, least, most)
    return _plan(values, groups, least, homes)


def check_groups(
    groups: Sequence[Sequence[int]], n_samples: int, n_groups: int, least: int, most: int
) -> None:
    """Raise RuntimeError unless the groups hold every sample once, and allowed counts of them."""
    sizes = [len(group) for group in groups]
    if len(sizes) != n_groups or not all(least <= size <= most for size in sizes):
        raise RuntimeError(
            f"the strategy returned groups of {sizes[:8]} samples ({len(sizes)} groups); it must "
            f"return {n_groups} groups of {least} to {most}"
        )
    placed = [*chain.from_iterable(groups)]
    if len(placed) == n_samples and {*placed} == {*range(n_samples)}:
        return
    # Slower; it names the sample, and takes whatever serves as an index.
    seen = bytearray(n_samples)
    for i in placed:
        if not 0 <= i < n_samples or seen[i]:
            raise RuntimeError(
                f"the strategy placed sample {i} twice or beyond the {n_samples} samples; each "
                "must be placed exactly once"
            )
        seen[i] = 1
    # Counts that add up and no sample twice: none is missing either.
    assert sum(sizes) == n_samples


def relative_gap(value: float, bound: float) -> float:
    """Return how far `value` is above `bound`, relative to it; 0 where the bound is 0."""
    return max(0.0, value / bound - 1) if bound else 0.0


def _plan(
    costs: Sequence[float],
    groups: Sequence[Sequence[int]],
    least: int,
    homes: Sequence[int] | None,
) -> GroupPlan:
    loads = tuple(fsum(costs[i] for i in group) for group in groups)
    bound = min(max_load_bound(costs, len(groups), least), max(loads))  # sums round
    moved: float | None = None
    if homes is not None:
        away = fsum(costs[i] for g, group in enumerate(groups) for i in group if homes[i] != g)
        moved = away / total if (total := fsum(costs)) else 0.0
    return GroupPlan(
        groups=tuple(tuple(group) for group in groups),
        loads=loads,
        max_load=max(loads),
        lower_bound=bound,
        gap=relative_gap(max(loads), bound),
        moved_share=moved,
    )


def _size_range(sizes: SizeRule | Sizes, n_samples: int, n_groups: int) -> tuple[int, int]:
    """Return the fewest and most samples of a group that `sizes` allows."""
    groups = checked_count(n_groups, "n_groups")
    if sizes == "within_one":
        return n_samples // groups, -(-n_samples // groups)
    if sizes == "free":
        return 0, n_samples
    if not isinstance(sizes, Sizes):
        raise ValueError(
            f"sizes is {sizes!r}; it must be 'equal', 'within_one', 'free' or Sizes(least, most)"
        )
    least = checked_count(sizes.least, "sizes.least", minimum=0)
    most = n_samples if sizes.most is None else checked_count(sizes.most, "sizes.most")
    if not groups * least <= n_samples <= groups * most:
        raise ValueError(
            f"sizes is {sizes}, but {n_samples} samples in {n_groups} groups cannot keep it: that "
            f"takes {groups * least} to {groups * most} samples"
        )
    return least, most


def _check_homes(homes: Sequence[int], n_samples: int, n_groups: int) -> None:
    if len(homes) != n_samples:
        raise ValueError(f"homes has {len(homes)} entries, but costs {n_samples}")
    for i, home in enumerate(homes):
        if not 0 <= home < n_groups:
            raise ValueError(f"homes[{i}] is {home}; it must be a group, 0 .. {n_groups - 1}")


def _check_even_homes(homes: Sequence[int], n_groups: int, size: int) -> None:
    counts = [0] * n_groups
    for home in homes:
        counts[home] += 1
    for home, count in enumerate(counts):
        if count != size:
            raise ValueError(
                f"homes puts {count} samples into group {home}, but least_move needs {size} in "
                "each, because it keeps the counts"
            )
