"""Public names of joulefront, imported when they are first used.

import tuner
result = tuner.optimize(budget_kJ=25)
"""

from __future__ import annotations

import importlib
from typing import Any

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
    "tuner.api": ("load_result", "optimize"),
    "tuner.display.progress": ("track",),
    "tuner.problem.constraints": ("Constraints",),
    "tuner.problem.settings": ("SearchSettings",),
    "tuner.answer.parts": ("Interval", "Point", "Recommendation"),
    "tuner.result": ("Result",),
    "tuner.search_spaces.cluster": ("Cluster",),
    "tuner.search_spaces.configuration": ("Configuration",),
    "tuner.search_spaces.knob_declarations": ("Knob",),
    "tuner.search_spaces.errors": ("InputError",),
    "tuner.search_spaces.job": ("TrainingJob",),
    "tuner.study.events": ("Progress",),
    "tuner.study.session": ("Interrupted",),
    "tuner.workload.records.probe": ("WindowPolicy",),
    "tuner.workload.scripts.command": ("Script",),
}
#: Names of extras, which an installation may leave out.
_OF_EXTRAS = {
    "tuner.callbacks": ("EnergyLog", "log_energy"),
    "tuner.online.agent": ("tuning",),
    "tuner.planner.plan": ("plan",),
    "tuner.planner.fit": ("fit",),
    "tuner.recordings.problem": ("replay",),
}
_MODULES = {name: module for module, names in {**_NAMES, **_OF_EXTRAS}.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tuner' has no attribute {name!r}")
    module: Any
    if _MODULES[name] in _OF_EXTRAS:
        from tuner.search_spaces.plugins import extra_module

        module = extra_module(_MODULES[name], f"tuner.{name}")
    else:
        module = importlib.import_module(_MODULES[name])
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
