"""Request about a job: where it trains, in which space, and which knobs may change.

The command line makes one before anything is computed, so nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tuner.problem.constraints import Constraints
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.fields import option
from tuner.search_spaces.job import TrainingJob, job_of
from tuner.search_spaces.knob_declarations import Knob, check_knobs, fixed, load_pack, parse_knob
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.job import launchable

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
    #: The models answer, and nothing is run: what the built-in program cannot run yet is kept.
    predicted: bool = False

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

    def searched_knobs(self, job: TrainingJob) -> tuple[TrainingJob, list[str]]:
        """Return the job with the declared knobs that are searched, and notes on them.

        Those are left alone where the models answer, none of which knows them.
        """
        if not job.knobs:
            return job, []
        knobs = launchable(job).searched_knobs
        if self.predicted:
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


def cluster_of(cluster: Cluster | str) -> Cluster:
    """Return a cluster by name or path; that of this machine for "auto"."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster != "auto":
        return load_cluster(cluster)
    from tuner.workload.node.platforms import detect_cluster

    return detect_cluster()
