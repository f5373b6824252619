"""Training under a chosen configuration (`tuner run`), compared with the study's measurement.

The job is started as a probe is: the same ranks, the same meter read from outside, the clocks set
and restored by the governor, or restored by its guard if this process is killed. It runs to its own
end, with its checkpoints and loggers, and its first rank's output is passed on. Blocks of whole
steps are compared with the measured point (`Drift`). It runs on one node.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tuner.answer.answer import Answer
from tuner.answer.parts import Point
from tuner.deploy.launch_files import launch_of
from tuner.formatting import energy_text, label, number
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
from tuner.workload.records.probe import (
    Failure,
    MeterInfo,
    ProbeRequest,
    UnappliedSetting,
    WindowPolicy,
)
from tuner.workload.scripts.command import Script, Start
from tuner.workload.scripts.job import LaunchableJob, launchable
from tuner.workload.scripts.user_code import of_run

# Drift detection for a training job: step time and power, compared with a measured point.
#
# Each block of whole steps is compared with the interval of the point that the job was started
# from. An ordinary test, repeated after every block, would raise a false alarm in the end; a
# confidence sequence holds at all times together (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas
# 2024, "Time-uniform central limit theory and asymptotic confidence sequences", theorem 2.2). One
# runs over the whole job, and one over each stretch of blocks, which detects a drift that begins
# late.


#: Probability of a false alarm over the whole job, for each quantity.
LEVEL = 0.05
#: No drift is reported before this number of blocks: the sequence is asymptotic.
LEAST_BLOCKS = 5
#: Number of blocks in a stretch.
STRETCH = 40
#: Relative distance from the expected interval up to which a mean is no drift: windows are
#: measured to 1 %.
TOLERANCE = 0.01
#: Number of blocks for which the sequence is made as narrow as possible.
TIGHT_AT = 20


@dataclass(frozen=True)
class Expectation:
    """Step time and power of a measured point with 90 % intervals, expected of its training."""

    key: str
    step_time_s: float
    power_W: float
    step_time_interval_s: tuple[float, float]
    power_interval_W: tuple[float, float]
    steps: int
    meter: MeterInfo

    @classmethod
    def of(cls, point: Point, steps: int) -> Expectation:
        """Return the expectation of a point for a job of this number of optimizer steps."""
        low, high = point.time_interval_s
        return cls(
            point.configuration.key,
            point.time_to_solution_s / steps,
            point.power_W,
            (low / steps, high / steps),
            point.power_interval_W or (point.power_W, point.power_W),
            steps,
            point.meter,
        )


class ConfidenceSequence:
    """Confidence sequence for a mean: its interval ever excludes it with probability alpha."""

    def __init__(self, alpha: float) -> None:
        self.count = 0
        self.mean = self._squares = 0.0
        self._alpha = alpha
        log = -2 * math.log(alpha)
        self._rho = math.sqrt((log + math.log(log + 1)) / TIGHT_AT)

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """Current interval; unbounded below `LEAST_BLOCKS` values."""
        n, rho = self.count, self._rho
        if n < LEAST_BLOCKS:
            return -math.inf, math.inf
        deviation = math.sqrt(self._squares / (n - 1))
        spread = n * rho**2 + 1
        reach = deviation * math.sqrt(
            2 * spread / (n**2 * rho**2) * math.log(math.sqrt(spread) / self._alpha)
        )
        return self.mean - reach, self.mean + reach


@dataclass(frozen=True)
class Drift:
    """Drift of "step time" or "power" as a share of the expected value, with its 95 % interval."""

    quantity: str
    step: int
    relative: float
    low: float
    high: float
    sentence: str


@dataclass(frozen=True)
class RunSummary:
    """Comparison of a job's steps with the expectation.

    Attributes:
        seconds, joules: their total time and energy, by the same meter.
        observed: step_time_s, power_W and energy_per_step_J; empty before the first block.
        relative: each as a share of the expected value, minus 1.
    """

    expectation: Expectation
    steps: int
    seconds: float
    joules: float
    observed: Mapping[str, float] = field(default_factory=dict)
    relative: Mapping[str, float] = field(default_factory=dict)
    drifts: tuple[Drift, ...] = ()
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        others = {name: value for name, value in vars(self).items() if name != "expectation"}
        return {
            "promise": {**vars(self.expectation), "meter": dict(vars(self.expectation.meter))},
            **others,
            "observed": dict(self.observed),
            "relative": dict(self.relative),
            "drifts": [dict(vars(drift)) for drift in self.drifts],
        }


class _Quantity:
    # Confidence sequences of one quantity, on the logarithm of its ratio to the expected value.

    def __init__(self, name: str, expected: float, interval: tuple[float, float]) -> None:
        self.name, self.expected = name, expected
        low, high = interval
        self._low = math.log(low / self.expected) - TOLERANCE
        self._high = math.log(high / self.expected) + TOLERANCE
        self._whole = ConfidenceSequence(LEVEL / 2)
        self._stretches = 1
        self._stretch = ConfidenceSequence(self._share())
        self._reported_side = 0

    def _share(self) -> float:
        # Sums to LEVEL / 2 over all stretches: 6 / pi^2 x the sum of 1 / k^2 is 1.
        return LEVEL / 2 * 6 / (math.pi * self._stretches) ** 2

    def add(self, value: float) -> ConfidenceSequence | None:
        # Returns the sequence that shows a drift not yet reported.
        log = math.log(value / self.expected)
        self._whole.add(log)
        if self._stretch.count >= STRETCH:
            self._stretches += 1
            self._stretch = ConfidenceSequence(self._share())
        self._stretch.add(log)
        for sequence in (self._stretch, self._whole):
            low, high = sequence.interval
            side = 1 if low > self._high else -1 if high < self._low else 0
            if side and side != self._reported_side:
                self._reported_side = side
                return sequence
        return None


class DriftMonitor:
    """Comparison of a job with its expectation, one block of whole steps at a time."""

    def __init__(self, expectation: Expectation) -> None:
        self.expectation = expected = expectation
        self._time = _Quantity("step time", expected.step_time_s, expected.step_time_interval_s)
        self._power = _Quantity("power", expected.power_W, expected.power_interval_W)
        self._blocks = self._steps = 0
        self._seconds = self._joules = 0.0
        self._drifts: list[Drift] = []

    def add_block(self, steps: int, seconds: float, joules: float) -> list[Drift]:
        """Add a block of whole steps; return the drifts that it shows for the first time."""
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._joules += joules
        self._blocks += 1
        drifts = []
        for quantity, value in ((self._time, seconds / steps), (self._power, joules / seconds)):
            shown = quantity.add(value) if value > 0 else None
            if shown is not None:
                drifts.append(self._drift(quantity.name, shown))
        self._drifts += drifts
        return drifts

    def _drift(self, name: str, shown: ConfidenceSequence) -> Drift:
        low, high = (math.expm1(end) for end in shown.interval)
        relative = math.expm1(shown.mean)
        word = "more" if relative > 0 else "less"
        estimated = label(self.expectation.meter.mark if name == "power" else "")
        sentence = (
            f"drift after {self._steps} steps: {name}{estimated} is {100 * abs(relative):.1f} % "
            f"{word} than was measured for this configuration "
            f"[{100 * low:+.1f}, {100 * high:+.1f}] %"
        )
        return Drift(name, self._steps, relative, low, high, sentence)

    def summary(self) -> RunSummary:
        """Return the comparison so far."""
        expected = self.expectation
        if not self._steps:
            sentence = "The job ended before its steps could be compared."
            return RunSummary(expected, 0, 0.0, 0.0, sentence=sentence)

        def figures(step_time_s: float, power_W: float) -> dict[str, float]:
            energy_J = power_W * step_time_s
            return {"step_time_s": step_time_s, "power_W": power_W, "energy_per_step_J": energy_J}

        observed = figures(self._seconds / self._steps, self._joules / self._seconds)
        measured = figures(expected.step_time_s, expected.power_W)
        relative = {name: observed[name] / measured[name] - 1 for name in observed}
        estimated = label(expected.meter.mark)
        text = (
            f"{self._steps} steps in {number(self._seconds)} s and "
            f"{energy_text(self._joules / 1000)}{estimated}: a step took "
            f"{number(observed['step_time_s'])} s ({100 * relative['step_time_s']:+.1f} % against "
            f"the study) and {number(observed['energy_per_step_J'])} J"
            f" ({100 * relative['energy_per_step_J']:+.1f} %). "
        )
        if self._drifts:
            quantities = dict.fromkeys(drift.quantity for drift in self._drifts)
            text += f"Drift from the study's measurement: {' and '.join(quantities)}."
        elif self._blocks < LEAST_BLOCKS:
            text += "The job was too short to tell whether it drifted from the study's measurement."
        else:
            text += "No drift from the study's measurement was detected."
        return RunSummary(
            expected,
            self._steps,
            self._seconds,
            self._joules,
            observed,
            relative,
            tuple(self._drifts),
            text,
        )


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

    def run_steps(self, conductor: Conductor, timeline: Timeline) -> None:
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
            record = node.run(request, training)
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
    from tuner.workload.node.platforms import detect_cluster

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
