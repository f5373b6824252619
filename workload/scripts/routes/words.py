"""Routes through the command: its placeholders, the keys of its files, and its variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.fields import whole_number
from tuner.search_spaces.knobs import Value
from tuner.workload.scripts.declared_knobs import (
    environment,
    text_values,
    with_files,
)
from tuner.workload.scripts.routes.base import (
    ACCUMULATION,
    Draft,
    KnobSupport,
    Route,
    sizes_unknown,
    taken_by_script,
)
from tuner.workload.scripts.script_facts import LAUNCH
from tuner.workload.scripts.script_training import ScriptTraining


class Placeholders(Route):
    """Placeholders of the command, such as {micro_batch=8}."""

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the values that the placeholders state."""
        stated = {name: text for name, text in job.placeholders.items() if name in LAUNCH and text}
        numbers = {name: whole_number(text) for name, text in stated.items()}
        return {
            name: text if numbers[name] is None else numbers[name]  # type: ignore[misc]
            for name, text in stated.items()
        }

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support each knob that has a placeholder."""
        return taken_by_script(self, job, knob) if knob in job.placeholders else None

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        """Name the requirements of the script's own parallelism."""
        return sizes_unknown(job, knob) if knob in job.placeholders else ""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Fill the placeholders in; those of a rank stay."""
        values = {name: str(configuration.get(name)) for name in LAUNCH}
        values |= self._batch(job, configuration)
        values |= {"deepspeed_config": str(draft.config_file)}
        values |= text_values(configuration, job.knobs)
        draft.fill(values)

    def _batch(self, job: ScriptTraining, configuration: Configuration) -> dict[str, str]:
        # An argument may carry more than its part of the batch.
        times = job.frame.accumulation  # an unknown global batch leaves the script's own
        if job.global_batch:
            times = configuration.accumulation(job.global_batch)
        parts = {"micro_batch": configuration.micro_batch, ACCUMULATION: times}
        factors = {"ranks": configuration.data_parallel, ACCUMULATION: times}
        for name, carried in job.frame.carries.items():
            parts[name] *= math.prod(factors[each] for each in carried.split())
        return {name: str(part) for name, part in parts.items()}


class KeyFiles(Route):
    """Keys of the user's files, for declared knobs."""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Write changed copies of the files, and name them in the command."""
        words = with_files(draft.words, Path(job.cwd), configuration, job.knobs, draft.folder)
        draft.use_words(words)


class Variables(Route):
    """Environment variables, for declared knobs."""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Set the variables."""
        draft.add_variables(environment(configuration, job.knobs))
