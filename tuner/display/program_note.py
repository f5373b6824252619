"""Notices of what the comparison of a study does not hold for."""

from __future__ import annotations

from tuner.display.text import prediction
from tuner.results.result import Result
from tuner.search_spaces.declared import CHANGED, MARK, changed_training
from tuner.workload.scripts.script_job import ScriptJob

_DEGREES = ("tensor_parallel", "pipeline_parallel", "expert_parallel")


def program_note(result: Result) -> str:
    """Return the notices of a study as one text; "" if there are none."""
    return " ".join(filter(None, (_changed_training(result), _parallelism(result))))


def _changed_training(result: Result) -> str:
    """Return the notice for a study with configurations that learn something else."""
    knobs = result.job.knobs if result.job is not None else ()
    found = (changed_training(point.configuration.launch, knobs) for point in result.points)
    values = sorted({value for each in found for value in each})
    if not values:
        return ""
    return (
        f"Points marked {CHANGED}={MARK} learn something else than today "
        f"({', '.join(values)}), and may need more steps or reach another loss: their time and "
        "energy are for the same number of steps."
    )


def _parallelism(result: Result) -> str:
    """Return the notice for a study of the built-in program that measured model parallelism.

    Empty for a script of the user's own, a recording, a prediction, and if no configuration that
    was measured splits the model.
    """
    if result.job is None or isinstance(result.job, ScriptJob) or prediction(result):
        return ""
    splits = any(
        isinstance(degree := point.configuration.get(name), int) and degree > 1
        for point in result.points
        for name in _DEGREES
    )
    if not splits:
        return ""
    return (
        "Measured with the built-in training program, transformers under DeepSpeed: how tensor, "
        "pipeline and expert parallelism rank against ZeRO is that of this program, and may be "
        "different in Megatron-LM or torchtitan."
    )
