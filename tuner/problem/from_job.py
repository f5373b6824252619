"""Problems of a job on a cluster: the candidates that can run, and the user's baseline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tuner.models.memory_margin import CANDIDATE_FACTOR
from tuner.models.prior import SOCKET as PRIORS
from tuner.models.prior import peak_memory_bytes, prior_of
from tuner.problem.baseline import Baseline, default_name, lighter_defaults, read_baseline
from tuner.problem.job_request import Given, JobRequest
from tuner.problem.knob_report import knobs_in_play
from tuner.problem.problem import REAL_COST, Problem, baseline_section, space_section
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import plain
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import with_baseline
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.model_facts import facts_of, job_state_bytes
from tuner.search_spaces.rules import why_it_cannot_run
from tuner.search_spaces.space import (
    Candidates,
    SearchSpace,
    load_space,
)
from tuner.workload.program.built_in_job import launchable
from tuner.workload.program.ops import cannot_build, cannot_compile

#: Spaces of a new run without --space: every rank holds the whole model, or its parts as well, or
#: the experts of a mixture are divided, too.
SMALL, LARGE, EXPERTS = "default", "large", "experts"


@dataclass(frozen=True)
class Question:
    """Job, cluster and space that a request names, as a search and a plan both need them.

    Attributes:
        request: what was asked.
        predicted: it leaves alone what no model knows, and keeps what the built-in program cannot
            run yet.
        job: with the declared knobs that are searched.
        space_name: as given, which may be a path.
        whole, space: the space of that name, and what of it is searched.
    """

    request: JobRequest
    predicted: bool
    job: TrainingJob
    cluster: Cluster
    space_name: str
    whole: SearchSpace
    space: SearchSpace
    today: Baseline
    notes: tuple[str, ...]

    def problem(
        self,
        candidates: Candidates,
        space: Mapping[str, Any],
        *,
        baseline: Configuration | None = None,
        identity: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Problem:
        """Return the problem of these candidates; `space` is the section of study.toml.

        Args:
            baseline: today's under the name that the candidates give it.
            identity: further sections of study.toml.
        """
        today = baseline or self.today.configuration
        changed = self.request.allow_changed_training
        return Problem(
            name=self.job.name,
            candidates=candidates,
            steps=self.job.steps or 1,
            baseline=today,
            identity={
                **identity_of(self.job, self.cluster, space),
                "baseline": baseline_section(self.today.name, today),
                "request": {"allow_changed_training": changed, "predicted": self.predicted},
                **(identity or {}),
            },
            job=self.job,
            cluster=self.cluster,
            **more,
        )


def question_of(request: JobRequest, *, plan: bool = False) -> Question:
    """Find the job, cluster and space of a request; a `plan` ignores declared knobs, which no model
    knows.
    """
    job = request.named_job
    cluster = cluster_of(request.cluster)
    if not request.clocks:
        cluster = replace(cluster, clock_control=False)
    job, notes = request.searched_knobs(job, plan=plan)
    name, why = request.space, ""
    if name is None:
        name, why = _default_space(job, cluster)
    today = baseline_of(request.baseline, job, cluster)
    whole = name if isinstance(name, SearchSpace) else load_space(name)
    name = name.name if isinstance(name, SearchSpace) else str(name)
    searched = request.allowed(whole)
    notes += [*today.notes, *([why] if why else [])]
    return Question(request, plan, job, cluster, name, whole, searched, today, tuple(notes))


def _default_space(job: TrainingJob, cluster: Cluster) -> tuple[str, str]:
    """Return the space of a run that names none, and a note on why it is not the small one."""
    can_split = cluster.devices > 1 and job.splits_model and job.is_modelled
    if can_split and (experts := facts_of(job).experts):
        without = f"--space {SMALL}: without tensor, pipeline and expert parallelism"
        return EXPERTS, f"space {EXPERTS!r} is searched for {experts} experts ({without})"
    if why := _why_large(job, cluster):
        without = f"--space {SMALL}: without tensor and pipeline parallelism"
        return LARGE, f"space {LARGE!r} is searched for {why} ({without})"
    return SMALL, ""


def _why_large(job: TrainingJob, cluster: Cluster) -> str:
    """Return why a job needs more than replicas on a cluster, as a phrase; "" if it does not."""
    if not job.splits_model or not job.is_modelled:
        return ""
    if cluster.nodes > 1:
        return f"{cluster.nodes} nodes"
    parameters, memory = facts_of(job).parameters, cluster.device.memory_limit_bytes
    states = job_state_bytes(job, 0, 1)
    if cluster.devices == 1 or memory is None or states <= memory:
        return ""
    return f"{parameters / 1e9:.2g} billion parameters on {memory / 1e9:.0f} GB devices"


def problem_of_job(request: JobRequest, *, plan: bool = False) -> Problem:
    """Return the problem of a job on a cluster.

    A `plan` keeps what the built-in training program cannot run yet, for a simulated cluster. What
    needs more GPUs than the job may have could not be chosen, so it is left out.
    """
    question, most = question_of(request, plan=plan), request.constraints.max_gpus
    job, cluster = question.job, question.cluster
    found = _runnable(question, plan)
    _leave_out_unfitting(found, question, plan)
    found.notes.extend(question.notes)
    usable = question.whole
    if request.cluster == "auto":
        usable = _leave_out_unusable_here(found, question, request.clocks)
    configuration = question.today.configuration
    allowed = _allowed(found, most, question.space_name, configuration)
    if not found.inspected:
        found.notes.extend(knobs_in_play(allowed, question.whole, job, cluster))
    found.notes.extend(PRIORS.left_out)
    candidates = found.candidates
    sized = "global_batch" in launchable(job, cluster).narrowed(question.whole).choices
    if sized and configuration.get("global_batch") is None:
        # The candidates have it, so that their sizes are numbers on one scale.
        whole = {**configuration.launch, "global_batch": job.global_batch}
        configuration = Configuration(Settings(whole), configuration.live)
    if configuration in candidates:  # under the name that the candidates give it
        configuration = candidates[candidates.index_of(configuration)]
    else:
        candidates = Candidates.from_configurations([configuration, *candidates])
    return question.problem(
        candidates.where(lambda launch: _uses_at_most(launch, most)),
        {**space_section(question.space_name, candidates), "knobs": usable.to_knobs()},
        baseline=configuration,
        cost=REAL_COST,
        notes=tuple(found.notes),
    )


def identity_of(job: TrainingJob, cluster: Cluster, space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of study.toml that identify a question, without its baseline."""
    # The model as one JSON text: Hugging Face configs hold nulls, which TOML cannot say.
    of_job = {**job.to_json(), "model": json.dumps(dict(job.model), sort_keys=True)}
    return dict(plain({"job": of_job, "cluster": asdict(cluster), "space": space}))


