"""Run test functions on several ranks: living ranks of a pool, or fresh ones that may crash."""

from tests.harness.pool import RankError, RankPools
from tests.harness.processes import Outcome, spawn

__all__ = ["Outcome", "RankError", "RankPools", "spawn"]
