"""joulefront's front door: `tuner.optimize()` and `tuner.replay()`.

    import tuner
    result = tuner.optimize(budget_kJ=25)

Importing this costs next to nothing: Optuna, scikit-learn and Ray are imported when a study runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.driver import load_result, optimize, replay
    from tuner.result import Result

__all__ = ["Result", "load_result", "optimize", "replay"]


def __getattr__(name: str) -> Any:
    if name in ("load_result", "optimize", "replay"):
        from tuner import driver

        return getattr(driver, name)
    if name == "Result":
        from tuner.result import Result

        return Result
    raise AttributeError(f"module 'tuner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
