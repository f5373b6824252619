"""Problems of a job on a cluster: the candidates that can run, and the user's baseline.

A saving is worth what it is measured against, so the baseline is the user's own configuration where
they give it (from their DeepSpeed JSON and flags), and otherwise a plain one that a careful user
would run, never an untuned straw man. The keys of the JSON that are knobs become part of the
configuration; notes name the others.

If the front has no tensor parallelism, the user should know whether it lost, was refused or was
not in the space. So each launch knob is either varied, or named with its reason: the space does not
name it, or the rule that refuses all its other values here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tuner.models.memory_margin import CANDIDATE_FACTOR
from tuner.models.prior import SOCKET as PRIORS
from tuner.models.prior import peak_memory_bytes, prior_of, unpredicted_knobs
from tuner.problem.job_request import Given, JobRequest, cluster_of
from tuner.problem.problem import REAL_COST, Problem, baseline_section, space_section
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import plain
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import declared_words, with_baseline
from tuner.search_spaces.knobs import KNOBS, Value, split_words, values_of
from tuner.search_spaces.model_sizes import reader_of, sizes_of
from tuner.search_spaces.rules import broken_rules, unrunnable, why_it_cannot_run
from tuner.search_spaces.space import (
    Candidates,
    SearchSpace,
    degrees,
    load_space,
)
from tuner.workload.scripts import SOCKET as ROUTES
from tuner.workload.scripts.installed import cannot_build, cannot_compile
from tuner.workload.scripts.job import launchable
from tuner.workload.scripts.key_files import read_deepspeed

#: Keys of DeepSpeed's JSON that are read, say how the batch is split, or change nothing of a step.
_FACTS = {"zero_optimization", "tensor_parallel", "fp16", "bf16", "sequence_parallel_size"}
_FACTS |= {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
_FACTS |= {"steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard", "wandb"}
#: Parts of "zero_optimization" that are knobs.
_ZERO = ("stage", "offload_optimizer", "offload_param", "zero_hpz_partition_size")
#: Beginning of the name of a default baseline.
_DEFAULT = "the default:"


@dataclass(frozen=True)
class Baseline:
    """Configuration that the user runs today; `name` is a phrase on where it comes from."""

    configuration: Configuration
    name: str
    notes: tuple[str, ...] = ()


def default_name(configuration: Configuration) -> str:
    """Return the name of the default baseline, which the report shows beside every saving."""
    named = any(name in KNOBS for name in configuration.live)
    live = "the clocks named" if named else "clocks left to the device"
    return (
        f"{_DEFAULT} data parallelism over {configuration.data_parallel} "
        f"device{'s' * (configuration.data_parallel != 1)}, the lowest ZeRO stage and the largest "
        f"micro-batch that fit, {live}"
    )


def lighter_defaults(default: Configuration, job: TrainingJob) -> list[Configuration]:
    """Return configurations that need less memory than a default, and still are plain ones.

    They have smaller micro-batches, higher ZeRO stages and checkpointed activations. The optimizer
    stays where it is: on the host a step may take many times as long, and a saving over that would
    be none of the user's. `tuner.study.rules.lighter` may move it, where one of these, though
    predicted to fit, ran out of memory: slow is then better than nothing to compare with.
    """
    share = job.global_batch // default.data_parallel
    batches = [n for n in range(default.micro_batch, 0, -1) if share % n == 0]
    stages = range(default.zero_stage, 4 if default.data_parallel > 1 else default.zero_stage + 1)
    kept = [default.launch["activation_checkpointing"], "full"]
    return [
        Configuration(
            Settings(
                {
                    **default.launch,
                    "micro_batch": micro_batch,
                    "zero_stage": stage,
                    "activation_checkpointing": checkpointing,
                }
            ),
            default.live,
        )
        for micro_batch in batches
        for stage in stages
        for checkpointing in dict.fromkeys(kept)
    ]


def is_default(identity: Mapping[str, Any]) -> bool:
    """Return True if the baseline of a problem's identity is the default, not the user's own."""
    section = identity.get("baseline")
    return isinstance(section, Mapping) and str(section.get("name", "")).startswith(_DEFAULT)


def read_baseline(words: Sequence[str | Path], job: TrainingJob, cluster: Cluster) -> Baseline:
    """Read a DeepSpeed JSON and KNOB=VALUE into a configuration.

    Args:
        words: at most one path of a DeepSpeed JSON, and KNOB=VALUE, which win over it.
        job, cluster: what it trains, and where. Where no word says otherwise, what the job
            states holds; else data parallelism fills the devices, as far as they divide the batch.

    Raises:
        InputError: the file is no DeepSpeed JSON, or there are two.
        InvalidConfiguration: the configuration cannot train this job on this cluster.
    """
    texts = [str(word) for word in words]
    declared, rest = declared_words(texts, job.knobs)
    files, flags = split_words(rest)
    if len(files) > 1:
        raise InputError(f"{files[1]!r} is a second file; --today takes one DeepSpeed JSON")
    own = {knob.name for knob in job.knobs}
    values = {name: value for name, value in job.stated.items() if name not in own}
    declared = {**{n: v for n, v in job.stated.items() if n in own}, **declared}
    notes: list[str] = []
    if files:
        config = read_deepspeed(Path(files[0]), option="--today")
        found, notes = _knobs_of(config, job, files[0])
        values |= found
    values |= values_of(flags)
    if "data_parallel" not in values:
        inside = Configuration.of(values).world_size
        fitting = [n for n in degrees(cluster.devices // inside) if job.global_batch % n == 0]
        values["data_parallel"] = max(fitting, default=1)
    if files and "micro_batch" not in values:
        times = config.get("gradient_accumulation_steps")
        times = times if isinstance(times, int) and times > 0 else 1
        share = max(1, job.global_batch // (int(str(values["data_parallel"])) * times))
        values["micro_batch"] = share
        notes.append(
            f"no micro-batch is named, so it is the global batch's share of a rank: {share}"
        )
    configuration = Configuration.of(values)
    launch = Settings({**configuration.launch, **declared})
    configuration = with_baseline(Configuration(launch, configuration.live), job.knobs)
    if broken := why_it_cannot_run(configuration, job, cluster):
        raise InvalidConfiguration(configuration.short, broken)
    name = ", ".join(Path(text).name if text in files else text for text in texts)
    return Baseline(
        configuration, f"yours: {name}" if name else default_name(configuration), tuple(notes)
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _knobs_of(
    config: Mapping[str, Any], job: TrainingJob, file: str
) -> tuple[dict[str, Value], list[str]]:
    values: dict[str, Value] = {}
    notes = []
    zero, tensor = _section(config, "zero_optimization"), _section(config, "tensor_parallel")
    stage = zero.get("stage", 0)
    if stage == "auto":
        notes.append(f"{file} leaves the ZeRO stage to its caller ('auto'); 0 is taken")
        stage = 0
    offload = _section(zero, "offload_optimizer")
    for knob, section in (
        ("optimizer_offload", offload),
        ("parameter_offload", _section(zero, "offload_param")),
    ):
        device = str(section.get("device", "none"))
        if device not in ("none", "cpu"):
            notes.append(
                f"{file} offloads to {device}, which is not a choice of {knob}; cpu is taken"
            )
            device = "cpu"
        if device != "none":
            values[knob] = device
    if offload.get("super_offload"):
        values["optimizer_offload"] = "async"
    micro = config.get("train_micro_batch_size_per_gpu")
    for knob, value, default in (
        ("zero_stage", stage, None),
        ("zero_hpz_partition_size", zero.get("zero_hpz_partition_size", 1), 1),
        ("tensor_parallel", tensor.get("autotp_size", tensor.get("tp_size", 1)), 1),
        ("sequence_parallel", config.get("sequence_parallel_size", 1), 1),
        ("micro_batch", micro if isinstance(micro, int) else None, None),
    ):
        if value != default:
            values[knob] = KNOBS[knob].check(value)
    whole = config.get("train_batch_size")
    if isinstance(whole, int) and whole != job.global_batch:
        notes.append(
            f"{file} has a global batch of {whole}; the job's {job.global_batch} is trained, as in "
            "every configuration"
        )
    for precision in ("fp16", "bf16"):
        enabled = _section(config, precision).get("enabled")
        if enabled is True and job.precision != precision:
            notes.append(f"{file} trains in {precision}; the job's {job.precision} is used")
    if left := [name for name in config if name not in _FACTS]:
        notes.append(f"no knob, so the job's own holds: {', '.join(left)} of {file}")
    if parts := [name for name in zero if name not in _ZERO]:
        notes.append(f"no knob, so DeepSpeed's default holds: {', '.join(parts)} of ZeRO in {file}")
    return values, notes


#: Knobs outside of a space that its sentence names: the parallel degrees, which most jobs would
#: try first; `tuner list spaces` lists every one.
NAMED_ABSENT = 4
#: Why a knob that changes what is learnt is not searched.
CHANGES = "it changes what is learnt (--allow-changed-training searches it)"


def knobs_in_play(
    candidates: Candidates, space: SearchSpace, job: TrainingJob, cluster: Cluster
) -> tuple[str, ...]:
    """Return lines on the knobs that are searched, left out, or fixed by a rule.

    Three short sentences at most, and one for each knob in play that the models do not know.
    """
    turned: list[str] = []
    absent: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name, knob in KNOBS.items():
        values = {Configuration(launch).get(name) for launch in candidates.launches}
        if knob.kind == "live":
            values = {live.get(name) for lives in set(candidates.lives) for live in lives}
        if len(values) > 1:
            turned.append(name)
        elif knob.kind == "launch" and name == "global_batch" and len(job.global_batches) == 1:
            reasons["the job says its steps at one size only"] = [name]
        elif knob.kind == "launch" and name not in space.choices:
            absent += [] if knob.changes_training else [name]  # no space has it unasked
        elif knob.kind == "launch":
            why = _why_not(name, space, candidates, job, cluster)
            reasons.setdefault(why, []).append(name)
    if "global_batch" in turned:
        sizes = sorted({launch["global_batch"] for launch in candidates.launches})
        steps = ", ".join(f"{job.steps_with(int(str(size)))} at {size}" for size in sizes)
        turned[turned.index("global_batch")] += f" (the solution takes {steps} steps)"
    sentences = [f"in play: {', '.join(turned) or 'no knob'}"]
    if absent:
        sentences.append(_absent(space, absent))
    if reasons:
        left = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        sentences.append(f"not in play: {left}")
    return (*sentences, *not_predicted(turned, unpredicted_knobs(prior_of(job, cluster))))


def not_predicted(knobs: Iterable[str], unpredicted: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each knob whose effect is not predicted, for the stated reason."""
    return tuple(
        f"the models predict no effect of {name}: {unpredicted[name]}"
        for name in knobs
        if name in unpredicted
    )


