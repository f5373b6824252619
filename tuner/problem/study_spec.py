"""What a study is asked: its job and space, its settings, and how its last session ended.

study.toml is parsed into a `StudySpec` once (`tuner.study.load`); a running session has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tuner.problem.constraints import Constraints
from tuner.problem.job_request import JobRequest
from tuner.problem.problem import Problem, Recording, versions
from tuner.problem.run_folder import STUDY_SCHEMA
from tuner.problem.settings import NoVerdict, SearchSettings, StopReason, stop_sentence
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import plain
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import read_fields
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.model_sizes import READER
from tuner.search_spaces.plugins import shipped_module
from tuner.search_spaces.space import SearchSpace, read_space
from tuner.workload.records.probe import Basis
from tuner.workload.scripts.script_job import ScriptJob

if TYPE_CHECKING:
    from tuner.search_spaces.space import SearchSpace

AnyJob = TypeVar("AnyJob", bound=TrainingJob)


@dataclass(frozen=True)
class SessionEnd:
    """End of a study's last session.

    Attributes:
        no_verdict: why the choice was not launched again as often as was worth it; None if it was.
    """

    stop: StopReason = field(default_factory=lambda: StopReason("running"))
    time_s: float | None = None
    no_verdict: NoVerdict | None = None


@dataclass(frozen=True)
class StudySpec:
    """What is asked, as study.toml keeps it: problem, limits, settings, and how the last session
    ended."""

    name: str
    run_dir: Path | None
    problem: Problem
    constraints: Constraints = field(default_factory=Constraints)
    settings: SearchSettings = field(default_factory=SearchSettings)
    unverified: NoVerdict | None = None
    created: str = ""
    ended: SessionEnd = field(default_factory=SessionEnd)
    #: Driver, host and database of the storage (`tuner.study.recorder`); "" of the journal.
    storage: str = ""

    def to_toml(self) -> dict[str, Any]:
        """Return the tables of study.toml; a storage is without its user and password."""
        return plain(
            {
                "schema": STUDY_SCHEMA,
                "name": self.name,
                "created": self.created,
                **({"storage": self.storage} if self.storage else {}),
                "constraints": self.constraints.given,
                "settings": self.settings.to_json(),
                **self.problem.identity,
                **self._counts(),
                "versions": versions(),
                "ended": self._end(),
            }
        )

    def _counts(self) -> dict[str, Any]:
        reader, job = shipped_module(READER), self.problem.job
        return dict(reader.counts_to_keep(job)) if reader is not None and job is not None else {}

    def _end(self) -> dict[str, Any]:
        ended = self.ended
        made: dict[str, Any] = {
            "stopped": stop_sentence(ended.stop),
            "stop_reason": ended.stop.to_json(),
            "time_s": ended.time_s,
        }
        if ended.no_verdict is not None:
            made["no_verdict"] = ended.no_verdict.to_json()
        return made


def why_unverified(verify: bool, problem: Problem) -> NoVerdict | None:
    """Return why a study does not verify its choice; None if it does."""
    if problem.basis is Basis.PREDICTED:
        return NoVerdict("prediction")
    if verify:
        return None
    recording = problem.recording
    return NoVerdict("not_requested") if recording is None else recording.why_unverified


def parse_space(study: Mapping[str, Any]) -> SearchSpace | None:
    """Return the space of study.toml; None if it has no knobs, as that of a recording."""
    section = study.get("space", {})
    if "knobs" not in section:
        return None
    return read_space(str(section.get("name", "")), section["knobs"])


def parse_request(study: Mapping[str, Any]) -> JobRequest | None:
    """Return a study's request about its job; None for a recording and a plan."""
    job, cluster, space = parse_job(study), parse_cluster(study), parse_space(study)
    if job is None or cluster is None or space is None or Recording.of(study) is not None:
        return None
    request = study.get("request", {})
    return JobRequest(
        job,
        cluster,
        space,
        constraints=Constraints(max_gpus=study.get("constraints", {}).get("max_gpus")),
        baseline=parse_baseline(study),
        allow_changed_training=request.get("allow_changed_training") is True,
        predicted=request.get("predicted") is True,
    )


def parse_baseline(study: Mapping[str, Any]) -> Configuration:
    """Return the baseline of study.toml; every default if it has no such section."""
    section = study.get("baseline", {})
    where = "[baseline] of study.toml"
    launch, live = (Settings.from_json(section.get(half, {}), where) for half in ("launch", "live"))
    return Configuration(launch, live)


def parse_job(study: Mapping[str, Any]) -> TrainingJob | None:
    """Return the job of study.toml or of a result's `about`; None if it has none."""
    return parse_script(study) or _read_job(study, TrainingJob)


def parse_script(study: Mapping[str, Any]) -> ScriptJob | None:
    """Return the script's job of study.toml; None if it has none, or another job."""
    section = study.get("job")
    described = isinstance(section, Mapping) and "frame" in section
    return _read_job(study, ScriptJob) if described else None


def _read_job(study: Mapping[str, Any], kind: type[AnyJob]) -> AnyJob | None:
    section = study.get("job")
    if not isinstance(section, Mapping):
        return None
    try:
        job = kind.from_json({**section, "model": json.loads(section["model"])})
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"the [job] of study.toml is not a job: {error}") from error
    return cast(AnyJob, job)


def parse_cluster(study: Mapping[str, Any]) -> Cluster | None:
    """Return the cluster of study.toml or of a result's `about`; None if it has none."""
    section = study.get("cluster")
    if not isinstance(section, Mapping):
        return None
    try:
        return read_fields(
            Cluster, section, "cluster", device=lambda data: read_fields(Device, data, "device")
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the [cluster] of study.toml is not a cluster: {error}") from error
