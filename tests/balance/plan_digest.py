"""A program that plans with every strategy and prints one digest of all plans.

It runs under other hash seeds and other Pythons, with the package's sources on its path.
"""

import hashlib
import random

from evenstep.balance import (
    LeastMove,
    Refined,
    Sizes,
    Strategy,
    build_window_route,
    plan_groups,
    plan_phases,
)

STRATEGIES: list[str | Strategy] = [
    "lpt",
    "refined",
    "least_move",
    LeastMove(ranks_per_node=4, tolerance=0.01),
    Refined(scope="window"),
    Refined(scope="window", synchronize="step"),
    LeastMove(scope="window"),
]


def plan_digest() -> str:
    """Return the SHA-256 of plans on costs whose sums round."""
    rng = random.Random(20)
    window = [[rng.random() * rng.choice((0.1, 1, 7, 1e4)) for _ in range(64)] for _ in range(3)]
    plans: list[object] = [
        [tuple(entry) for entry in build_window_route(window, 8, 4, strategy=strategy)]
        for strategy in STRATEGIES
    ]
    plans += [plan_groups(window[0], 5, sizes=sizes) for sizes in ("within_one", "free", Sizes(3))]
    plans.append(plan_phases(window, 8))
    return hashlib.sha256(repr([_plain(plan) for plan in plans]).encode()).hexdigest()


def _plain(plan: object) -> object:
    """Return the groups of a plan, or the route itself."""
    return getattr(plan, "groups", plan)


if __name__ == "__main__":
    print(plan_digest())
