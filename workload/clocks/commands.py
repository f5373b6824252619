"""Live knobs that commands of the user set on a node, beside the devices' clocks and limits.

Commands run in the job's folder. What stood before is read first,
or is taken to be the baseline if nothing reads it, and is restored as clocks are: after the probe,
and by the guard process if the agent ends.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.declared import Knob
from tuner.search_spaces.job import TrainingJob
from tuner.workload.clocks.base import Applied, Governor, GovernorError, KnobRefused
from tuner.workload.clocks.guard_client import (
    EarlierCommand,
    Guard,
    GuardError,
    put_back_commands,
)

#: Characters of a command's output that an error shows.
_SHOWN = 200


class CommandGovernor:
    """Governor of a node's devices and of the declared knobs that commands set there."""

    def __init__(self, devices: Governor, knobs: Sequence[Knob], cwd: Path) -> None:
        self.devices = devices
        self.can_set, self.why_not = devices.can_set, devices.why_not
        self.supported_clocks_MHz = devices.supported_clocks_MHz
        self.limit_range_W = devices.limit_range_W
        self._knobs = {knob.name: knob for knob in knobs}
        self._cwd = str(cwd)
        self._earlier: dict[str, str] = {}
        self._guard = Guard("")

    def apply(self, live: Settings, *, ranks: int | None = None) -> Applied:
        mine = {name: value for name, value in live.items() if name in self._knobs}
        clocks = Settings({name: value for name, value in live.items() if name not in mine})
        applied = self.devices.apply(clocks, ranks=ranks)
        notes = list(applied.notes)
        try:
            for name in [name for name in self._earlier if name not in mine]:
                self._set(self._knobs[name], self._earlier[name])
            for name, value in mine.items():
                knob = self._knobs[name]
                self._keep_earlier(knob)
                self._set(knob, str(value))
                if not knob.read:
                    notes.append(f"{name} was set by its command, and nothing reads it back")
                elif (now := self._read(knob)) != str(value) and not knob.reads_as(now, value):
                    raise KnobRefused(f"{name} was set to {value}, and its command reads {now!r}")
        except GovernorError:
            with contextlib.suppress(GovernorError):
                self.restore()
            raise
        return Applied(Settings({**applied.settings, **mine}), tuple(notes))

    def _keep_earlier(self, knob: Knob) -> None:
        # Before its first change, and tell the guard.
        if knob.name in self._earlier:
            return
        self._earlier[knob.name] = self._read(knob) if knob.read else str(knob.baseline)
        try:
            self._guard.expect([], commands=self._back())
        except GuardError as error:
            del self._earlier[knob.name]
            raise GovernorError(f"{knob.name} was not set: {error}") from error

    def _back(self) -> list[EarlierCommand]:
        return [self._command(self._knobs[n].set, value) for n, value in self._earlier.items()]

    def _command(self, words: Sequence[str], value: str = "") -> EarlierCommand:
        filled = tuple(word.replace("{value}", value) for word in words)
        return EarlierCommand(filled, self._cwd)

    def _set(self, knob: Knob, value: str) -> None:
        self._run(self._command(knob.set, value), f"the command that sets {knob.name} to {value}")

    def _read(self, knob: Knob) -> str:
        return self._run(self._command(knob.read), f"the command that reads {knob.name}").strip()

    @staticmethod
    def _run(command: EarlierCommand, what: str) -> str:
        try:
            done = command.run()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KnobRefused(f"{what} did not run: {error}") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-_SHOWN:]
            raise KnobRefused(f"{what} failed: {said or f'exit code {done.returncode}'}")
        return done.stdout

    def delivered(self) -> dict[str, float]:
        return self.devices.delivered()

    def restore(self) -> None:
        problems = []
        try:
            self.devices.restore()
        except GovernorError as error:
            problems.append(str(error))
        if self._earlier:
            problems += put_back_commands(self._back())
            self._earlier = {}
            self._guard.done()
        if problems:
            raise GovernorError("; ".join(problems))

    def close(self) -> None:
        try:
            self.restore()
        finally:
            self.devices.close()


def with_commands(governor: Governor, job: TrainingJob, cwd: Path) -> Governor:
    """Return a node's governor with a job's commands in place of another job's."""
    devices = governor.devices if isinstance(governor, CommandGovernor) else governor
    knobs = [knob for knob in job.knobs if knob.live and knob.set]
    return CommandGovernor(devices, knobs, cwd) if knobs else devices
