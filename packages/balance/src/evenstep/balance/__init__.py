"""Deterministic load balancing and sequence packing in pure Python: costs in, plans out."""

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
from evenstep.balance.order import balanced_index_order
from evenstep.balance.packing import PackingStrategy, plan_packing
from evenstep.balance.packing_load import SequenceLoad
from evenstep.balance.packing_plan import PackingPlan
from evenstep.balance.packing_problem import Synchronize
from evenstep.balance.phases import PhasePlan, plan_phases
from evenstep.balance.plan import GroupPlan, Sizes, plan_groups
from evenstep.balance.route import (
    Route,
    assert_intra_no_cross_slot,
    balanced_assignment,
    intra_route,
    window_cost_spread,
)
from evenstep.balance.strategy import LeastMove, Lpt, Refined, Strategy
from evenstep.balance.window import WindowPlan, build_window_route, plan_window

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
    "plan_window",
    "step_features",
    "transformer_cost",
    "window_cost_spread",
]
