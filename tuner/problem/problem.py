"""The problem of a study: the candidates, the work that makes the solution, and prior knowledge.

A problem is built from a job, a cluster and a space (`tuner.problem.from_job`), from a recorded
table or a trace (`tuner.problem.from_recording`), or from a run folder (`tuner.study.load`).
Session, sampler and result see only the problem, so a replayed study is the same study. `identity`
is what study.toml keeps of it, and what a resumed study is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from tuner.models.prior import Prior, prior_of
from tuner.problem.probe_cost import ProbeCost
from tuner.problem.recording import Recording
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, steps_a_job_step
from tuner.search_spaces.space import Candidates
from tuner.workload.records.basis import Basis
from tuner.workload.records.probe import Measurement, ProbeRecord

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

    from tuner.workload.node.readiness import USED

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
