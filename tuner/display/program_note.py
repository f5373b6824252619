"""Notice that a ranking of parallelisms is that of the program that was measured."""

from __future__ import annotations

from tuner.display.text import prediction
from tuner.results.result import Result
from tuner.workload.scripts.script_job import ScriptJob

__all__ = ["program_note"]

_DEGREES = ("tensor_parallel", "pipeline_parallel", "expert_parallel")


def program_note(result: Result) -> str:
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
