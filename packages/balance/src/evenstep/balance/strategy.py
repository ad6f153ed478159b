"""How to choose an algorithm: a value, `"lpt"`, `"refined"` or `"least_move"`, or its object."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from evenstep.balance.checks import checked_groups
from evenstep.balance.order import lpt_groups

Groups: TypeAlias = Sequence[Sequence[int]]
"""The samples of every group, each group in canonical order."""

StrategyName: TypeAlias = Literal["lpt", "refined", "least_move"]


class Strategy(Protocol):
    """Divides the samples of a window; write one of your own and every planner takes it."""

    def window(self, costs_per_slot: Sequence[Sequence[float]], n_groups: int) -> Sequence[Groups]:
        """Return for every slot its `n_groups` groups of window-global sample indices.

        Sample `j` of slot `s` has the index `s * samples_per_slot + j`. All groups have equally
        many samples. The result depends on the arguments alone. It is checked by the caller.

        Args:
            costs_per_slot: Checked costs of every slot; equally many, a multiple of `n_groups`.
            n_groups: Groups of the canonical grid.
        """
        ...


class Lpt(NamedTuple):
    """The contract's algorithm: longest processing time first, each slot by itself."""

    def window(self, costs_per_slot: Sequence[Sequence[float]], n_groups: int) -> list[Groups]:
        """Return the groups of every slot (see `Strategy`)."""
        slots: list[Groups] = []
        for slot, costs in enumerate(costs_per_slot):
            size = checked_groups(len(costs), n_groups)
            first = slot * len(costs)
            groups = lpt_groups(costs, n_groups, size, size)
            slots.append([[first + i for i in group] for group in groups] if slot else groups)
        return slots


def resolve(strategy: "StrategyName | str | Strategy") -> Strategy:
    """Return the strategy object that `strategy` names.

    Raises:
        ValueError: No strategy has that name.
    """
    if not isinstance(strategy, str):
        return strategy
    named: dict[str, Strategy] = {"lpt": Lpt()}
    if strategy not in named:
        raise ValueError(
            f"strategy is {strategy!r}; it must be one of {sorted(named)} or a strategy object"
        )
    return named[strategy]
