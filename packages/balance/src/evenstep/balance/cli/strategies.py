"""The strategies that `simulate` compares, each as a planner of one step."""

import math
from collections.abc import Callable
from itertools import chain

from evenstep.balance.bounds import max_load_bound
from evenstep.balance.cli.simulation import Contender, Groups, Setting, Slots
from evenstep.balance.plan import Sizes, plan_groups
from evenstep.balance.strategy import LeastMove, Lpt, Refined, Strategy
from evenstep.balance.window import build_window_route

AS_READ = "as read"
"""Name of the contender that moves nothing."""

UNEQUAL = "unequal"
"""Name of the contender whose ranks may have different numbers of samples."""

WITHIN_SLOT = ("lpt", "refined", "least_move", UNEQUAL)
"""Strategies that leave samples in their micro-batch."""

ACROSS_SLOTS = ("refined_window", "least_move_window")
"""Strategies that exchange samples between the micro-batches of a step too."""


def contender(name: str, setting: Setting) -> Contender:
    """Return the contender of that name.

    Where strategies leave samples in their micro-batch, so does their lower bound.
    """
    strategies: dict[str, Strategy] = {
        "lpt": Lpt(),
        "refined": Refined(),
        "least_move": LeastMove(),
        "refined_window": Refined(scope="window", synchronize=setting.synchronize),
        "least_move_window": LeastMove(scope="window", synchronize=setting.synchronize),
    }
    bound = _bound(setting, least=setting.micro_batch, across=name in ACROSS_SLOTS)
    if name == AS_READ:
        groups = setting.as_read()
        return Contender(lambda _: groups, bound)
    if name == UNEQUAL:
        return Contender(_unequal(setting), _bound(setting, least=1, across=False))
    return Contender(_equal(setting, strategies[name]), bound)


def _equal(setting: Setting, strategy: Strategy) -> Callable[[Slots], Groups]:
    def plan(slots: Slots) -> Groups:
        route = build_window_route(slots, setting.dp_size, setting.dp_size, strategy=strategy)
        groups: list[list[list[int]]] = [[[] for _ in range(setting.dp_size)] for _ in slots]
        for sample, where in enumerate(route):
            groups[where.dst_slot][where.owner_rank].append(sample)
        return groups

    return plan


def _unequal(setting: Setting) -> Callable[[Slots], Groups]:
    def plan(slots: Slots) -> Groups:
        plans = [plan_groups(costs, setting.dp_size, sizes=Sizes(least=1)) for costs in slots]
        firsts = range(0, setting.samples_per_step, setting.samples_per_slot)
        return [
            [[first + sample for sample in group] for group in plan.groups]
            for first, plan in zip(firsts, plans, strict=True)
        ]

    return plan


def _bound(setting: Setting, *, least: int, across: bool) -> Callable[[Slots], float]:
    ranks = setting.dp_size
    if setting.synchronize == "microbatch" and not across:
        return lambda slots: math.fsum(max_load_bound(costs, ranks, least) for costs in slots)
    # Over all micro-batches a rank has at least `least` samples of each.
    return lambda slots: max_load_bound(
        list(chain.from_iterable(slots)), ranks, least * setting.window
    )
