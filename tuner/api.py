"""The public functions: `optimize`, `replay` and `load_result`.

They turn what a user says into a problem, settings and constraints, and hand over to
`tuner.driver`. Importing this module costs next to nothing: NumPy, Optuna and Ray are imported
when a study runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from search_spaces.cluster import Cluster
from search_spaces.configuration import Configuration
from search_spaces.errors import InputError
from search_spaces.job import TrainingJob
from tuner.executors import Executor, SimulatedExecutor
from tuner.progress import Progress
from tuner.runs import RunFolder, find_run
from tuner.settings import DEFAULT_PROBES, DEFAULT_SEARCH_S, SearchSettings
from tuner.tuned import TunedResult
from workload.probe import WindowPolicy
from workload.script import Script, ScriptJob

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from tuner.problem import Problem

__all__ = ["load_result", "optimize", "replay"]

Notify = Callable[[Progress], None]
Kind = TypeVar("Kind")

#: On a simulated cluster probes cost nothing but this machine's time: more of them when the user
#: gave no limit, and each may take as long as a large model's steps do (simulated seconds).
SIMULATED_PROBES = 40
SIMULATED_LIMIT_S = 3600.0


def optimize(
    job: TrainingJob | Script | str | Path | None = None,
    *,
    cluster: Cluster | str = "auto",
    space: str = "default",
    budget_kJ: float | None = None,
    deadline_s: float | None = None,
    power_cap_W: float | None = None,
    peak_power_W: float | None = None,
    max_gpus: int | None = None,
    objective: str | None = None,
    price_per_kWh: float | None = None,
    price_per_gpu_hour: float | None = None,
    grid_gCO2_per_kWh: float | None = None,
    verify: bool = True,
    probe_budget_kJ: float | None = None,
    max_probes: int | None = None,
    search_s: float | None = None,
    storage: str | None = None,
    name: str | None = None,
    executor: str | Executor | None = None,
    ray_address: str | None = None,
    device_kind: str | None = None,
    in_flight: int | None = None,
    target_gpus: int | None = None,
    runs_dir: str | Path = "runs",
    seed: int = 0,
    window: WindowPolicy | None = None,
    baseline: Configuration | str | Path | Sequence[str | Path] | None = None,
    sampler: str | BaseSampler | None = None,
    transfer: Sequence[str | Path] = (),
    report: bool = True,
    on_progress: Notify | None = None,
) -> TunedResult:
    """Tune a training job for energy and time on this machine or cluster.

    Args:
        job: a `TrainingJob`, a shipped job's name, or a job file; None is the default job. Or your
            own training script as a `workload.script.Script`: it is started once to see which
            knobs can be turned on it (docs/your-script.md).
        cluster: a `Cluster`, a name or path, or "auto" for the machine this runs on.
        space: the search space's name or path.
        budget_kJ: energy the *training job* may use; `best` is the fastest that fits.
        deadline_s: time the training job may take; `best` is the least energy in time.
        power_cap_W: bound on the job's average power.
        peak_power_W: bound on any power sample, where they were recorded.
        max_gpus: bound on the number of ranks: what needs more is not probed, but the baseline.
        objective: what is least among what meets these: "knee", "least-energy", "least-time",
            "least-edp", "least-cost" (with a price) or "least-carbon" (with your grid's intensity).
        price_per_kWh, price_per_gpu_hour: money, in one currency.
        grid_gCO2_per_kWh: grams of CO2 equivalent for a kilowatt-hour.
        verify: measure the choice and the baseline again, in turn, before it is recommended
            (`Result.verification`).
        probe_budget_kJ: energy the *search* may use.
        max_probes: probes it may make.
        search_s: no probe starts after this many seconds, and none that is expected to end later;
            importing and building what the probes need comes before. With none of these three, a
            search makes at most 20 probes in 300 s.
        storage: URL of the study's database; a journal in the run folder when not given.
        name: the run's name. The name of a run that stands goes on where it stopped.
        executor: "ray", "inline", "simulated" or an `Executor`. When not given: simulated where
            the cluster named is of another kind of device than this machine, and then nothing is
            measured; else Ray where it is installed, else inline.
        ray_address: a Ray cluster to run on: "auto" or HOST:PORT (docs/clusters.md). With cluster
            "auto" its nodes are looked at, and the job may use all of one kind that are fit.
        device_kind: which kind of device to use there; the one with the most when not given.
        in_flight: how many probes a simulated cluster runs together; as many as its nodes hold of
            the baseline when not given.
        target_gpus: also predict the front for so many GPUs of the same kind, by the models as the
            probes on the few correct them (`Result.target`).
        runs_dir: where run folders are.
        seed: of everything random.
        window: how long each setting is measured.
        baseline: what the user runs today: a `Configuration`, or a DeepSpeed JSON's path with
            "KNOB=VALUE" words as a list; a plain data-parallel configuration when not given.
        sampler: "joulefront" (the default), "tpe", "nsgaii", "gp", "botorch", "random", or any
            Optuna sampler.
        transfer: earlier measurements that the search may start from: runs, traces or recorded
            tables (FOLDER:GROUP of several groups), of this job elsewhere or of another one. They
            are used while they predict what is measured here (`tuner.transfer`).
        report: write report.html and the launch files at the end.
        on_progress: called with each `Progress`.

    Returns:
        The front, the choice, and what was spent.

    Raises:
        InputError: the input is wrong; one sentence.
        Interrupted: a KeyboardInterrupt came; the run folder holds everything told.
    """
    given = locals()
    from tuner import driver
    from tuner.decide import Constraints
    from tuner.problem import problem_of_job

    driver.check_executor(executor)
    if ray_address is not None or device_kind is not None:
        run_folder = RunFolder.named(runs_dir, name) if name else None
        cluster = _on_ray(ray_address, device_kind, executor, cluster, run_folder, on_progress)
        executor = "ray"
    executor = executor or _executor_for(cluster)
    simulated = executor == "simulated"
    if in_flight is not None and not simulated:
        raise InputError(
            "in_flight is for a simulated cluster; a real one runs what it has room for"
        )
    constraints = _those(Constraints, given)
    if (probe_budget_kJ, max_probes, search_s) == (None, None, None):
        given["max_probes"] = SIMULATED_PROBES if simulated else DEFAULT_PROBES
        given["search_s"] = None if simulated else DEFAULT_SEARCH_S
    if simulated:
        given["time_limit_s"] = SIMULATED_LIMIT_S
    given["window"] = window or WindowPolicy()
    settings = _those(SearchSettings, given)
    if isinstance(job, Script):
        name = name or driver.new_name(job.name, runs_dir)
        run = RunFolder.named(runs_dir, name)
        job, cluster = _look_at(job, cluster, run, simulated, on_progress)
    problem = problem_of_job(
        job,
        cluster,
        space,
        baseline=baseline,
        plan=simulated,
        target_gpus=target_gpus,
        max_gpus=max_gpus,
    )
    if simulated:
        problem = _as_prediction(problem)
    result = driver.run_study(
        problem,
        lambda run, say: (
            driver.simulated_executor(problem, capacity=in_flight, seed=seed)
            if simulated
            else driver.real_executor(executor, problem, run, say, ray_address=ray_address)
        ),
        constraints=constraints,
        settings=settings,
        storage=storage,
        run=RunFolder.named(runs_dir, name or driver.new_name(problem.name, runs_dir)),
        sampler=sampler,
        transfer=transfer,
        report=report,
        notify=on_progress,
    )
    return TunedResult.of(result)


def replay(
    path: str | Path,
    *,
    group: str | None = None,
    steps: int | None = None,
    in_flight: int = 1,
    budget_kJ: float | None = None,
    deadline_s: float | None = None,
    power_cap_W: float | None = None,
    peak_power_W: float | None = None,
    max_gpus: int | None = None,
    objective: str | None = None,
    price_per_kWh: float | None = None,
    price_per_gpu_hour: float | None = None,
    grid_gCO2_per_kWh: float | None = None,
    verify: bool = True,
    probe_budget_kJ: float | None = None,
    max_probes: int | None = None,
    search_s: float | None = None,
    storage: str | None = None,
    name: str | None = None,
    runs_dir: str | Path = "runs",
    seed: int = 0,
    sampler: str | BaseSampler | None = None,
    transfer: Sequence[str | Path] = (),
    report: bool = True,
    on_progress: Notify | None = None,
) -> TunedResult:
    """The same study, answered from a trace or a recorded table instead of processes.

    Args:
        path: a recorded table's folder, a run folder, or a trace.
        group: which search problem of a table that holds several.
        steps: units of work that make the solution; a run's own job, or 1, when not given.
        in_flight: how many probes run together on simulated time.

    The other arguments are those of `optimize`; `search_s` is on simulated time, and without it
    and the other limits the search ends when nothing left is worth its joules.

    Raises:
        InputError: the input is wrong; one sentence.
    """
    given = locals()
    from tuner import driver
    from tuner.decide import Constraints
    from tuner.problem import recorded_problem

    constraints = _those(Constraints, given)
    problem, runner = recorded_problem(path, group=group, steps=steps, seed=seed)
    # What cannot differ when it is measured again would only seem to be verified.
    given["verify"] = verify and bool(problem.asked["recorded"]["varies"])
    settings = _those(SearchSettings, given)
    executor = SimulatedExecutor(runner, capacity=in_flight)
    result = driver.run_study(
        problem,
        lambda run, say: executor,
        constraints=constraints,
        settings=settings,
        storage=storage,
        run=RunFolder.named(runs_dir, name or driver.new_name(f"replay-{problem.name}", runs_dir)),
        sampler=sampler,
        transfer=transfer,
        report=report,
        notify=on_progress,
    )
    return TunedResult.of(result)


def load_result(run: str | Path | None = None, *, runs_dir: str | Path = "runs") -> TunedResult:
    """The answer of a run that stands, from its folder alone; of the latest when unnamed.

    Raises:
        InputError: there is no such run, or its files cannot be read.
    """
    from tuner.standing import result_of

    return TunedResult.of(result_of(find_run(run, runs_dir)))


def _look_at(
    script: Script, cluster: Cluster | str, run: RunFolder, simulated: bool, notify: Notify | None
) -> tuple[ScriptJob, Cluster]:
    """A script as a job, and the machine that it was looked at on."""
    from search_spaces.cluster import load_cluster
    from tuner.scripts import job_of_script
    from workload.machine import detect_cluster

    if simulated:
        raise InputError("a script is really run, so it cannot be tuned on a simulated cluster")
    if not isinstance(cluster, Cluster):
        cluster = detect_cluster() if cluster == "auto" else load_cluster(cluster)
    notify = notify or (lambda event: None)
    say = lambda sentence: notify(Progress("note", None, sentence))  # noqa: E731
    return job_of_script(script, cluster, run, say), cluster


def _on_ray(
    address: str | None,
    device_kind: str | None,
    executor: str | Executor | None,
    cluster: Cluster | str,
    run: RunFolder | None,
    notify: Notify | None,
) -> Cluster:
    """The cluster that a study on Ray is about: the one named, or what the nodes make.

    Raises:
        InputError: the words contradict each other, no Ray answers, or no node is fit.
    """
    from search_spaces.cluster import load_cluster
    from tuner.asked import known_cluster
    from tuner.ray_cluster import survey

    if address is None:
        raise InputError("device_kind chooses among the nodes of a Ray cluster; name that too")
    if executor not in (None, "ray"):
        raise InputError(f"a Ray cluster runs probes by the executor ray, not {executor!r}")
    if cluster != "auto":
        named = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        if device_kind not in (None, named.device.name):
            raise InputError(
                f"device_kind is {device_kind!r}, and cluster {named.name!r} is of "
                f"{named.device.name}"
            )
        return named
    notify = notify or (lambda event: None)
    say = lambda sentence: notify(Progress("note", None, sentence))  # noqa: E731
    seen = survey(address, device_kind=device_kind, say=say)
    if seen.cluster is None:
        reasons = "; ".join(seen.sentences()) or "it has none"
        raise InputError(f"no node of the Ray cluster at {address!r} can be used: {reasons}")
    for sentence in seen.sentences():
        say(sentence)
    before = known_cluster(run.read_asked() or {}) if run is not None else None
    if before is not None and (before.name, before.devices_per_node) == (
        seen.cluster.name,
        seen.cluster.devices_per_node,
    ):
        return before  # nodes come and go, and the question stays
    return seen.cluster


def _executor_for(cluster: Cluster | str) -> str | None:
    """ "simulated" where the cluster named is not of this machine's kind; None to decide later."""
    if cluster == "auto":
        return None
    from search_spaces.cluster import load_cluster
    from workload.machine import detect_cluster

    wanted = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    here = detect_cluster().device
    alike = wanted.device.name == here.name or wanted.device.type == here.type == "cpu"
    return None if alike else "simulated"


def _as_prediction(problem: Problem) -> Problem:
    """The problem with what is known of the models' error among its notes."""
    from models.known_error import known_error_lines

    assert problem.cluster is not None
    known = [f"known error: {line}" for line in known_error_lines(problem.cluster.device)]
    said = "every figure is the analytic models' prediction: nothing is measured"
    return replace(problem, notes=(said, *known, *problem.notes))


def _those(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """The dataclass of those arguments of a call that bear its fields' names."""
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names if name in given})