def not_searched(space: SearchSpace) -> str:
    """Return a sentence on the launch knobs that a space leaves out; "" if it has all."""
    launch = (n for n, k in KNOBS.items() if k.kind == "launch" and not k.changes_training)
    absent = [n for n in launch if n not in space.choices and n != "global_batch"]
    return _absent(space, absent) if absent else ""


def _absent(space: SearchSpace, names: list[str]) -> str:
    names = sorted(names, key=lambda name: not name.endswith("parallel"))
    shown = ", ".join(names)
    if len(names) > NAMED_ABSENT + 1:
        shown = f"{', '.join(names[:NAMED_ABSENT])} and {len(names) - NAMED_ABSENT} others"
    return f"not in space {space.name!r}: {shown} (`tuner list spaces` lists others)"


def _why_not(
    name: str, space: SearchSpace, candidates: Candidates, job: TrainingJob, cluster: Cluster
) -> str:
    knob, today, first = KNOBS[name], Configuration(candidates.launches[0]), ""
    for value in space.values(job, cluster)[name]:
        if value == today.get(name):
            continue
        values = {**today.launch, name: value}
        if knob.choices == () and name.endswith("parallel") and name != "data_parallel":
            values["data_parallel"] = 1
        changed = Configuration.of(values)
        phrases = broken_rules(changed, job, cluster) or unrunnable(changed, job)
        if not phrases and knob.changes_training:
            return CHANGES
        first = first or next(iter(phrases), "")
    return first or "it has one value here"


