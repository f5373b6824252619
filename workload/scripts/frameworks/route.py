"""Route through the keys of a recognised framework."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import Value
from tuner.workload.scripts.declared_knobs import framework_settings
from tuner.workload.scripts.frameworks.bound_driver import BoundDriver
from tuner.workload.scripts.routes import ACCUMULATION, Draft, KnobSupport, Route
from tuner.workload.scripts.script_facts import ScriptTraining


def _driven(job: ScriptTraining) -> BoundDriver | None:
    return job.driven if isinstance(job.driven, BoundDriver) else None


class DriverKeys(Route):
    """Keys of a recognised framework in the command, its file or the environment."""

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the values of the keys."""
        return driven.today if (driven := _driven(job)) is not None else {}

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support each knob whose key the installed framework has."""
        if (driven := _driven(job)) is None:
            return None
        driver = driven.bound.driver
        if knob == ACCUMULATION and driven.accumulates:
            return KnobSupport(f"{driver.name} follows the global batch", route=self)
        if knob not in driven.today:
            return None
        levels = tuple(driven.levels(knob)) if knob in driver.knobs else ()
        named = driver.knobs[knob].keys[0] if knob in driver.knobs else "number of ranks"
        return KnobSupport(f"{driver.name}'s {named}", levels, self)

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        """Return the driver's reason."""
        return driven.against.get(knob, "") if (driven := _driven(job)) is not None else ""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Write the keys that differ from today's, and those that keep a probe silent."""
        if (driven := _driven(job)) is None:
            return
        changes = driven.changes(configuration, draft.baseline, job.global_batch)
        changes |= framework_settings(configuration, job.knobs)
        words, env = driven.start(changes, draft.folder, tuple(draft.words), probe=draft.probe)
        draft.use_words(words)
        draft.add_variables(env)
        draft.options["env"] = {name: env[name] for name in env if name != "PYTHONPATH"}
        if "PYTHONPATH" in env:  # of a generated module
            draft.options["path"] = [env["PYTHONPATH"]]
