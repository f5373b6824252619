"""Routes: the ways in which a knob is set on a user's script.

A route knows what its way can do on a script: the values that stand there today, which knobs it
supports and why it does not support another, and what a configuration changes on the start of the
ranks. `support_of` asks the routes in their order; each of them is applied at every start.
"""

from tuner.search_spaces.knobs import Value
from tuner.workload.scripts.routes.base import SPLIT, Draft, KnobSupport, Route
from tuner.workload.scripts.routes.batch_split import BatchSplit, today_by
from tuner.workload.scripts.routes.deepspeed import DeepSpeedConfig
from tuner.workload.scripts.routes.hook_routes import (
    FrameworkArguments,
    HookValues,
    ModelSwitch,
    TorchSettings,
)
from tuner.workload.scripts.routes.words import DriverKeys, KeyFiles, Placeholders, Variables
from tuner.workload.scripts.script_training import ScriptTraining

FRAMEWORK_ARGUMENTS = FrameworkArguments()
MODEL_SWITCH = ModelSwitch()
#: Routes that set a value each, in the order in which they answer for a knob and are applied.
CARRIERS: tuple[Route, ...] = (
    *(Placeholders(), DriverKeys(), HookValues(), DeepSpeedConfig()),
    *(FRAMEWORK_ARGUMENTS, MODEL_SWITCH, KeyFiles(), Variables(), TorchSettings()),
)
BATCH_SPLIT = BatchSplit(CARRIERS)
ROUTES: tuple[Route, ...] = (*CARRIERS, BATCH_SPLIT)
_MUST_BUILD = (
    "the script must build it: it may read joulefront_hook.configuration() or take {KNOB} in its "
    "command"
)


def today_of(job: ScriptTraining) -> dict[str, Value]:
    """Return the present value of each knob that some route knows."""
    return today_by(ROUTES, job)


def support_of(job: ScriptTraining, knob: str) -> KnobSupport:
    """Return the support of a launch knob by the first route that has it, or the first reason."""
    routes = (BATCH_SPLIT,) if knob in SPLIT else CARRIERS
    for route in routes:
        if (support := route.support(job, knob)) is not None:
            return support
    reasons = (route.why_not(job, knob) for route in routes)
    return KnobSupport(next(filter(None, reasons), _MUST_BUILD))


__all__ = [
    "BATCH_SPLIT",
    "CARRIERS",
    "FRAMEWORK_ARGUMENTS",
    "MODEL_SWITCH",
    "ROUTES",
    "Draft",
    "KnobSupport",
    "Route",
    "support_of",
    "today_of",
]
