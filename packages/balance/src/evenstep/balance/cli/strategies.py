"""The strategies that `simulate` compares, each as a planner of one step."""

import math
from collections.abc import Sequence

from evenstep.balance.cli.simulation import Groups, Planned, Planner, Setting, Slots
from evenstep.balance.window import build_window_route

AS_READ = "as read"
"""Name of the planner that moves nothing."""


def planner_of(name: str, setting: Setting) -> Planner:
    """Return the planner of a strategy."""

    def plan(slots: Slots) -> Planned:
        route = build_window_route(slots, setting.dp_size, setting.dp_size, strategy=name)
        groups: list[list[list[int]]] = [[[] for _ in range(setting.dp_size)] for _ in slots]
        for sample, (slot, rank, _) in enumerate(route):
            groups[slot][rank].append(sample)
        return Planned(groups, math.fsum(max(s) for s in slots))

    return plan


def as_read(setting: Setting) -> Planner:
    """Return the planner that moves nothing."""
    groups: Groups = setting.as_read()

    def plan(slots: Slots) -> Planned:
        return Planned(groups, math.fsum(max(s) for s in slots))

    return plan


STRATEGIES: Sequence[str] = ("lpt",)
