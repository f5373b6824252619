"""Receipt of a measured command: what it used from its start until now or to its end, and where.

The meter is read once a second while the command runs. The energy at another moment, such as the
end of the first step, lies on the line between two readings (`EnergyCurve`). Trainings below the
command are told from the counts that their processes keep (`workload.hook.tally`). In Slurm's
accounting, the receipt is a comment on the job (`sacct -o Comment`).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import math
import os
import shutil
import statistics
import struct
import subprocess
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from tuner.formatting import number
from tuner.search_spaces.fields import has_shape
from tuner.search_spaces.safe_files import read_bytes
from tuner.workload.hook.tally import HEAD
from tuner.workload.node.host import CommandCores
from tuner.workload.node.meters import Reading
from tuner.workload.node.meters.base import device_states
from tuner.workload.records.probe import MeterInfo, PowerSample
from tuner.workload.scripts.secrets import hidden

#: Readings that are kept: a moment that lies further back has been asked for before.
_KEPT = 600


class EnergyCurve:
    """Energy since the first reading, at requested times."""

    def __init__(self, opened: Reading) -> None:
        self.opened = self.last = opened
        self._readings = deque([opened], maxlen=_KEPT)
        self._finite: dict[float, float] = {}

    def add(self, reading: Reading) -> None:
        if reading.time_s > self.last.time_s:
            self._readings.append(reading)
            self.last = reading

    @property
    def energy_J(self) -> float:
        """Energy from the first to the last reading."""
        return self.last.energy_J - self.opened.energy_J

    @property
    def time_s(self) -> float:
        """Time from the first to the last reading."""
        return self.last.time_s - self.opened.time_s

    def energy_at(self, time_s: float) -> float:
        """Return the energy from the first reading to this moment, at most to the last one."""
        if time_s not in self._finite:
            energy_J = self._interpolated(time_s) - self.opened.energy_J
            if time_s > self.last.time_s:
                return energy_J
            self._finite[time_s] = energy_J
        return self._finite[time_s]

    def _interpolated(self, time_s: float) -> float:
        at = bisect_left(self._readings, time_s, key=lambda reading: reading.time_s)
        if at in (0, len(self._readings)):
            return self._readings[min(at, len(self._readings) - 1)].energy_J
        before, after = self._readings[at - 1], self._readings[at]
        share = (time_s - before.time_s) / (after.time_s - before.time_s)
        return before.energy_J + share * (after.energy_J - before.energy_J)

    def forget(self, kept: set[float]) -> None:
        """Keep the energies of these moments alone."""
        self._finite = {time_s: self._finite[time_s] for time_s in kept if time_s in self._finite}


@dataclass(frozen=True)
class DeviceShare:
    """Mean power of a device, and its shares of time idle and throttled; NaN if unknown."""

    name: str
    mean_W: float
    idle: float
    throttled: float


class _Sum:
    # Integrals over the time in which a quantity was known.

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def add(self, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0.0) + seconds * value
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def mean(self, name: str) -> float:
        seconds = self._seconds.get(name, 0.0)
        return self._totals[name] / seconds if seconds else math.nan


class DeviceTotals:
    """Means over the samples of a meter, by device, each sample for the time since the last one.

    Args:
        tells_devices: whether the samples tell devices apart; otherwise all cores are one.
    """

    def __init__(self, time_s: float, *, tells_devices: bool) -> None:
        self._last_s, self._tells_devices = time_s, tells_devices
        self._sums: dict[int, _Sum] = {}
        self.cores = CommandCores()

    def add(self, sample: PowerSample) -> None:
        seconds, self._last_s = max(0.0, sample.time_s - self._last_s), sample.time_s
        states = device_states(sample) or {0: {"power_W": sample.power_W, **sample.extra}}
        for device, state in states.items():
            throttles = [state[name] for name in state if name.startswith("throttle")]
            values = {n: value for n, value in state.items() if n in ("power_W", "utilisation")}
            values |= {"throttled": max(throttles)} if throttles else {}
            self._sums.setdefault(device, _Sum()).add(seconds, values)

    def shares(self, mean_W: float) -> tuple[DeviceShare, ...]:
        """Return the devices. Their powers add up to `mean_W`, which the energy counter gives."""
        if not self._tells_devices:
            return (DeviceShare("cores", mean_W, self.cores.idle, math.nan),)
        sampled = {device: each.mean("power_W") for device, each in self._sums.items()}
        total_W = math.fsum(sampled.values())
        return tuple(
            DeviceShare(
                f"GPU {device}",
                mean_W * sampled[device] / total_W if total_W else math.nan,
                1.0 - each.mean("utilisation"),
                each.mean("throttled"),
            )
            for device, each in sorted(self._sums.items())
        )


def own_energy_J(curve: EnergyCurve, cores: CommandCores, idle_W: float) -> float:
    """Return the energy of a command by its share of the cores' busy time; NaN if that is unknown.

    Where the meter knows what idle cores draw, that is the command's for the time that it would
    have taken alone, which is without the waits for a core that another process had.
    """
    idle_J = idle_W * curve.time_s
    return idle_J * (1 - cores.waited) + (curve.energy_J - idle_J) * cores.share


#: The most that is read of a file of counts, which takes some kilobytes.
_MAX_BYTES = 2**20
#: Files of counts that are looked at, and read; ranks of a group.
_MOST_SEEN, _MOST_FILES, _MOST_RANKS = 2**17, 4096, 2**20


@dataclass(frozen=True)
class RankCount:
    """Steps of one process, the end of its first and last one (CLOCK_MONOTONIC), and samples.

    `samples` were drawn up to the last step, `first_samples` up to the first; NaN if unknown.
    """

    rank: int
    world: int
    pid: int
    parent: int
    words: tuple[str, ...]
    steps: int
    first_s: float
    last_s: float
    samples: float
    first_samples: float


class _Facts(TypedDict):
    rank: int
    world: int
    pid: int
    parent: int
    words: list[str]


def _read(path: str, began_s: float) -> RankCount:
    data = read_bytes(path, _MAX_BYTES)
    steps, first_s, last_s, samples, first_samples = HEAD.unpack_from(data)
    facts = json.loads(data[HEAD.size :])
    if not (1 <= steps < 2**53 and began_s <= first_s <= last_s <= time.monotonic()):
        raise ValueError(f"{path} holds no step")
    if not has_shape(facts, _Facts) or not 0 <= facts["rank"] < facts["world"] <= _MOST_RANKS:
        raise ValueError(f"{path} holds no rank")
    rank, world, pid, parent = (facts[key] for key in ("rank", "world", "pid", "parent"))
    words = tuple(facts["words"])
    return RankCount(
        *(rank, world, pid, parent, words, int(steps), first_s, last_s, samples, first_samples)
    )


def read_counts(
    folder: Path, began_s: float = 0.0, *, limit_s: float = math.inf
) -> list[RankCount]:
    """Return the counts of the processes that have stepped, by their first step.

    Of many files the newest, and those that are read within `limit_s`. The program may write here,
    too, or while this reads: what holds no counts of steps since `began_s` (CLOCK_MONOTONIC) is
    left out.
    """
    until_s = time.monotonic() + limit_s
    counts, times_s = [], dict[str, float]()
    for entry in itertools.islice(os.scandir(folder), _MOST_SEEN):
        with contextlib.suppress(OSError):
            times_s[entry.path] = entry.stat(follow_symlinks=False).st_mtime
        if time.monotonic() > until_s:
            break
    for path in heapq.nlargest(_MOST_FILES, times_s, key=times_s.__getitem__):
        if time.monotonic() > until_s:
            break
        with contextlib.suppress(OSError, ValueError, RecursionError, struct.error):
            counts.append(_read(path, began_s))
    return sorted(counts, key=lambda count: (count.first_s, count.rank))


@dataclass(frozen=True)
class Training:
    """Training of one process, or of the ranks of one process group on this node."""

    ranks: tuple[RankCount, ...]

    @property
    def lead(self) -> RankCount:
        """The lowest rank, whose steps count."""
        return min(self.ranks, key=lambda each: each.rank)

    @property
    def world(self) -> int:
        """Number of ranks, those on other nodes included."""
        return self.lead.world

    @property
    def samples(self) -> float:
        """Samples that the ranks of this node drew for the steps after the first; NaN if unknown,
        or if none were drawn."""
        samples = sum(each.samples - each.first_samples for each in self.ranks)
        return samples if samples > 0 else math.nan


def trainings_of(counts: Iterable[RankCount]) -> list[Training]:
    """Group ranks into trainings: one group has one parent, one world and each rank once."""
    groups: list[list[RankCount]] = []
    for count in counts:
        group = next((each for each in reversed(groups) if _belongs(count, each)), None)
        if group is None:
            groups.append([count])
        else:
            group.append(count)
    return [Training(tuple(group)) for group in groups]


def _belongs(count: RankCount, group: list[RankCount]) -> bool:
    first = group[0]
    return (
        count.world > 1
        and (count.parent, count.world) == (first.parent, first.world)
        and all(count.rank != each.rank for each in group)
    )


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
        core_share: share of the cores' busy time that was the command's; NaN if unknown, and where
            the energy is that of GPUs.
        own_energy_J: energy of the command beside others' work, by that share (`own_energy_J`).
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
    core_share: float = math.nan
    own_energy_J: float = math.nan

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
            "core_share": self.core_share,
            "own_energy_J": self.own_energy_J,
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


#: Time that Slurm's controller has to answer, seconds.
LIMIT_S = 20.0
#: Beginning of our comment.
_OURS = "energy"


def comment_of(receipt: Receipt) -> str:
    """Return the line: `energy_J=... scope=... meter=... time_s=... steps=...`."""
    figures = {
        f"{_OURS}_J": f"{receipt.energy_J:.0f}",
        "scope": receipt.meter.scope,
        "meter": receipt.meter.label,
        "time_s": f"{receipt.time_s:.1f}",
        "mean_W": f"{receipt.mean_W:.0f}",
        "steps": str(receipt.steps),
    }
    if len(receipt.trainings) == 1:
        only = receipt.trainings[0]
        energies = {"J_per_step": only.step_energy_J, "J_per_sample": only.sample_energy_J}
        figures |= {
            name: number(value).replace(",", "") for name, value in energies.items() if value > 0
        }
    return " ".join(f"{name}={value}" for name, value in figures.items())


def write_comment(receipt: Receipt, environ: Mapping[str, str] = os.environ) -> str:
    """Set the comment of this process's Slurm job; return a sentence on the outcome."""
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return "--slurm-comment wrote nothing: this is no Slurm job (SLURM_JOB_ID is not set)."
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        return f"--slurm-comment wrote nothing on job {job}: scontrol is not on the PATH."
    ours = comment_of(receipt)
    if environ.get("SLURM_NNODES", "1") != "1":
        ours = f"node={receipt.host} {ours}"
    comment = "; ".join(filter(None, [_present(job, environ), ours]))
    words = ["scontrol", "update", f"JobId={job}", f"Comment={comment}"]
    code, output = _run(words, environ)
    if code != 0:
        why = output or f"exit code {code}"
        return f"--slurm-comment wrote nothing on job {job}: scontrol said: {why}"
    return f"The comment of Slurm job {job} is now: {comment}"


def _present(job: str, environ: Mapping[str, str]) -> str:
    # The comment that the job has, which stays in front.
    code, output = _run(["squeue", "--noheader", f"--jobs={job}", "--format=%k"], environ)
    return "" if code or output in ("(null)", "N/A") else output


def _run(words: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            words,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, " ".join(done.stdout.split())