def cluster_of(cluster: Cluster | str) -> Cluster:
    """Return a cluster by name or path; that of this machine for "auto"."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster != "auto":
        return load_cluster(cluster)
    from tuner.workload.node.machine import detect_cluster

    return detect_cluster()


def cluster_to_predict(cluster: Cluster | str) -> Cluster:
    """Return the cluster of a prediction; InputError if none is named and no GPU is here."""
    found = cluster_of(cluster)
    if cluster == "auto" and not found.device.is_gpu:
        raise InputError(
            "this machine has no GPU to predict for; name a cluster, such as --cluster a100-8 "
            "(`tuner list clusters` lists them), or --cluster cpu-2 for two cores"
        )
    return found


def baseline_of(given: Given, job: TrainingJob, cluster: Cluster) -> Baseline:
    """Return the configuration that the user runs today."""
    if isinstance(given, Configuration):
        given = with_baseline(given, job.knobs)
        if broken := why_it_cannot_run(given, job, cluster):
            raise InvalidConfiguration(given.short, broken)
        return Baseline(given, "yours")
    if given is not None:
        return read_baseline([given] if isinstance(given, str | Path) else given, job, cluster)
    started = launchable(job, cluster)
    configuration = started.today()
    if started.today_name:
        return Baseline(configuration, started.today_name)
    configuration = _default_that_fits(configuration, job, cluster)
    return Baseline(configuration, default_name(configuration))


def _default_that_fits(default: Configuration, job: TrainingJob, cluster: Cluster) -> Configuration:
    # The default's memory is estimated roughly; the models know what the fullest rank needs. Where
    # it does not fit, the fastest plain one that does is what a careful user runs; it stays where
    # none does, or the models know nothing.
    limit = cluster.device.memory_limit_bytes
    model = prior_of(job, cluster) if limit is not None else None
    if limit is None or model is None:
        return default
    if model.predict([default]).memory_bytes[0] <= limit:
        return default
    lighter = lighter_defaults(default, job)
    able = [each for each in lighter if not why_it_cannot_run(each, job, cluster)]
    found = model.predict(able)
    times_s = np.where(found.memory_bytes <= limit, found.step_time_s, np.inf)
    return able[int(times_s.argmin())] if np.isfinite(times_s).any() else default


@dataclass
class _CandidateFilter:
    """Candidates that are narrowed step by step, with a note on each step.

    `inspected` is True if an inspection found which knobs can be set; the notes say so.
    """

    candidates: Candidates
    inspected: bool = False
    notes: list[str] = field(default_factory=list)

    def keep(self, kept: Sequence[Configuration], why: str, phrase: str = "") -> None:
        """Keep these, and note why the others, by default a number of them, are left out."""
        if left := len(self.candidates) - len(kept):
            phrase = phrase or f"{left} of {len(self.candidates)} configurations are"
            self.notes.append(f"{phrase} left out: {why}")
            self.candidates = Candidates.from_configurations(kept)


def _runnable(question: Question, plan: bool) -> _CandidateFilter:
    """Return the candidates that the program can run, or all for a plan of the built-in one.

    Where an inspection found which knobs can be turned, they begin with notes on these.
    """
    job = launchable(question.job, question.cluster)
    space = job.narrowed(question.space)
    every = space.candidates(question.job, question.cluster)
    values = space.choices.items()
    varied = (n for n, found in values if isinstance(found, tuple) and len({*found}) > 1)
    sentences = list(job.sentences({*question.space.choices, *varied}))
    if plan and not sentences:
        return _CandidateFilter(every)
    able = [c for c in every if not job.refused(c)]
    if not able:
        reasons = "; ".join(why for c in every.configurations[:1] for why in job.refused(c))
        raise InputError(
            f"no configuration of space {question.space.name!r} can be run on "
            f"{question.job.name!r}: {reasons}"
        )
    if sentences:
        return _CandidateFilter(Candidates.from_configurations(able), True, sentences)
    found = _CandidateFilter(every)
    found.keep(able, "the built-in training program cannot run them yet")
    return found


def _leave_out_unusable_here(
    found: _CandidateFilter, question: Question, clocks: bool
) -> SearchSpace:
    """Remove values that this machine cannot build or compile; return the space without them."""
    cluster, space = question.cluster, question.whole
    on_gpus = cluster.device.is_gpu
    if clocks and on_gpus and not cluster.clock_control:
        from tuner.workload.node.platforms import platform_of

        found.notes.append(
            f"clocks and power limits stay as they are: {platform_of(cluster).why_fixed(cluster)}"
        )
    started = launchable(question.job, cluster)
    if not question.predicted and (why := started.why_not_here()):
        raise InputError(why)
    no_adam = cannot_build("cpu_adam", gpus=on_gpus)
    no_drive = cannot_build("async_io", gpus=on_gpus) if cluster.nvme_path else ""
    for phrase, why, needs in (
        ("optimizer_offload=cpu", no_adam, lambda *knob: knob == ("optimizer_offload", "cpu")),
        ("offload to nvme", no_drive, lambda name, value: value == "nvme"),
        ("compilation", cannot_compile(), _compiles),
        *started.unsupported_values(),
    ):
        if why:
            kept = [c for c in found.candidates if not any(needs(*k) for k in c.launch.items())]
            found.keep(kept, why, f"{phrase} is")
            space = _without(space, needs, question)
    return space


def _compiles(knob: str, value: Value) -> bool:
    return knob == "compilation" and value != "none"


def _without(
    space: SearchSpace, needs: Callable[[str, Value], bool], question: Question
) -> SearchSpace:
    """Return a space without the values of knobs that need something."""
    choices = dict(space.choices)
    for name, values in space.values(question.job, question.cluster).items():
        kept = tuple(value for value in values if not needs(name, value))
        if len(kept) < len(values):
            choices[name] = kept
    return replace(space, choices={name: each for name, each in choices.items() if each != ()})


def _uses_at_most(launch: Settings, gpus: int | None) -> bool:
    return gpus is None or Configuration(launch).world_size <= gpus


def _allowed(
    found: _CandidateFilter, max_gpus: int | None, space: str, baseline: Configuration
) -> Candidates:
    candidates = found.candidates
    allowed = candidates.where(lambda launch: _uses_at_most(launch, max_gpus))
    if len(allowed) == len(candidates):
        return candidates
    if not len(allowed):
        least = min(Configuration(launch).world_size for launch in candidates.launches)
        raise InputError(
            f"nothing of space {space!r} runs on max_gpus={max_gpus}; the least that it has takes "
            f"{least}"
        )
    note = (
        f"{len(candidates) - len(allowed)} of {len(candidates)} configurations are left out: they "
        f"need more GPUs than max_gpus={max_gpus} allows"
    )
    if not _uses_at_most(baseline.launch, max_gpus):
        note += f"; today's needs {baseline.world_size}, and is measured for comparison only"
    found.notes.append(note)
    return allowed


def _leave_out_unfitting(found: _CandidateFilter, question: Question, plan: bool) -> None:
    job, cluster = question.job, question.cluster
    limit = cluster.device.memory_limit_bytes
    # Without a model nothing predicts memory; a process's share of a host's is no hard limit.
    model = prior_of(job, cluster) if limit is not None else None
    if limit is None or model is None:
        return
    every = found.candidates.configurations
    need = peak_memory_bytes(model, every)
    if plan and len(need) and need.min() > limit:
        raise InputError(does_not_fit(job, cluster, question.whole, len(every), float(need.min())))
    most = CANDIDATE_FACTOR
    fits = need <= most * limit
    if fits.any():
        found.keep(
            [c for c, fit in zip(every, fits, strict=True) if fit],
            f"they are predicted to need more than {most:g} times the memory of "
            f"{cluster.device.name}",
        )


def does_not_fit(
    job: TrainingJob, cluster: Cluster, searched: SearchSpace, count: int, need: float
) -> str:
    """Return a sentence on the memory that the smallest configuration, of `need` bytes, lacks on a
    GPU; `tuner fit` names changes that would make it fit.
    """
    has = float(cluster.device.memory_bytes or 0)
    return (
        f"{job.name} does not fit on {cluster.name}: the smallest of {count:,} configurations of "
        f"space {searched.name!r} needs {need / 1e9:.1f} GB of a GPU's {has / 1e9:.1f} GB "
        f"({(need - has) / 1e9:.1f} GB too many); `tuner fit` names what would make it fit"
    )
