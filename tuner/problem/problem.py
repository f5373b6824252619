"""The problem of a study: the candidates, the work that makes the solution, and prior knowledge,
with the expected cost of a probe and the recording that answers instead of one.

A problem is built from a job, a cluster and a space (`tuner.problem.from_job`), from a recorded
table or a trace (`tuner.recordings.problem`), or from a run folder (`tuner.study.load`).
Session, planner and result see only the problem, so a replayed study is the same study. `identity`
is what study.toml keeps of it, and what a resumed study is compared with.

Whether a GPU takes a lock of its clock only the first attempt tells, in a probe. From then on the
problem is the same without the knob (`without_unsupported`), so that every other knob is still
searched. The trace holds the refusals, and a study that continues begins with them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tuner.models.prior import Prior, prior_of
from tuner.problem.settings import NoVerdict
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InvalidValue, check_integer
from tuner.search_spaces.job import TrainingJob, steps_a_job_step
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import (
    Basis,
    Measurement,
    ProbeLimits,
    ProbeRecord,
    WindowPolicy,
    limits_of,
)


@dataclass(frozen=True)
class ProbeCost:
    """Predicted cost of probes.

    Attributes:
        launch_s: from the request to the first measured step, seconds.
        settle_s: at a new live setting before its window opens, seconds.
        launch_power: power during the launch, as a share of the configuration's own.
        min_steps: smallest number of steps of a window.
    """

    launch_s: float = 30.0
    settle_s: float = 1.0
    window_s: float = 5.0
    launch_power: float = 0.5
    min_steps: int = 0

    def learned(self, records: Sequence[ProbeRecord]) -> ProbeCost:
        """Return the costs with the median length and power of the launches that measured.

        A launch is all of a probe but its windows, what was settled before them, and compilation,
        which other launches do not need.
        """
        lengths, powers = [], []
        for record in records:
            windows = record.measurements
            if not record.ok or not windows:
                continue
            settled_s = [self.settle_s if m.live else 0.0 for m in windows]
            length_s = record.wall_s - math.fsum(m.window_s for m in windows) - sum(settled_s)
            joules = record.energy_J - math.fsum(
                m.energy_J + s * m.power_W for m, s in zip(windows, settled_s, strict=True)
            )
            if length_s > 0 and joules > 0:
                lengths.append(max(0.0, length_s - record.compilation_s))
                powers.append(joules / (length_s * windows[0].power_W))
        if not lengths:
            return self
        return replace(
            self, launch_s=statistics.median(lengths), launch_power=statistics.median(powers)
        )

    def launch_J(self, power_W: np.ndarray) -> np.ndarray:
        """Joules of the launch of configurations that draw `power_W`."""
        return np.asarray(self.launch_s * self.launch_power * power_W)

    def visit_J(self, power_W: np.ndarray, step_time_s: np.ndarray) -> np.ndarray:
        """Joules of settling at a live setting and measuring it."""
        window = np.maximum(self.window_s, self.min_steps * step_time_s)
        return np.asarray((self.settle_s + window) * power_W)


def probe_limits(
    job: TrainingJob | None,
    prior: Prior | None,
    configurations: Sequence[Configuration],
    window: WindowPolicy,
    *,
    visits: int = 1,
    **limits_s: float | None,
) -> ProbeLimits:
    """Return the limits of a probe of these configurations (`limits_of`)."""
    step = math.nan if prior is None else float(prior.predict(configurations).step_time_s.max())
    inspected = job.first_step_s if job is not None else 0.0
    return limits_of(
        window, visits=visits, predicted_step_s=step, inspected_s=inspected, **limits_s
    )


@dataclass(frozen=True)
class Recording:
    """Recorded probes, in place of a job: they have no ranks to start.

    Attributes:
        path: the table's folder, or the trace's file.
        table: name of the table; "" for a trace.
        group: the search problem of a table that holds several.
        steps: units of work that make the solution; None if unknown.
        varies: a second measurement of a configuration may differ from the first.
    """

    path: str
    table: str = ""
    group: str = ""
    steps: int | None = None
    unit_of_work: str = "optimizer step"
    varies: bool = False

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
    def why_unverified(self) -> NoVerdict:
        """Reason not to launch a choice among these measurements again."""
        if not self.table:
            return NoVerdict("recorded_trace")
        return NoVerdict("not_requested" if self.varies else "no_spread")


#: Cost of probing before any probe was made: a launch of the built-in program on a CPU machine,
#: settling and a window (`tuner.workload.records.probe.WindowPolicy`).
REAL_COST = ProbeCost(launch_s=5.0, launch_power=0.7, settle_s=1.0, window_s=5.0, min_steps=3)


@dataclass(frozen=True)
class Problem:
    """Problem of a study.

    Attributes:
        candidates: every configuration that may be chosen. The baseline is one of them unless it
            needs more GPUs than the job may use: then it is measured for comparison only.
        steps: optimizer steps (or units of work) that the figures are of: those that make the
            solution, or 1 if the length of the training is unknown.
        baseline: what the user runs, or the default of the space or the recording; what it is, is
            named in `identity`.
        identity: sections that identify it: "job", "cluster", "space" or "recorded".
        job, cluster: None for a recorded table.
        predicts: probes are predictions of the analytic models.
        recording: what answers the probes instead of real ranks; None if these do.
    """

    name: str
    candidates: Candidates
    steps: int
    baseline: Configuration
    identity: Mapping[str, Any]
    cost: ProbeCost = REAL_COST
    job: TrainingJob | None = None
    cluster: Cluster | None = None
    unit_of_work: str = "optimizer step"
    notes: tuple[str, ...] = field(default=())
    predicts: bool = False
    recording: Recording | None = None

    def __post_init__(self) -> None:
        if self.job is not None and self.job.knobs and not self.candidates.knobs:
            candidates = replace(self.candidates, knobs=self.job.knobs)
            object.__setattr__(self, "candidates", candidates)

    @property
    def basis(self) -> Basis:
        """What answers the probes."""
        if self.predicts:
            return Basis.PREDICTED
        return Basis.MEASURED if self.recording is None else Basis.RECORDED

    @property
    def length(self) -> int | None:
        """Steps of the whole training, or of the recorded one; None if unknown."""
        return self.steps if self.job is None or self.job.steps else None

    @property
    def repays(self) -> bool:
        """True if a training of known length is to come, which can repay a search."""
        return self.job is not None and self.length is not None

    @cached_property
    def prior(self) -> Prior | None:
        """Prediction of this job on this cluster before a probe; None without one."""
        if self.job is None or self.cluster is None:
            return None
        return prior_of(self.job, self.cluster)

    @property
    def device_memory_bytes(self) -> float | None:
        """Memory of a GPU; None without a cluster, and on a CPU, which has no hard limit."""
        return self.cluster.device.memory_limit_bytes if self.cluster is not None else None

    @property
    def about(self) -> dict[str, Any]:
        """Job, cluster, space and versions, for the last page of the report."""
        return {
            **{name: dict(section) for name, section in self.identity.items()},
            "unit_of_work": self.unit_of_work,
            "candidates": len(self.candidates),
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """Return the versions of the packages involved; "absent" if one is not installed."""
    import platform

    from tuner.workload.node.platforms.base import USED

    names = ("joulefront", "numpy", "scipy", "scikit-learn", *USED)
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


@cache  # a session asks again for each file that it writes
def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def space_section(name: str, candidates: Candidates) -> dict[str, Any]:
    """Return the section [space] of study.toml."""
    return {"name": name, "configurations": len(candidates.whole)}


def baseline_section(name: str, baseline: Configuration) -> dict[str, Any]:
    """Return the section [baseline] of study.toml."""
    return {
        "name": name,
        "configuration": baseline.key,
        "launch": baseline.launch.to_json(),
        "live": baseline.live.to_json(),
    }


# Where the global batch is a knob (`TrainingJob.steps_at`, or its noise scale), configurations need
# different numbers of steps. Everything that searches and answers multiplies a step's time and
# energy by one number, the job's steps: so a measurement at another batch enters the study as what
# one of the job's own steps would cost there. The trace keeps the steps as they were measured.


def in_job_steps(record: ProbeRecord, job: TrainingJob | None) -> ProbeRecord:
    """Return the record with step times, and so energies per step, of the job's own steps."""
    share = steps_a_job_step(Configuration(record.request.launch), job)
    if share == 1.0:
        return record

    def scaled(m: Measurement) -> Measurement:
        return replace(
            m,
            step_time_s=m.step_time_s * share,
            step_time_se_s=m.step_time_se_s * share,
            step_times_s=tuple(time * share for time in m.step_times_s),
        )

    return replace(record, measurements=tuple(map(scaled, record.measurements)))


