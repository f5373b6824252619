"""Receipt of a measured command: its consumption from its start until now or to its end."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tuner.receipt.energy import DeviceShare, EnergyCurve
from tuner.receipt.trainings import Training
from tuner.workload.records.probe import MeterInfo
from tuner.workload.scripts.launchers.secrets import hidden

#: Marks a file of this format, and its version.
KIND, SCHEMA = "joulefront receipt", 1


@dataclass(frozen=True)
class TrainingShare:
    """Share of one training: from the end of its first optimizer step to that of its last one.

    What lies between steps (evaluation, checkpoints) is part of it. NaN where a figure is unknown.

    Attributes:
        words: the command line of its lowest rank, secrets replaced by their names.
        ranks: number of its ranks on this node; `world` is that of all.
        steps: optimizer steps, the first one included.
        time_s, energy_J: of the `steps` - 1 after the first.
        samples: drawn by this node's ranks in that time.
    """

    words: tuple[str, ...]
    ranks: int
    world: int
    steps: int
    first_step_s: float
    time_s: float
    energy_J: float
    samples: float

    @classmethod
    def of(
        cls, training: Training, curve: EnergyCurve, samples_a_step: float | None
    ) -> TrainingShare:
        """Return the share of a training; `samples_a_step` replaces the counted number."""
        lead = training.lead
        counted = training.samples
        if samples_a_step is not None:
            counted = samples_a_step * (lead.steps - 1) * len(training.ranks) / training.world
        return cls(
            tuple(hidden(lead.words)[0]),
            len(training.ranks),
            training.world,
            lead.steps,
            lead.first_s - curve.opened.time_s,
            lead.last_s - lead.first_s,
            curve.energy_at(lead.last_s) - curve.energy_at(lead.first_s),
            counted,
        )

    @property
    def step_time_s(self) -> float:
        """Mean time from step to step, seconds; NaN with a single step."""
        return self.time_s / (self.steps - 1) if self.steps > 1 else math.nan

    @property
    def step_energy_J(self) -> float:
        """Mean energy from step to step, joules; NaN with a single step."""
        return self.energy_J / (self.steps - 1) if self.steps > 1 else math.nan

    @property
    def sample_energy_J(self) -> float:
        """Mean energy of a sample, joules; NaN if their number is unknown."""
        return self.energy_J / self.samples if self.samples > 0 else math.nan

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "step_time_s": self.step_time_s,
            "step_energy_J": self.step_energy_J,
            "sample_energy_J": self.sample_energy_J,
        }


@dataclass(frozen=True)
class Receipt:
    """Energy, time and steps of a command.

    Attributes:
        state: "running" until the command has ended; a file that says so was left by a `tuner`
            that was killed.
        command: its words, secrets replaced by their names.
        host, started: where and when it ran, the time in ISO 8601.
        began_s: time of the first reading, on CLOCK_MONOTONIC.
        time_s, energy_J: from the start until the last reading.
        exit_code: as the command gave it; None if a `signal` ended it, or while it runs.
        first_step_energy_J: energy until the end of the first optimizer step; NaN without one.
        notes: sentences on what was seen.
    """

    state: Literal["running", "ended"]
    command: tuple[str, ...]
    host: str
    started: str
    began_s: float
    time_s: float
    energy_J: float
    meter: MeterInfo
    exit_code: int | None = None
    signal: int | None = None
    first_step_energy_J: float = math.nan
    trainings: tuple[TrainingShare, ...] = ()
    devices: tuple[DeviceShare, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps of all trainings."""
        return sum(each.steps for each in self.trainings)

    @property
    def first_step_s(self) -> float:
        """Time until the end of the first optimizer step, seconds; NaN without one."""
        return min((each.first_step_s for each in self.trainings), default=math.nan)

    @property
    def mean_W(self) -> float:
        """Mean power, watts."""
        return self.energy_J / self.time_s if self.time_s > 0 else math.nan

    @property
    def idle(self) -> float:
        """Share of the devices' time in which they did nothing; NaN if unknown."""
        return statistics.fmean(each.idle for each in self.devices) if self.devices else math.nan

    @property
    def throttled(self) -> float:
        """Share of the devices' time in which heat or a power limit slowed them; NaN if unknown."""
        every = [each.throttled for each in self.devices]
        return statistics.fmean(every) if every else math.nan

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "version": SCHEMA,
            "state": self.state,
            "command": list(self.command),
            "host": self.host,
            "started": self.started,
            "began_monotonic_s": self.began_s,
            "time_s": self.time_s,
            "energy_J": self.energy_J,
            "meter": {**asdict(self.meter), "figures": self.meter.label},
            "exit_code": self.exit_code,
            "signal": self.signal,
            "steps": self.steps,
            "until_first_step": {"time_s": self.first_step_s, "energy_J": self.first_step_energy_J},
            "trainings": [each.to_json() for each in self.trainings],
            "mean_power_W": self.mean_W,
            "idle_share": self.idle,
            "throttled_share": self.throttled,
            "devices": [asdict(each) for each in self.devices],
            "notes": list(self.notes),
        }