#: Spaces of a new run without --space: every rank holds the whole model, or its parts as well, or
#: the experts of a mixture are divided, too.
SMALL, LARGE, EXPERTS = "default", "large", "experts"


@dataclass(frozen=True)
class ProblemParts:
    """Job, cluster and space that a request names, as a search and a plan both need them.

    Attributes:
        request: what was asked.
        job: with the declared knobs that are searched.
        space_name: as given, which may be a path.
        whole, space: the space of that name, and what of it is searched.
    """

    request: JobRequest
    job: TrainingJob
    cluster: Cluster
    space_name: str
    whole: SearchSpace
    space: SearchSpace
    baseline: Baseline
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
        today = baseline or self.baseline.configuration
        request = self.request
        asked = {
            "allow_changed_training": request.allow_changed_training,
            "predicted": request.predicted,
        }
        return Problem(
            name=self.job.name,
            candidates=candidates,
            steps=self.job.steps or 1,
            baseline=today,
            identity={
                **identity_of(self.job, self.cluster, space),
                "baseline": baseline_section(self.baseline.name, today),
                "request": asked,
                **(identity or {}),
            },
            job=self.job,
            cluster=self.cluster,
            **more,
        )


def problem_parts(request: JobRequest) -> ProblemParts:
    """Find the job, cluster and space of a request."""
    job = request.named_job
    cluster = cluster_of(request.cluster)
    if not request.clocks:
        cluster = replace(cluster, clock_control=False)
    job, notes = request.searched_knobs(job)
    name, why = request.space, ""
    if name is None:
        name, why = _default_space(job, cluster)
    today = baseline_of(request.baseline, job, cluster)
    whole = name if isinstance(name, SearchSpace) else load_space(name)
    name = name.name if isinstance(name, SearchSpace) else str(name)
    searched = request.allowed(whole)
    assumed = cluster.assumed and f"assumed of the node: {cluster.assumed}"
    notes += filter(None, [assumed, *today.notes, why])
    return ProblemParts(request, job, cluster, name, whole, searched, today, tuple(notes))


