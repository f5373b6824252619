"""joulefront's front door: `tuner.optimize()` and `tuner.replay()`.

    import tuner
    result = tuner.optimize(budget_kJ=25)

Importing this costs next to nothing: NumPy, Optuna and Ray are imported when a study runs.
"""

from __future__ import annotations

from tuner.api import load_result, optimize, replay
from tuner.result import Result
from tuner.tuned import TunedResult

__all__ = ["Result", "TunedResult", "load_result", "optimize", "replay"]
