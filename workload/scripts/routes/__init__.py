"""Routes: the ways in which a knob is set on a user's script.

A route knows what its way can do on a script: the values that stand there today, which knobs it
supports and why it does not support another, and what a configuration changes on the start of the
ranks. `support_of` asks the routes in their order; each of them is applied at every start.
"""

from functools import cache

from tuner.search_spaces.knobs import Value
from tuner.workload.scripts import SOCKET
from tuner.workload.scripts.routes.base import SPLIT, Draft, KnobSupport, PluginRoute, Route
from tuner.workload.scripts.routes.batch_split import BatchSplit, today_by
from tuner.workload.scripts.routes.hook_routes import (
    FrameworkArguments,
    HookValues,
    ModelSwitch,
    TorchSettings,
)
from tuner.workload.scripts.routes.words import KeyFiles, Placeholders, Variables
from tuner.workload.scripts.script_training import ScriptTraining

FRAMEWORK_ARGUMENTS = FrameworkArguments()
MODEL_SWITCH = ModelSwitch()


@cache
def carriers() -> tuple[Route, ...]:
    """Return the routes that set a value each, in the order in which they answer and are applied.

    Those of frameworks and of DeepSpeed where they are installed, and last those of other
    distributions.
    """
    in_command = [Placeholders(), *_shipped("framework keys"), HookValues()]
    in_settings = [*_shipped("deepspeed"), FRAMEWORK_ARGUMENTS, MODEL_SWITCH, KeyFiles()]
    plugins = [PluginRoute(name, route) for name, route in SOCKET.plugins.items()]
    return (*in_command, *in_settings, Variables(), TorchSettings(), *plugins)


def _shipped(name: str) -> list[Route]:
    made = SOCKET.part(name)
    return [made()] if made is not None else []


BATCH_SPLIT = BatchSplit(carriers)


def routes() -> tuple[Route, ...]:
    """Return all routes, as they are applied."""
    return (*carriers(), BATCH_SPLIT)


_MUST_BUILD = (
    "the script must build it: it may read joulefront_hook.configuration() or take {KNOB} in its "
    "command"
)


def today_of(job: ScriptTraining) -> dict[str, Value]:
    """Return the present value of each knob that some route knows."""
    return today_by(routes(), job)


def support_of(job: ScriptTraining, knob: str) -> KnobSupport:
    """Return the support of a launch knob by the first route that has it, or the first reason."""
    able = (BATCH_SPLIT,) if knob in SPLIT else carriers()
    for route in able:
        if (support := route.support(job, knob)) is not None:
            return support
    reasons = (route.why_not(job, knob) for route in able)
    return KnobSupport(next(filter(None, reasons), _MUST_BUILD))


__all__ = [
    "BATCH_SPLIT",
    "FRAMEWORK_ARGUMENTS",
    "MODEL_SWITCH",
    "Draft",
    "KnobSupport",
    "Route",
    "carriers",
    "routes",
    "support_of",
    "today_of",
]