def _default_space(job: TrainingJob, cluster: Cluster) -> tuple[str, str]:
    """Return the space of a run that names none, and a note on why it is not the small one."""
    can_split = cluster.devices > 1 and job.splits_model and job.is_modelled
    if can_split and (experts := sizes_of(job).experts):
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
    if cluster.devices == 1 or (reader := reader_of(job)) is None:
        return ""
    why: str = reader.why_too_large(job, cluster)
    return why


def problem_of_job(request: JobRequest) -> Problem:
    """Return the problem of a job on a cluster.

    What needs more GPUs than the job may have could not be chosen, so it is left out.
    """
    parts, most = problem_parts(request), request.constraints.max_gpus
    job, cluster = parts.job, parts.cluster
    found = _runnable(parts)
    _leave_out_unfitting(found, parts)
    found.notes.extend(parts.notes)
    usable = parts.whole
    if request.cluster == "auto":
        usable = _leave_out_unusable_here(found, parts, request.clocks)
    configuration = parts.baseline.configuration
    allowed = _allowed(found, most, parts.space_name, configuration)
    if not found.inspected:
        found.notes.extend(knobs_in_play(allowed, parts.whole, job, cluster))
    found.notes.extend([*PRIORS.plugins.left_out, *ROUTES.plugins.left_out])
    candidates = found.candidates
    sized = "global_batch" in launchable(job, cluster).narrowed(parts.whole).choices
    if sized and configuration.get("global_batch") is None:
        # The candidates have it, so that their sizes are numbers on one scale.
        whole = {**configuration.launch, "global_batch": job.global_batch}
        configuration = Configuration(Settings(whole), configuration.live)
    if configuration in candidates:  # under the name that the candidates give it
        configuration = candidates[candidates.index_of(configuration)]
    else:
        candidates = Candidates.from_configurations([configuration, *candidates])
    return parts.problem(
        candidates.where(lambda launch: _uses_at_most(launch, most)),
        {**space_section(parts.space_name, candidates), "knobs": usable.to_knobs()},
        baseline=configuration,
        cost=REAL_COST,
        notes=tuple(found.notes),
    )


