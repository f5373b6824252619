"""What a study is asked: its job and space, its settings, and how its last session ended.

study.toml is parsed into a `StudySpec` once (`tuner.study.load`); a running session has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from tuner.problem.constraints import Constraints
from tuner.problem.problem import Problem, Recording, versions
from tuner.problem.run_folder import STUDY_SCHEMA
from tuner.problem.settings import NoVerdict, SearchSettings, StopReason, stop_sentence
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import plain
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, job_of
from tuner.search_spaces.knob_declarations import Knob, check_knobs, fixed, load_pack, parse_knob
from tuner.search_spaces.model_facts import count_to_keep
from tuner.search_spaces.options import option
from tuner.search_spaces.space import SearchSpace, read_space
from tuner.search_spaces.typed_json import read_fields
from tuner.workload.records.probe import Basis
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.job import launchable
from tuner.workload.scripts.script_job import ScriptJob

if TYPE_CHECKING:
    from tuner.search_spaces.space import SearchSpace

Given = Configuration | str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class JobRequest:
    """Arguments of `tuner.optimize` and `tuner.plan` on the job, which `optimize` documents."""

    job: TrainingJob | str | Path | None = None
    cluster: Cluster | str = "auto"
    space: str | SearchSpace | None = None
    constraints: Constraints = field(default_factory=Constraints)
    baseline: Given = None
    knobs: Sequence[Knob | str] = ()
    allow_changed_training: bool = option(False, "also search knobs that change what is learnt")
    clocks: bool = option(
        True, "search clocks and power limits", negated="leave clocks and power limits alone"
    )

    #: A script whose command has not been inspected, in place of a job.
    script: Script | None = None

    @property
    def named_job(self) -> TrainingJob:
        """The job that is named; InputError if there is none of that name."""
        assert self.script is None  # it is inspected before
        return job_of(self.job)

    def declaring_knobs(self) -> Self:
        if not self.knobs:
            return self
        if self.script is not None:
            return replace(self, script=with_knobs(self.script, self.knobs), knobs=())
        return replace(self, job=job_with_knobs(self.named_job, self.knobs), knobs=())

    @property
    def baseline_words(self) -> list[str]:
        """The words that name the baseline; none if it is a configuration, or not given."""
        given = self.baseline
        if given is None or isinstance(given, Configuration):
            return []
        return [str(word) for word in ([given] if isinstance(given, str | Path) else given)]

    def allowed(self, space: SearchSpace) -> SearchSpace:
        """Return the part of a space that is searched."""
        return space if self.allow_changed_training else space.same_training()

    def searched_knobs(self, job: TrainingJob, *, plan: bool) -> tuple[TrainingJob, list[str]]:
        """Return the job with the declared knobs that are searched, and notes on them."""
        if not job.knobs:
            return job, []
        knobs = launchable(job).searched_knobs
        if plan:
            names = ", ".join(knob.name for knob in knobs)
            note = f"declared knobs stay at today's values, because no model knows them: {names}"
            return replace(job, knobs=fixed(knobs)), [note]
        left = [k for k in knobs if k.changes_training and not self.allow_changed_training]
        kept = "; ".join(_described(knob) for knob in knobs if knob not in left)
        notes = []
        if kept:
            notes.append(f"declared knobs in play, of which no model predicts anything: {kept}")
        if left:
            names = ", ".join(knob.name for knob in left)
            notes.append(
                f"declared knobs that stay at today's values, because they change what is learnt: "
                f"{names} (--allow-changed-training searches them)"
            )
        both = [k for knob in knobs for k in (fixed([knob]) if knob in left else (knob,))]
        return replace(job, knobs=check_knobs(both)), notes


def _described(knob: Knob) -> str:
    levels = ", ".join("not set" if level is None else str(level) for level in knob.levels)
    how = f" by {knob.how}" if ":" in knob.how else ""
    if knob.live:
        how = " live, by the script"
    return f"{knob.name} ({levels}){how}" + (f" where {knob.when}" if knob.when else "")


def with_knobs(job: Script, knobs: Sequence[Knob | str]) -> Script:
    """Return a script with more declared knobs; "framework" names those of its framework."""
    return replace(job, knobs=_more_knobs(job.knobs, knobs, job))


def job_with_knobs(job: TrainingJob, knobs: Sequence[Knob | str]) -> TrainingJob:
    """Return a job with more declared knobs."""
    return replace(job, knobs=_more_knobs(job.knobs, knobs))


def _more_knobs(
    own: Sequence[Knob], more: Sequence[Knob | str], script: Script | None = None
) -> tuple[Knob, ...]:
    """Return declared knobs with more.

    Args:
        more: knobs, declarations such as "compile=false,true", names of packs, or paths of their
            files. A knob of a pack gives way to one of the same name that is not of a pack.
    """
    kept, packed = list(own), list[Knob]()
    for given in more:
        if isinstance(given, Knob):
            kept.append(given)
        elif "=" in given:
            kept.append(parse_knob(given))
        elif given == "framework" and script is not None:
            packed += script.framework_knobs
        else:
            packed += load_pack(given).knobs
    names = {knob.name for knob in kept}
    return check_knobs([*kept, *(knob for knob in packed if knob.name not in names)])


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
    """A study."""

    name: str
    run_dir: Path | None
    problem: Problem
    constraints: Constraints = field(default_factory=Constraints)
    settings: SearchSettings = field(default_factory=SearchSettings)
    unverified: NoVerdict | None = None
    created: str = ""
    ended: SessionEnd = field(default_factory=SessionEnd)
    #: Driver, host and database of the storage (`tuner.storage.storage_name`); "" of the journal.
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
                **self._counted_model(),
                "versions": versions(),
                "ended": self._end(),
            }
        )

    def _counted_model(self) -> dict[str, Any]:
        kept = count_to_keep(self.problem.job) if self.problem.job is not None else {}
        return {"counted_model": dict(kept)} if kept else {}

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
