"""Deterministic load balancing and sequence packing in pure Python: costs in, plans out.

Importing this package takes a few milliseconds: the contract's order and routes are loaded at once,
every other planner when its name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from evenstep.balance.order import balanced_index_order
from evenstep.balance.route import (
    Route,
    RouteColumns,
    assert_intra_no_cross_slot,
    balanced_assignment,
    intra_route,
    window_cost_spread,
)

if TYPE_CHECKING:
    from evenstep.balance.calibration import Calibration, calibrate, step_features
    from evenstep.balance.costs import (
        CostModel,
        TableCost,
        encoder_cost,
        evaluate_costs,
        transformer_cost,
    )
    from evenstep.balance.dynamic_cp import DynamicCpStrategy, plan_dynamic_cp
    from evenstep.balance.dynamic_cp_plan import CpGroup, DynamicCpPlan
    from evenstep.balance.packing import PackingStrategy, plan_packing
    from evenstep.balance.packing_load import SequenceLoad
    from evenstep.balance.packing_plan import PackingPlan
    from evenstep.balance.phases import PhasePlan, plan_phases
    from evenstep.balance.plan import GroupPlan, Sizes, plan_groups
    from evenstep.balance.strategy import LeastMove, Lpt, Refined, Strategy
    from evenstep.balance.synchronize import Synchronize
    from evenstep.balance.window import WindowPlan, build_window_route, plan_route, plan_window

__all__ = [
    "Calibration",
    "CostModel",
    "CpGroup",
    "DynamicCpPlan",
    "DynamicCpStrategy",
    "GroupPlan",
    "LeastMove",
    "Lpt",
    "PackingPlan",
    "PackingStrategy",
    "PhasePlan",
    "Refined",
    "Route",
    "RouteColumns",
    "SequenceLoad",
    "Sizes",
    "Strategy",
    "Synchronize",
    "TableCost",
    "WindowPlan",
    "assert_intra_no_cross_slot",
    "balanced_assignment",
    "balanced_index_order",
    "build_window_route",
    "calibrate",
    "encoder_cost",
    "evaluate_costs",
    "intra_route",
    "plan_dynamic_cp",
    "plan_groups",
    "plan_packing",
    "plan_phases",
    "plan_route",
    "plan_window",
    "step_features",
    "transformer_cost",
    "window_cost_spread",
]

_LOADED_ON_USE = {
    "Calibration": "evenstep.balance.calibration",
    "calibrate": "evenstep.balance.calibration",
    "step_features": "evenstep.balance.calibration",
    "CostModel": "evenstep.balance.costs",
    "TableCost": "evenstep.balance.costs",
    "encoder_cost": "evenstep.balance.costs",
    "evaluate_costs": "evenstep.balance.costs",
    "transformer_cost": "evenstep.balance.costs",
    "DynamicCpStrategy": "evenstep.balance.dynamic_cp",
    "plan_dynamic_cp": "evenstep.balance.dynamic_cp",
    "CpGroup": "evenstep.balance.dynamic_cp_plan",
    "DynamicCpPlan": "evenstep.balance.dynamic_cp_plan",
    "PackingStrategy": "evenstep.balance.packing",
    "plan_packing": "evenstep.balance.packing",
    "SequenceLoad": "evenstep.balance.packing_load",
    "PackingPlan": "evenstep.balance.packing_plan",
    "Synchronize": "evenstep.balance.synchronize",
    "PhasePlan": "evenstep.balance.phases",
    "plan_phases": "evenstep.balance.phases",
    "GroupPlan": "evenstep.balance.plan",
    "Sizes": "evenstep.balance.plan",
    "plan_groups": "evenstep.balance.plan",
    "LeastMove": "evenstep.balance.strategy",
    "Lpt": "evenstep.balance.strategy",
    "Refined": "evenstep.balance.strategy",
    "Strategy": "evenstep.balance.strategy",
    "WindowPlan": "evenstep.balance.window",
    "build_window_route": "evenstep.balance.window",
    "plan_route": "evenstep.balance.window",
    "plan_window": "evenstep.balance.window",
}

if not TYPE_CHECKING:  # a type checker sees the imports above instead, and every misspelt name

    def __getattr__(name: str) -> object:
        """Load what is loaded on use (PEP 562)."""
        if name not in _LOADED_ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_LOADED_ON_USE[name]), name)
        globals()[name] = value
        return value
