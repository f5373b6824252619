"""`tuner run`: trains under a chosen configuration in one step, and holds it to its promise.

The job starts as a probe does: the same ranks, the same meter read from outside, the clocks set by
the governor and put back by it, or by its guard where this process is killed. It runs to its own
end, with its checkpoints and loggers, and its first rank's output is passed on. Blocks of whole
steps are compared with what the study measured (`tuner.promise`). One node, as a probe.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from search_spaces.cluster import Cluster
from search_spaces.configuration import Configuration
from search_spaces.errors import InputError, InvalidValue
from search_spaces.job import TrainingJob
from tuner.job_steps import steps_a_job_step
from tuner.launch_files import launch_of
from tuner.promise import Drifted, Kept, Promise, Watch
from tuner.result import Result
from tuner.wording import knobs
from workload.agent import LocalRunner, Probe
from workload.deepspeed_config import render_deepspeed_config
from workload.meters.timeline import Timeline
from workload.probe import Failure, ProbeRequest, WindowPolicy
from workload.script import Script, ScriptJob, Start
from workload.window import Conductor, ProbeFailed

__all__ = ["Followed", "follow"]

#: A block of steps is at least so long: an energy counter moves every 0.1 s, so 5 s are 2 % of it.
BLOCK_S = 5.0
#: The program's own end is its limit.
FOREVER_S = 1e9


@dataclass(frozen=True)
class Followed:
    """A job that was run and held to its promise.

    Attributes:
        kept: what it did, against what was promised.
        failure: why it ended before its own end; None where it did not.
        interrupted: whether Ctrl-C ended it.
        energy_J, wall_s: of the whole run, its start included.
        folder: where its files and logs are.
    """

    kept: Kept
    failure: Failure | None
    interrupted: bool
    energy_J: float
    wall_s: float
    folder: Path

    def lines(self) -> list[str]:
        lines = [self.kept.sentence, *(drift.sentence for drift in self.kept.drifts)]
        if self.interrupted:
            lines.insert(0, "Interrupted; the clocks are as they were before.")
        if self.failure is not None:
            kind = self.failure.kind.replace("_", " ")
            lines.append(f"The job failed: {kind}: {self.failure.message}")
            lines += [f"  | {line}" for line in self.failure.log_tail.splitlines()[-12:]]
        return [*lines, f"Logs: {self.folder}"]

    def to_json(self) -> dict[str, Any]:
        failure = dict(vars(self.failure)) if self.failure else None
        kept = self.kept.to_json()
        return {**vars(self), "kept": kept, "failure": failure, "folder": str(self.folder)}


class _Training(Probe):
    """A probe that has no end of its own: the program runs to its own, and is followed."""

    def __init__(
        self,
        runner: LocalRunner,
        request: ProbeRequest,
        *,
        watch: Watch,
        program: Sequence[str],
        steps: int,
        tell: Callable[[Drifted], None],
        output: TextIO,
    ) -> None:
        super().__init__(runner, request)
        self._watch, self._program, self._steps = watch, tuple(program), steps
        self._tell, self._output = tell, output
        self._passed_on = 0

    @property
    def folder(self) -> Path:
        return self._folder

    def _start(self) -> Start:
        """As it is started for real: checkpoints and loggers are the program's own."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self._job, ScriptJob):
            return self._job.start(self._configuration, self._folder, probe=False)
        if not self._program:
            start = super()._start()
            words = list(start.words)
            words[words.index("--steps") + 1] = str(self._steps)
            return replace(start, words=tuple(words))
        config = render_deepspeed_config(
            self._configuration, self._job, nvme_path=self._cluster.nvme_path
        )
        path = self._folder / "ds_config.json"
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        words = [*self._program, "--deepspeed_config", str(path)]
        return Start(tuple(words), os.getcwd(), {}, config, {})

    def lead(self, conductor: Conductor, timeline: Timeline) -> None:
        self._governor.apply(self._request.live[0], ranks=self._configuration.world_size)
        try:
            conductor.warm_up()
        except ProbeFailed:
            if not conductor.ended_by_itself:
                raise
            self._pass_on()  # a short job has trained to its end: nothing failed
            return
        opened = self._meter.read()
        began = conductor.done

        def step(number: int, when_s: float) -> None:
            nonlocal opened, began
            # A step's end is heard a moment after it, the same moment later at each block's end.
            if when_s - opened.time_s < BLOCK_S:
                return
            now = self._meter.read()
            for drift in self._watch.block(
                number - began, now.time_s - opened.time_s, now.energy_J - opened.energy_J
            ):
                self._tell(drift)
            opened, began = now, number

        conductor.run_to_end(step, self._pass_on)
        self._pass_on()

    def _pass_on(self) -> None:
        """Hand on what the first rank has printed since."""
        log = self._folder / "rank0.log"
        try:
            if log.stat().st_size < self._passed_on:  # it was cut
                self._passed_on = 0
            with log.open("rb") as file:
                file.seek(self._passed_on)
                text = file.read()
        except OSError:
            return
        self._passed_on += len(text)
        if text:
            self._output.write(text.decode(errors="replace"))
            self._output.flush()