def unsupported_knobs(records: Iterable[ProbeRecord]) -> dict[str, str]:
    """Return the knobs that devices refused as such, each with its first refusal's sentence."""
    found: dict[str, str] = {}
    for record in records:
        for missed in record.missed:
            for knob in missed.unsupported:
                found.setdefault(knob, missed.message)
    return found


def fixed_knobs(record: ProbeRecord) -> list[str]:
    """Return a sentence on each knob that stays as it is because of this probe."""
    return [
        f"{knob} stays as it is from now on, and the other knobs are searched: {why}"
        for knob, why in unsupported_knobs([record]).items()
    ]


def without_unsupported(problem: Problem, records: Iterable[ProbeRecord]) -> Problem:
    """Return the problem without the knobs that were refused; the same object if it has none.

    Of a launch knob today's value stays, for others were tried and do not train the same.
    """
    knobs = unsupported_knobs(records)
    candidates, today = problem.candidates, problem.baseline.launch
    refused = {
        c
        for c in candidates
        if any(knob in c.launch and c.launch[knob] != today.get(knob) for knob in knobs)
    }
    if not refused and not any(knob in c.live for c in candidates for knob in knobs):
        return problem
    kept = dict.fromkeys(_without(c, knobs) for c in candidates if c not in refused)
    reduced = Candidates.from_configurations(kept)
    return replace(
        problem, candidates=replace(reduced, among=candidates.whole, knobs=candidates.knobs)
    )


def _without(configuration: Configuration, knobs: Iterable[str]) -> Configuration:
    live = {name: value for name, value in configuration.live.items() if name not in knobs}
    return Configuration(configuration.launch, Settings(live))
