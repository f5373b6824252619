"""Recordings: probes of a table or of an earlier run, which answer those of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.problem.stop_reason import NoVerdict
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidValue, check_integer
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.scripts.command import Start


@dataclass(frozen=True)
class Recording:
    """Recorded probes as a job (`tuner.workload.scripts.job.Job`), which has no ranks to start.

    Attributes:
        path: the table's folder, or the trace's file.
        table: name of the table; "" for a trace.
        group: the search problem of a table that holds several.
        steps: units of work that make the solution; None if unknown.
        varies: a second measurement of a configuration may differ from the first.
        baseline: what the recorded study compared with.
    """

    path: str
    table: str = ""
    group: str = ""
    steps: int | None = None
    unit_of_work: str = "optimizer step"
    varies: bool = False
    baseline: Configuration | None = field(default=None, compare=False)

    @classmethod
    def of(cls, study: Mapping[str, Any]) -> Recording | None:
        """Return the recording of study.toml; None if its probes were real."""
        section = study.get("recorded")
        if section is None:
            return None
        if not isinstance(section, Mapping):
            raise InvalidValue("recorded in study.toml", section, "a table")
        steps = section.get("steps")
        if steps is not None:
            check_integer("recorded.steps in study.toml", steps)
        return cls(
            path=str(section.get("path") or section.get("trace", "")),
            table=str(section.get("table", "")),
            group=str(section.get("group", "")),
            steps=steps,
            unit_of_work=str(section.get("unit_of_work", "optimizer step")),
            varies=section.get("varies", True) is True,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the section of study.toml."""
        shared = {"steps": self.steps, "varies": self.varies}
        if not self.table:
            return {"trace": self.path, **shared}
        own = {"table": self.table, "path": self.path, "group": self.group}
        return {**own, "unit_of_work": self.unit_of_work, **shared}

    @property
    def name(self) -> str:
        """Name of the table, of the run that made the trace, or of the trace's file."""
        path = Path(self.path)
        of_run = path.parent.parent.name if path.parent.name == "trace" else ""
        return self.table or of_run or path.stem

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """No knobs: the configurations are those that were recorded."""
        return ()

    @property
    def sizes(self) -> TrainingJob | None:
        """None: nothing is predicted."""
        return None

    @property
    def why_unverified(self) -> NoVerdict:
        """Reason not to launch a choice among these measurements again."""
        if not self.table:
            return NoVerdict("recorded_trace")
        return NoVerdict("not_requested" if self.varies else "no_spread")

    def today(self) -> Configuration:
        """Return the baseline of the recorded study."""
        if self.baseline is None:
            raise InputError(f"the recording {self.name!r} does not say what is run today")
        return self.baseline

    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Raise InputError: there are no ranks."""
        raise InputError(f"{self.name!r} is a recording, so nothing can be started")
