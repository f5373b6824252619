"""Training under a chosen configuration (`tuner run`), compared with the study's measurement.

The job is started as a probe is: the same ranks, the same meter read from outside, the clocks set
and restored by the governor, or restored by its guard if this process is killed. It runs to its own
end, with its checkpoints and loggers, and its first rank's output is passed on. Blocks of whole
steps are compared with the measured point (`tuner.deploy.drift`). It runs on one node.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from tuner.answer.answer import Answer
from tuner.deploy.drift import Drift, DriftMonitor, Expectation, RunSummary
from tuner.deploy.launch_files import launch_of
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, check_integer
from tuner.search_spaces.job import steps_a_job_step
from tuner.search_spaces.safe_files import make_folder, require_own
from tuner.workload.node.measure.window import Conductor, ProbeFailed
from tuner.workload.node.meters.base import Timeline
from tuner.workload.node.probe_run import Probe, apply_live
from tuner.workload.node.rank_launch import ProbeNode, RankLaunch
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import Failure, ProbeRequest, UnappliedSetting, WindowPolicy
from tuner.workload.scripts.command import Script, Start
from tuner.workload.scripts.job import LaunchableJob, launchable
from tuner.workload.scripts.user_code import of_run

#: Least length of a block of steps: an energy counter is updated every 0.1 s, 2 % of 5 s.
BLOCK_S = 5.0
#: Time limit of a job, which ends by itself.
FOREVER_S = 1e9


@dataclass(frozen=True)
class TrainingOutcome:
    """Outcome of a training job; energy and time are of the whole run, its start included."""

    summary: RunSummary
    failure: Failure | None
    interrupted: bool
    energy_J: float
    wall_s: float
    folder: Path

    def lines(self) -> list[str]:
        lines = [self.summary.sentence, *(drift.sentence for drift in self.summary.drifts)]
        if self.interrupted:
            lines.insert(0, "Interrupted; the clocks are as they were before.")
        if self.failure is not None:
            lines.append(f"The job failed: {self.failure.sentence}")
            lines += [f"  | {line}" for line in self.failure.log_tail.splitlines()[-12:]]
        return [*lines, f"Logs: {self.folder}"]

    def to_json(self) -> dict[str, Any]:
        return {
            "kept": self.summary.to_json(),
            "failure": dict(vars(self.failure)) if self.failure else None,
            "interrupted": self.interrupted,
            "energy_J": self.energy_J,
            "wall_s": self.wall_s,
            "folder": str(self.folder),
        }


class _TrainingLaunch(RankLaunch):
    # Starts the whole training, with the program's own checkpoints and loggers.

    def __init__(
        self, node: ProbeNode, request: ProbeRequest, job: LaunchableJob | None, steps: int | None
    ) -> None:
        super().__init__(node, request, job=job)
        self._steps = steps

    def start(self) -> Start:
        make_folder(self.folder, inside=self.node.run_dir)
        start = self.on_node(self.job.start(self.configuration, self.folder, probe=False))
        if start.steps is None:
            return start
        return replace(start, words=(*start.words, "--steps", str(self._steps or start.steps)))


class _Training(Probe):
    # Lasts until the program ends, and compares its steps with the expectation.

    def __init__(
        self,
        node: ProbeNode,
        request: ProbeRequest,
        launch: RankLaunch,
        *,
        monitor: DriftMonitor,
        report: Callable[[Drift], None],
        output: TextIO,
    ) -> None:
        super().__init__(node, request, launch)
        self._monitor, self._report, self._output = monitor, report, output
        self._passed_on = 0

    def lead(self, conductor: Conductor, timeline: Timeline) -> None:
        ranks = self.launch.configuration.world_size
        live, knobs = self.request.live[0], self.node.job.knobs
        applied = apply_live(self.governor, conductor.set_live, knobs, live, ranks=ranks)
        if isinstance(applied, UnappliedSetting):
            raise ProbeFailed(Failure("not_taken", applied.message))
        try:
            conductor.warm_up()
        except ProbeFailed:
            if not conductor.ended_by_itself:
                raise
            self._pass_on()  # a short job has trained to its end: it did not fail
            return
        opened = self.meter.read()
        began = conductor.done

        def step(number: int, when_s: float) -> None:
            nonlocal opened, began
            # Each step's end is received with about the same delay, which cancels in a block.
            if when_s - opened.time_s < BLOCK_S:
                return
            now = self.meter.read()
            for drift in self._monitor.add_block(
                number - began, now.time_s - opened.time_s, now.energy_J - opened.energy_J
            ):
                self._report(drift)
            opened, began = now, number

        conductor.run_to_end(step, self._pass_on)
        self._pass_on()

    def _pass_on(self) -> None:
        # Copy to the output what the first rank has printed since the last call.
        log = self.launch.folder / "rank0.log"
        try:
            if log.stat().st_size < self._passed_on:  # it was truncated
                self._passed_on = 0
            with log.open("rb") as file:
                file.seek(self._passed_on)
                text = file.read()
        except OSError:
            return
        self._passed_on += len(text)
        if text:
            printed = text.decode(errors="replace")
            if self._output.isatty():  # each state of a progress bar gets a line of its own
                printed = printed.replace("\r\n", "\n").replace("\r", "\n")
            self._output.write(printed)
            self._output.flush()


def train(
    result: Answer,
    point: str | Configuration = "recommended",
    *,
    program: Sequence[str] = (),
    steps: int | None = None,
    clocks: bool = True,
    announce: Callable[[str], None] = lambda sentence: None,
    output: TextIO | None = None,
) -> TrainingOutcome:
    """Train under a point of a result until the program ends, and compare it with the point.

    Args:
        program: the command that trains, for example "train.py --data DIR"; by default the study's
            own. A command for the built-in job is given `--deepspeed_config FILE` at the end.
        clocks: set the point's live settings; False leaves the device's own, with a note.

    Raises:
        InputError: there is nothing to start, this machine is not the study's kind, or its clocks
            cannot be set; or the run folder belongs to another user.
    """
    configuration, trained, studied = launch_of(result, point)
    folder = _folder_of(result)
    if steps is not None:
        check_integer("steps", steps)
    script = Script(shlex.join(program)) if program else None
    cluster = _this_node(studied, configuration, clocks=clocks)
    job = launchable(trained, cluster)
    own = job.with_program(script) if script is not None else None
    started = own or job
    started.require_secrets()
    chosen = result.point(point)
    # At another global batch than the job's own, the solution takes another number of steps.
    steps_to_solution = round(result.steps * steps_a_job_step(configuration, started.facts))
    monitor = DriftMonitor(Expectation.of(chosen, steps_to_solution))
    request = _request(folder, configuration, clocks=clocks)

    def training(node: ProbeNode, request: ProbeRequest) -> Probe:
        launch = _TrainingLaunch(node, request, own, steps)
        to = output or sys.stdout
        return _Training(
            node, request, launch, monitor=monitor, report=lambda d: announce(d.sentence), output=to
        )

    runner = LocalRunner(started.facts, cluster, run_dir=folder, announce=announce)
    with closing(runner) as node:
        _require_scope(node.meter.scope, chosen.meter.scope)
        _announce_started_programs(started, configuration, clocks=clocks, announce=announce)
        failure, interrupted, energy_J, wall_s = None, False, 0.0, 0.0
        try:
            record = node.run_as(training, request)
            failure, energy_J, wall_s = record.failure, record.energy_J, record.wall_s
        except KeyboardInterrupt:
            interrupted = True
    logs = folder / "probes" / request.probe_id
    return TrainingOutcome(monitor.summary(), failure, interrupted, energy_J, wall_s, logs)


def _announce_started_programs(
    job: LaunchableJob,
    configuration: Configuration,
    *,
    clocks: bool,
    announce: Callable[[str], None],
) -> None:
    for start in of_run(job, configuration):
        announce(str(start))
    if configuration.live and not clocks:
        announce(f"the point was measured at {configuration.live.short}, which is not set")
    announce(f"training under {configuration.short}")


def _folder_of(result: Answer) -> Path:
    if result.run_dir is None:
        raise InputError(f"study {result.name!r} keeps no folder, so the job has nowhere to log")
    require_own(result.run_dir)
    return result.run_dir


def _require_scope(here: str, studied: str) -> None:
    if here != studied:
        raise InputError(
            f"the study charged the {studied} and the meter here the {here}; energies of two "
            "scopes cannot be compared"
        )


def _this_node(
    studied: Cluster | None, configuration: Configuration, *, clocks: bool = True
) -> Cluster:
    from tuner.workload.node.machine import detect_cluster

    cluster = detect_cluster()
    if studied is not None and studied.device.is_gpu != cluster.device.is_gpu:
        raise InputError(
            f"the study was of {studied.device.name} and this machine has {cluster.device.name}; "
            "`tuner apply` writes the files to start it elsewhere"
        )
    if configuration.world_size > cluster.devices_per_node:
        raise InputError(
            f"the configuration has {configuration.world_size} ranks and this node "
            f"{cluster.devices_per_node} devices; `tuner apply` writes the files for several nodes"
        )
    cluster = replace(cluster, clock_control=cluster.clock_control and clocks)
    return cluster if studied is None else replace(cluster, device=studied.device)


def _request(run_dir: Path, configuration: Configuration, *, clocks: bool) -> ProbeRequest:
    number = 1 + len(list((run_dir / "probes").glob("run-*")))
    return ProbeRequest(
        f"run-{number}",
        configuration.launch,
        (configuration.live if clocks else Settings(),),
        window=WindowPolicy(idle_s=0.0),
        time_limit_s=FOREVER_S,
        purpose="training",
    )