def _job_of(job: TrainingJob, program: Sequence[str]) -> TrainingJob:
    """The job, trained by the command that was given instead of the study's."""
    if not (program and isinstance(job, ScriptJob)):
        return job
    words = Script(shlex.join(program)).words
    return replace(job, words=words, cwd=str(Path.cwd()))


def _program_of(job: TrainingJob, program: Sequence[str]) -> tuple[str, ...]:
    if not program or isinstance(job, ScriptJob):
        return ()
    words = Script(shlex.join(program)).words  # refuses what starts ranks itself, or is not there
    return tuple(words)


def follow(
    result: Result,
    point: str | Configuration = "best",
    *,
    program: Sequence[str] = (),
    steps: int | None = None,
    clocks: bool = True,
    say: Callable[[str], None] = lambda sentence: None,
    output: TextIO | None = None,
    runner: Callable[[TrainingJob, Cluster, Path], LocalRunner] | None = None,
) -> Followed:
    """Train under a point of a result until the program ends, and hold it to its promise.

    Args:
        result: of a study on this machine.
        point: which point (`tuner.result.Result.point`).
        program: the command that trains, "train.py --data DIR"; the study's own when empty. A
            command for the built-in job is given `--deepspeed_config FILE` at the end.
        steps: optimizer steps of the built-in program; the job's when not given.
        clocks: set the point's live settings; False runs at the device's own, and says so.
        say: told what happens, a sentence each.
        output: takes what the first rank prints; standard output when not given.
        runner: makes the node's runner, for tests.

    Raises:
        InputError: there is nothing to start, this machine is not the study's kind, or its clocks
            cannot be set.
    """
    from workload.machine import detect_cluster

    configuration, job, studied = launch_of(result, point)
    chosen = result.point(point)
    if result.run_dir is None:
        raise InputError(f"study {result.name!r} keeps no folder, so the job has nowhere to log")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise InvalidValue("steps", steps, "an integer of at least 1")
    words = _program_of(job, program)
    job = _job_of(job, program)
    cluster = detect_cluster()
    if studied is not None and studied.device.type != cluster.device.type:
        raise InputError(
            f"the study was of {studied.device.name} and this machine has {cluster.device.name}; "
            "`tuner apply` writes the files to start it elsewhere"
        )
    if studied is not None:
        cluster = replace(cluster, device=studied.device)
    if configuration.world_size > cluster.devices_per_node:
        raise InputError(
            f"the configuration has {configuration.world_size} ranks and this node "
            f"{cluster.devices_per_node} devices; `tuner apply` writes the files for several nodes"
        )
    # At another global batch than the job's own, the solution takes another number of steps.
    watch = Watch(Promise.of(chosen, round(result.steps * steps_a_job_step(configuration, job))))
    number = 1 + len(list((result.run_dir / "probes").glob("run-*")))
    request = ProbeRequest(
        f"run-{number}",
        configuration.launch,
        (configuration.live if clocks else type(configuration.live)(),),
        window=WindowPolicy(idle_s=0.0),
        time_limit_s=FOREVER_S,
        purpose="training",
    )
    made: list[_Training] = []

    def training(runner: LocalRunner, request: ProbeRequest) -> Probe:
        probe = _Training(
            runner,
            request,
            watch=watch,
            program=words,
            steps=steps or job.at(configuration).steps,
            tell=lambda drift: say(drift.sentence),
            output=output or sys.stdout,
        )
        made.append(probe)
        return probe

    make = runner or (
        lambda job, cluster, folder: LocalRunner(job, cluster, run_dir=folder, say=say)
    )
    interrupted, failure, energy_J, wall_s = False, None, 0.0, 0.0
    with closing(make(job, cluster, result.run_dir)) as node:
        if node.meter.scope != chosen.meter.scope:
            raise InputError(
                f"the study charged the {chosen.meter.scope} and the meter here the "
                f"{node.meter.scope}; energies of two scopes cannot be compared"
            )
        if configuration.live and not clocks:
            say(f"the promise was measured at {configuration.live.key}, which is not set")
        say(f"training under {' '.join(knobs(configuration)) or configuration.key}")
        try:
            record = node.run_as(training, request)
            failure, energy_J, wall_s = record.failure, record.energy_J, record.wall_s
        except KeyboardInterrupt:
            interrupted = True
    folder = made[0].folder if made else result.run_dir
    return Followed(watch.kept(), failure, interrupted, energy_J, wall_s, folder)
