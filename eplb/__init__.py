"""Placement of experts on physical slots: what load is recorded, where experts should lie, and how they get there."""

from widemesh.eplb.agreed import PAUSE, RESUME, TRIGGER, Agreed, Report, trigger_after
from widemesh.eplb.balance import balancedness, expected_slot_load, fold_slots, rank_loads
from widemesh.eplb.config import EplbConfig
from widemesh.eplb.feasibility import Advice, advise_redundancy, feasible_balancedness
from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.maps import ExpertMaps, build_maps, choose_slot
from widemesh.eplb.migration import LayerMigration, MigrationPlan, TransferSlice, plan_migration
from widemesh.eplb.mover import LoadReading, Mover, Reading, Verifying
from widemesh.eplb.placement import check_placement, hash_text, initial_placement, initial_slot_owner, placement_hash
from widemesh.eplb.placement_file import dump_placement, parse_placement, read_placement
from widemesh.eplb.plan import Plan, make_plan
from widemesh.eplb.planner import ChildPlanner, Planner, PlannerError
from widemesh.eplb.policy import plan_placement
from widemesh.eplb.rebalance import Rebalance, plan_rebalance
from widemesh.eplb.reshuffle_status import ReshuffleListener, ReshuffleStatus
from widemesh.eplb.reshuffler import ReshuffleBusy, ReshufflePaused, Reshuffler
from widemesh.eplb.window import LoadWindow, StepRecord

__all__ = [
    "PAUSE",
    "RESUME",
    "TRIGGER",
    "Advice",
    "Agreed",
    "ChildPlanner",
    "EplbConfig",
    "ExpertLayout",
    "ExpertMaps",
    "LayerMigration",
    "LoadReading",
    "LoadWindow",
    "MigrationPlan",
    "Mover",
    "Plan",
    "Planner",
    "PlannerError",
    "Reading",
    "Rebalance",
    "Report",
    "ReshuffleBusy",
    "ReshuffleListener",
    "ReshufflePaused",
    "ReshuffleStatus",
    "Reshuffler",
    "StepRecord",
    "TransferSlice",
    "Verifying",
    "advise_redundancy",
    "balancedness",
    "build_maps",
    "check_placement",
    "choose_slot",
    "dump_placement",
    "expected_slot_load",
    "feasible_balancedness",
    "fold_slots",
    "hash_text",
    "initial_placement",
    "initial_slot_owner",
    "make_plan",
    "parse_placement",
    "placement_hash",
    "plan_migration",
    "plan_placement",
    "plan_rebalance",
    "rank_loads",
    "read_placement",
    "trigger_after",
]
