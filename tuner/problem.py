"""What a study searches: the candidates, how much work is the solution, and what is known before.

A problem is built from a job, a cluster and a space; from one group of a recorded table; or from a
trace. The driver, the sampler and the result see only the problem, so a replayed study is the same
study. `asked` is what study.toml keeps of it, and what a resumed study is compared with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.cluster import Cluster, load_cluster
from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError, InvalidConfiguration, InvalidValue
from search_spaces.job import TrainingJob, load_job
from search_spaces.rules import broken_rules, unrunnable
from search_spaces.space import Candidates, default_configuration, load_space
from tuner.acquisition import ProbeCost
from tuner.asked import known_cluster, known_job
from tuner.baseline import default_name, read_baseline
from tuner.in_play import knobs_in_play
from tuner.runs import RunFolder, plain
from workload.ranks import cannot_build
from workload.script import ScriptJob
from workload.table import RecordedTable, TableGroup, load_table

if TYPE_CHECKING:
    from models.analytic import Prior
    from workload.probe import Runner

__all__ = [
    "Problem",
    "digest_of",
    "problem_of_job",
    "problem_of_run",
    "recorded_problem",
    "versions",
]

#: What probing is taken to cost before a probe has told: a launch of this project's own program on
#: a CPU machine, a settle and a window (`workload.probe.WindowPolicy`).
REAL_COST = ProbeCost(launch_s=5.0, launch_power=0.7, settle_s=1.0, window_s=5.0, min_steps=3)


@dataclass(frozen=True)
class Problem:
    """One search.

    Attributes:
        name: what is tuned, for people and as the stem of a run's name.
        candidates: every configuration that may be chosen. The baseline is one of them unless it
            needs more GPUs than the job may use: then it is measured for comparison only.
        steps: optimizer steps (or units of work) that make the solution.
        baseline: what the user would run today; None where nothing tells.
        cost: what probing is taken to cost before it is known.
        asked: what identifies it: sections "job", "cluster", "space" or "recorded".
        job, cluster: None for a recorded table.
        unit_of_work: what one step is.
        notes: what was assumed, one sentence each.
        target_gpus: how many GPUs the front is also predicted for (`tuner.target`).
    """

    name: str
    candidates: Candidates
    steps: int
    baseline: Configuration | None
    cost: ProbeCost
    asked: Mapping[str, Any]
    job: TrainingJob | None = None
    cluster: Cluster | None = None
    unit_of_work: str = "optimizer step"
    notes: tuple[str, ...] = field(default=())
    target_gpus: int | None = None

    @cached_property
    def prior(self) -> Prior | None:
        """The analytic model of this job on this cluster; None where there is neither.

        None too for a script whose model or sequence length nobody knows.
        """
        if self.job is None or self.cluster is None:
            return None
        if not self.job.model or not self.job.sequence_length:
            return None
        from models.analytic import AnalyticModel

        model = AnalyticModel(self.job, self.cluster)
        if len(self.job.global_batches) == 1:
            return model
        from tuner.job_steps import JobStepsPrior

        return JobStepsPrior(model, self.job)

    @property
    def device_memory_bytes(self) -> float | None:
        """What a GPU holds; None without a cluster, and on a CPU, where it is no hard limit."""
        if self.cluster is None or self.cluster.device.type == "cpu":
            return None
        return float(self.cluster.device.memory_bytes) or None

    @property
    def about(self) -> dict[str, Any]:
        """Job, cluster, space and versions, for the report's last page."""
        return {
            **{name: dict(section) for name, section in self.asked.items()},
            "unit_of_work": self.unit_of_work,
            "candidates": len(self.candidates),
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """Versions of what made the result; "absent" where a package is not installed."""
    import platform
    from importlib import metadata

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "absent"

    names = ("joulefront", "numpy", "scipy", "optuna", "ray", "torch", "deepspeed", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _check_steps(steps: int | None) -> None:
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InvalidValue("steps", steps, "an integer of at least 1")


def digest_of(candidates: Candidates) -> str:
    """What tells two lists of candidates apart, whatever their order and whatever was left out."""
    keys = "\n".join(sorted(each.key for each in candidates.whole.configurations))
    return hashlib.sha256(keys.encode()).hexdigest()[:16]


def _space_section(name: str, candidates: Candidates) -> dict[str, Any]:
    count = len(candidates.whole)
    return {"name": name, "configurations": count, "digest": digest_of(candidates)}


def _job_section(job: TrainingJob) -> dict[str, Any]:
    # The model as one JSON text: Hugging Face configs hold nulls, which TOML cannot say.
    return {**job.to_json(), "model": json.dumps(dict(job.model), sort_keys=True)}


def problem_of_job(
    job: TrainingJob | str | Path | None = None,
    cluster: Cluster | str = "auto",
    space: str = "default",
    *,
    baseline: Configuration | str | Path | Sequence[str | Path] | None = None,
    plan: bool = False,
    target_gpus: int | None = None,
    max_gpus: int | None = None,
) -> Problem:
    """A job on a cluster.

    Args:
        job: a job, a shipped job's name, or the path of a job file; None is the default job.
        cluster: a cluster, a name or path, or "auto" for this machine.
        space: a search space's name or path.
        baseline: what the user runs today, or words that `tuner.baseline` reads; else the space's
            default configuration.
        plan: keep what the built-in training program cannot run yet, for a simulated cluster.
        target_gpus: also predict the front for so many GPUs of the same kind.
        max_gpus: what needs more GPUs is left out, since it could not be chosen.

    Raises:
        InputError: any of them is not what it should be, or nothing can run.
    """
    if not isinstance(job, TrainingJob):
        job = load_job(job)
    here = cluster == "auto"
    if not isinstance(cluster, Cluster):
        if here:
            from workload.machine import detect_cluster

            cluster = detect_cluster()
        else:
            cluster = load_cluster(cluster)
    script = job if isinstance(job, ScriptJob) else None
    named = "yours"
    said: tuple[str, ...] = ()
    if isinstance(baseline, str | Path):
        baseline = [baseline]
    if baseline is None and script:
        baseline, named = script.baseline, "the script as it is started today"
    elif baseline is None:
        baseline = default_configuration(job, cluster)
        named = default_name(baseline)
    elif not isinstance(baseline, Configuration):
        read = read_baseline(baseline, job, cluster)
        baseline, named, said = read.configuration, read.name, read.notes
    elif broken := broken_rules(baseline, job, cluster):
        raise InvalidConfiguration(baseline.key, broken)
    if script:
        from tuner.scripts import script_candidates

        valid = script_candidates(script, cluster, space)
    else:
        valid = load_space(space).candidates(job, cluster)
    able = [c for c in valid if plan or script or not unrunnable(c, job)]
    if not able:
        raise InputError(
            f"of space {space!r} nothing can be run yet: "
            + "; ".join(unrunnable(valid.configurations[0], job))
        )
    candidates = valid if len(able) == len(valid) else Candidates.from_configurations(able)
    notes = list(script.sentences(load_space(space).choices)) if script else []
    if len(able) < len(valid):
        notes.append(
            f"{len(valid) - len(able)} of {len(valid)} configurations of space {space!r} are left "
            "out: the built-in training program cannot run them yet"
        )
    if target_gpus is not None:  # refused before anything is measured, not after
        from tuner.target_space import target_candidates

        target_candidates(job, cluster, space, target_gpus, plan=plan)
    candidates, left_out = _fitting(candidates, job, cluster)
    notes += [*left_out, *said]
    if here and cluster.device.type == "cuda" and not cluster.clock_control:
        from workload.governor import why_fixed

        notes.append(f"clocks and power limits stay as they are: {why_fixed(cluster)}")
    if here and (why := cannot_build("cpu_adam")):
        kept = [c for c in candidates if c.get("optimizer_offload") != "cpu"]
        if len(kept) < len(candidates):
            notes.append(f"optimizer_offload=cpu is left out: {why}")
            candidates = Candidates.from_configurations(kept)
    if here and cluster.nvme_path and (why := cannot_build("async_io")):
        kept = [c for c in candidates if "nvme" not in c.launch.values()]
        if len(kept) < len(candidates):
            notes.append(f"offload to nvme is left out: {why}")
            candidates = Candidates.from_configurations(kept)
    searched = load_space(space)
    allowed, left_out = _allowed(candidates, max_gpus, space, baseline)
    notes += left_out
    if not script:
        notes += knobs_in_play(allowed, searched, job, cluster)
    if "global_batch" in searched.choices and baseline.get("global_batch") is None and not script:
        # The candidates say it, so that their sizes are numbers on one scale.
        whole = {**baseline.launch, "global_batch": job.global_batch}
        baseline = Configuration(Settings(whole), baseline.live)
    if baseline in candidates:  # under the name that the candidates give it
        baseline = candidates[candidates.index_of(baseline)]
    else:
        candidates = Candidates.from_configurations([baseline, *candidates])
    return Problem(
        name=job.name,
        candidates=candidates.where(lambda launch: _uses_at_most(launch, max_gpus)),
        steps=job.steps,
        baseline=baseline,
        cost=REAL_COST,
        asked=plain(
            {
                "job": _job_section(job),
                "cluster": asdict(cluster),
                "space": _space_section(str(space), candidates),
                "baseline": {"name": named, "configuration": baseline.key},
                **({"target": {"gpus": target_gpus}} if target_gpus is not None else {}),
            }
        ),
        job=job,
        cluster=cluster,
        notes=tuple(notes),
        target_gpus=target_gpus,
    )


def _uses_at_most(launch: Settings, gpus: int | None) -> bool:
    return gpus is None or Configuration(launch).world_size <= gpus


def _allowed(
    candidates: Candidates, max_gpus: int | None, space: str, baseline: Configuration
) -> tuple[Candidates, list[str]]:
    """The candidates that need no more GPUs than the job may use, and what to say of the others.

    Raises:
        InputError: there is none.
    """
    allowed = candidates.where(lambda launch: _uses_at_most(launch, max_gpus))
    if len(allowed) == len(candidates):
        return candidates, []
    if not len(allowed):
        least = min(Configuration(launch).world_size for launch in candidates.launches)
        raise InputError(
            f"nothing of space {space!r} runs on max_gpus={max_gpus}; the least that it has takes "
            f"{least}"
        )
    said = (
        f"{len(candidates) - len(allowed)} of {len(candidates)} configurations are left out: they "
        f"need more GPUs than max_gpus={max_gpus} allows"
    )
    if not _uses_at_most(baseline.launch, max_gpus):
        said += f"; the baseline needs {baseline.world_size}, and is measured for comparison only"
    return allowed, [said]


#: A configuration is left out where its predicted peak exceeds the device's memory by this factor:
#: the largest error of predicted memory in `benchmarks.published` is below it.
MEMORY_MARGIN = 1.15


def _fitting(
    candidates: Candidates, job: TrainingJob, cluster: Cluster
) -> tuple[Candidates, list[str]]:
    """The candidates without those that cannot fit a GPU's memory, and what to say of it."""
    if not job.model or not job.sequence_length:
        return candidates, []  # nothing is known that would tell
    if cluster.device.type == "cpu" or not cluster.device.memory_bytes:
        return candidates, []  # a process's share of host memory is no hard limit
    from models.analytic import AnalyticModel

    need = AnalyticModel(job, cluster).memory_bytes(candidates.configurations)
    fits = need <= MEMORY_MARGIN * cluster.device.memory_bytes
    if fits.all() or not fits.any():
        return candidates, []
    kept = [c for c, fit in zip(candidates.configurations, fits, strict=True) if fit]
    return Candidates.from_configurations(kept), [
        f"{int((~fits).sum())} of {len(candidates)} configurations are left out: they are "
        f"predicted to need more than {MEMORY_MARGIN:g} times the memory of {cluster.device.name}"
    ]


def _rank(value: Any) -> tuple[int, float]:
    """Sorts numbers by size and below everything that is none."""
    if isinstance(value, tuple):
        return (0, sum(value) / len(value))
    number = isinstance(value, int | float)
    return (0, float(value)) if number else (1, 0.0)


def _table_baseline(table: RecordedTable, group: TableGroup) -> Configuration:
    """What the table names as its baseline; else its first launch, left at full clock and power.

    A device that nobody tuned runs at its highest clock and power limit, so among the first row's
    launch the highest live setting is taken. No measured value is looked at.
    """
    configurations = [point.configuration for point in group.points]
    for configuration in configurations:
        if table.baseline and all(
            configuration.get(name) == value for name, value in table.baseline.items()
        ):
            return configuration
    first = [c for c in configurations if c.launch == configurations[0].launch]
    return max(first, key=lambda c: [_rank(value) for value in c.live.values()])


def _varies(table: RecordedTable, group: TableGroup) -> bool:
    """Whether the table says how a point differs when it is measured again."""
    if table.noise.time_cv > 0 or table.noise.power_cv > 0:
        return True
    return any(
        len(point.repeats) > 1 or point.time_sd_s or point.power_sd_W for point in group.points
    )


def _table_problem(folder: Path, group: str | None, steps: int | None) -> tuple[Problem, Runner]:
    from workload.replay import TableRunner

    table = load_table(folder)
    runner = TableRunner(table, group)
    candidates = Candidates.from_configurations(p.configuration for p in runner.group.points)
    baseline = _table_baseline(table, runner.group)
    problem = Problem(
        name=table.name,
        candidates=candidates,
        steps=steps or 1,
        baseline=baseline,
        cost=ProbeCost(**asdict(table.cost)),
        asked=plain(
            {
                "recorded": {
                    "table": table.name,
                    "path": str(folder.resolve()),
                    "group": runner.group.name,
                    "steps": steps or 1,
                    "unit_of_work": table.unit_of_work,
                    "varies": _varies(table, runner.group),
                },
                "space": _space_section("recorded table", candidates),
                "baseline": {
                    "name": "the recorded table's"
                    if table.baseline
                    else "the table's first launch, left at its highest live settings",
                    "configuration": baseline.key,
                },
            }
        ),
        unit_of_work=table.unit_of_work,
        notes=table.notes,
    )
    return problem, runner


def _trace_problem(path: Path, steps: int | None) -> tuple[Problem, Runner]:
    from workload.replay import TraceRunner

    runner = TraceRunner(path)
    folder = RunFolder(runner.path.parent.parent)
    known = folder.read_asked() or {}
    job, cluster = known_job(known), known_cluster(known)
    launch_s = sorted(record.launch_s for record in runner.records)[len(runner.records) // 2]
    baselines = [r for r in runner.records if r.request.purpose == "baseline"]
    first = (baselines or list(runner.records))[0]
    candidates = Candidates.from_configurations(runner.configurations)
    steps = steps or (job.steps if job else 1)
    recorded = {"trace": str(runner.path.resolve()), "steps": steps, "varies": False}
    baseline = first.request.configurations()[0]
    problem = Problem(
        name=job.name if job else runner.path.stem,
        candidates=candidates,
        steps=steps,
        baseline=baseline,
        cost=replace(REAL_COST, launch_s=launch_s),
        asked=plain(
            {
                **{key: known[key] for key in ("job", "cluster") if key in known},
                "recorded": recorded,
                "space": _space_section("recorded trace", candidates),
                "baseline": {
                    "name": "that of the recorded study" if baselines else "the first probe's",
                    "configuration": baseline.key,
                },
            }
        ),
        job=job,
        cluster=cluster,
        notes=runner.notes,
    )
    return problem, runner


def recorded_problem(
    path: str | Path, *, group: str | None = None, steps: int | None = None, seed: int = 0
) -> tuple[Problem, Runner]:
    """A recorded table's group or a trace, as a problem and the runner that answers it.

    Args:
        path: a folder with table.toml, a run folder, or a trace.
        group: which search problem of a table.
        steps: units of work that make the solution; a run's own job, or 1, when not given.
        seed: of the draws among repeats.

    Raises:
        InputError: it is none of these, or is malformed.
    """
    path = Path(path)
    _check_steps(steps)
    table = path if path.is_dir() else path.parent
    if (table / "table.toml").is_file() and path.suffix != ".jsonl":
        problem, runner = _table_problem(table, group, steps)
    elif path.is_file() or (path / "trace" / "probes.jsonl").is_file():
        if group is not None:
            raise InputError(f"{path} is a trace; only a recorded table has groups")
        problem, runner = _trace_problem(path, steps)
    else:
        raise InputError(
            f"{path} is nothing to replay; it must be a folder with table.toml and table.csv, "
            "a run folder, or a trace (probes.jsonl)"
        )
    runner.seed = seed  # type: ignore[attr-defined]
    return problem, runner


#: A run's candidates are found again up to so many: enumerating more takes seconds.
MOST_FOUND_AGAIN = 20_000


def _candidates_again(
    known: Mapping[str, Any],
    visited: Sequence[Configuration],
    job: TrainingJob | None,
    cluster: Cluster | None,
) -> Candidates:
    """The candidates that were searched, where the very same can be found again; else the visited.

    Those never visited are what a result predicts (`Result.predicted`).
    """
    seen = Candidates.from_configurations(visited)
    space, recorded = known.get("space", {}), known.get("recorded", {})
    count = space.get("configurations", 0)
    if type(count) is not int or not 0 < count <= MOST_FOUND_AGAIN:
        return seen
    key = known.get("baseline", {}).get("configuration")
    baseline = next((each for each in visited if each.key == key), None)
    for plan in (False, True):
        try:
            if "path" in recorded:
                found = _table_problem(Path(recorded["path"]), recorded.get("group"), None)[0]
            elif job is not None and cluster is not None and not recorded:
                found = problem_of_job(
                    job,
                    cluster,
                    space["name"],
                    baseline=baseline,
                    plan=plan,
                    max_gpus=known.get("constraints", {}).get("max_gpus"),
                )
            else:
                return seen
        except (InputError, OSError, KeyError, TypeError):  # it has gone since, or was edited
            return seen
        if digest_of(found.candidates) == space.get("digest"):
            return found.candidates
    return seen


def problem_of_run(
    folder: RunFolder, configurations: tuple[Configuration, ...], known: Mapping[str, Any]
) -> Problem:
    """The problem of a run that stands, from its study.toml.

    The candidates are those that were searched, where they can be found again, else those visited.

    Raises:
        InputError: study.toml does not tell what was asked.
    """
    job, cluster = known_job(known), known_cluster(known)
    recorded = known.get("recorded", {})
    steps = recorded.get("steps") or (job.steps if job else None)
    if steps is None:
        raise InputError(f"{folder.asked} names neither a job nor a recording")
    return Problem(
        name=job.name if job else str(recorded.get("table", folder.name)),
        candidates=_candidates_again(known, configurations, job, cluster),
        steps=int(steps),
        baseline=None,
        cost=REAL_COST,
        asked={
            name: known[name]
            for name in ("job", "cluster", "recorded", "space", "baseline", "target")
            if name in known
        },
        job=job,
        cluster=cluster,
        target_gpus=known.get("target", {}).get("gpus"),
        unit_of_work=str(recorded.get("unit_of_work", "optimizer step")),
    )