def identity_of(job: TrainingJob, cluster: Cluster, space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of study.toml that identify a question, without its baseline."""
    # The model as one JSON text: Hugging Face configs hold nulls, which TOML cannot say.
    of_job = {**job.to_json(), "model": json.dumps(dict(job.model), sort_keys=True)}
    return dict(plain({"job": of_job, "cluster": asdict(cluster), "space": space}))


def cluster_to_predict(cluster: Cluster | str) -> Cluster:
    """Return the cluster of a prediction; InputError if none is named and no GPU is here."""
    found = cluster_of(cluster)
    if cluster == "auto" and not found.device.is_gpu:
        raise InputError(
            "this machine has no GPU to predict for; describe a node, such as --cluster 8xH100 or "
            "1xRTX4090 (`tuner list devices`), or name a cluster (`tuner list clusters`), such as "
            "a100-8 or cpu-2"
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


def _runnable(parts: ProblemParts) -> _CandidateFilter:
    """Return the candidates that the program can run, or all for a plan of the built-in one.

    Where an inspection found which knobs can be turned, they begin with notes on these.
    """
    job = launchable(parts.job, parts.cluster)
    space = job.narrowed(parts.space)
    every = space.candidates(parts.job, parts.cluster)
    values = space.choices.items()
    varied = (n for n, found in values if isinstance(found, tuple) and len({*found}) > 1)
    sentences = list(job.sentences({*parts.space.choices, *varied}))
    if parts.request.predicted and not sentences:
        return _CandidateFilter(every)
    able = [c for c in every if not job.refused(c)]
    if not able:
        reasons = "; ".join(why for c in every.configurations[:1] for why in job.refused(c))
        raise InputError(
            f"no configuration of space {parts.space.name!r} can be run on "
            f"{parts.job.name!r}: {reasons}"
        )
    if sentences:
        return _CandidateFilter(Candidates.from_configurations(able), True, sentences)
    found = _CandidateFilter(every)
    found.keep(able, "the built-in training program cannot run them yet")
    return found


def _leave_out_unusable_here(
    found: _CandidateFilter, parts: ProblemParts, clocks: bool
) -> SearchSpace:
    """Remove values that this machine cannot build or compile; return the space without them."""
    cluster, space = parts.cluster, parts.whole
    on_gpus = cluster.device.is_gpu
    if clocks and on_gpus and not cluster.clock_control:
        from tuner.workload.node.platforms import platform_of

        found.notes.append(
            f"clocks and power limits stay as they are: {platform_of(cluster).why_fixed(cluster)}"
        )
    started = launchable(parts.job, cluster)
    if not parts.request.predicted and (why := started.why_not_here()):
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
            space = _without(space, needs, parts)
    return space


def _compiles(knob: str, value: Value) -> bool:
    return knob == "compilation" and value != "none"


def _without(
    space: SearchSpace, needs: Callable[[str, Value], bool], parts: ProblemParts
) -> SearchSpace:
    """Return a space without the values of knobs that need something."""
    choices = dict(space.choices)
    for name, values in space.values(parts.job, parts.cluster).items():
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


def _leave_out_unfitting(found: _CandidateFilter, parts: ProblemParts) -> None:
    job, cluster = parts.job, parts.cluster
    limit = cluster.device.memory_limit_bytes
    # Without a model nothing predicts memory; a process's share of a host's is no hard limit.
    model = prior_of(job, cluster) if limit is not None else None
    if limit is None or model is None:
        return
    every = found.candidates.configurations
    need = peak_memory_bytes(model, every)
    if parts.request.predicted and len(need) and need.min() > limit:
        raise InputError(does_not_fit(job, cluster, parts.whole, len(every), float(need.min())))
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
