"""Deterministic load balancing and sequence packing in pure Python: costs in, plans out."""

from evenstep.balance.packing import PackingStrategy, plan_packing
from evenstep.balance.packing_load import SequenceLoad
from evenstep.balance.packing_plan import PackingPlan
from evenstep.balance.packing_problem import Synchronize

__all__ = [
    "PackingPlan",
    "PackingStrategy",
    "SequenceLoad",
    "Synchronize",
    "plan_packing",
]
