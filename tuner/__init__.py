"""Public names of joulefront, imported when they are first used.

import tuner
result = tuner.optimize(budget_kJ=25)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.answer.parts import Interval, Point, Recommendation
    from tuner.api import load_result, optimize, replay
    from tuner.callbacks import EnergyLog, log_energy
    from tuner.display.progress import track
    from tuner.online.block import tuning
    from tuner.planner.api import plan
    from tuner.planner.fit import fit
    from tuner.problem.constraints import Constraints
    from tuner.problem.settings import SearchSettings
    from tuner.result import Result
    from tuner.search_spaces.cluster import Cluster
    from tuner.search_spaces.configuration import Configuration
    from tuner.search_spaces.errors import InputError
    from tuner.search_spaces.job import TrainingJob
    from tuner.search_spaces.knob_declarations import Knob
    from tuner.study.callbacks import Progress
    from tuner.study.session import Interrupted
    from tuner.workload.records.probe import WindowPolicy
    from tuner.workload.scripts.command import Script

__all__ = [
    "Cluster",
    "Configuration",
    "Constraints",
    "EnergyLog",
    "InputError",
    "Interrupted",
    "Interval",
    "Knob",
    "Point",
    "Progress",
    "Recommendation",
    "Result",
    "Script",
    "SearchSettings",
    "TrainingJob",
    "WindowPolicy",
    "fit",
    "load_result",
    "log_energy",
    "optimize",
    "plan",
    "replay",
    "track",
    "tuning",
]

_NAMES = {
    "tuner.api": ("load_result", "optimize", "replay"),
    "tuner.callbacks": ("EnergyLog", "log_energy"),
    "tuner.display.progress": ("track",),
    "tuner.online.block": ("tuning",),
    "tuner.planner.api": ("plan",),
    "tuner.planner.fit": ("fit",),
    "tuner.problem.constraints": ("Constraints",),
    "tuner.problem.settings": ("SearchSettings",),
    "tuner.answer.parts": ("Interval", "Point", "Recommendation"),
    "tuner.result": ("Result",),
    "tuner.search_spaces.cluster": ("Cluster",),
    "tuner.search_spaces.configuration": ("Configuration",),
    "tuner.search_spaces.knob_declarations": ("Knob",),
    "tuner.search_spaces.errors": ("InputError",),
    "tuner.search_spaces.job": ("TrainingJob",),
    "tuner.study.callbacks": ("Progress",),
    "tuner.study.session": ("Interrupted",),
    "tuner.workload.records.probe": ("WindowPolicy",),
    "tuner.workload.scripts.command": ("Script",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tuner' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
