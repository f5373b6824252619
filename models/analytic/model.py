"""Step time, power and memory of any configuration, from first principles and data sheets.

Energy is the power of each part while it is busy, above the idle power of a device. The figures are
only a prior: the surrogates fit its scale to measurements and learn the rest, and
`benchmarks.published` prints its errors against published measurements.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any, Protocol

import numpy as np

from tuner.models.analytic.constants import (
    Constants,
    Launches,
    Layout,
    Setup,
    Stages,
    constants_of,
    cut,
    end_weights,
    layout_of_groups,
    origin_of,
    read_layout,
)
from tuner.models.analytic.memory import DEVICE_PARTS, memory_parts
from tuner.models.analytic.step import OUTSIDE_PARTS, StepParts, step_parts
from tuner.models.prior import Prediction, Prior
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import Program, TrainingJob
from tuner.search_spaces.knobs import stage_values

#: Lowest clock that a power limit is taken to reach, as a share of the highest, and the number of
#: bisections that find the clock under a limit.
LOWEST_CLOCK, BISECTIONS = 0.1, 14


#: Constants -> step time and power, shape (n, 2).
ByConstants = Callable[[Constants], np.ndarray]


class Correctable(Prior, Protocol):
    """Prediction by constants that measurements can correct."""

    def memory_bytes(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Return the peak memory of the fullest device, shape (n,)."""
        ...

    def time_and_power(self, configurations: Sequence[Configuration]) -> ByConstants:
        """Return a function of the constants: step time and power, shape (n, 2)."""
        ...

    @property
    def constants(self) -> Constants: ...

    def with_constants(self, constants: Constants) -> Correctable:
        """Return the same prior by other constants."""
        ...


@dataclass(frozen=True)
class Breakdown:
    """Parts of one configuration's time, energy and memory that are not zero, largest first.

    The time is that of the busiest stage: its parts of every micro-batch, its wait (the pipeline's
    bubble), and the terms that occur once per step. `clock_MHz` is None of a device whose clocks
    are unknown.
    """

    step_time_s: float
    energy_J: float
    memory_bytes: float
    host_memory_bytes: float
    clock_MHz: float | None
    time_s: Mapping[str, float]
    joules: Mapping[str, float]
    memory: Mapping[str, float]

    @property
    def power_W(self) -> float:
        """Average power of the whole job."""
        return self.energy_J / self.step_time_s


@dataclass(frozen=True)
class Busy:
    """Seconds of a span in which each part of a device is busy; arrays of one shape."""

    arithmetic_s: np.ndarray  # full-rate arithmetic, counted at the highest clock
    memory_s: np.ndarray
    link_s: np.ndarray
    host_link_s: np.ndarray
    wait_s: np.ndarray  # waiting for other devices, by kernels that spin


class PowerModel:
    """Power model of one device: idle, clock- and voltage-dependent compute, memory and links.

    Arithmetic costs V(f)^2 f while it runs, so a fixed amount of it costs energy as V(f)^2. Memory
    and links draw power while they move data, at any SM clock. While a device waits for others, the
    kernels of the communication library spin, which costs V(f)^2 f as well. A device whose power
    would exceed its limit lowers its clock until it fits.
    """

    def __init__(self, device: Device, constants: Constants) -> None:
        self.device, self.constants = device, constants
        self._reference_W = constants.reference_W or device.max_W - device.idle_W

    def voltage(self, clock: np.ndarray) -> np.ndarray:
        """Return the voltage at a clock, shares of the highest: flat to the knee, then linear."""
        knee, lowest = self.constants.voltage_knee, self.constants.lowest_voltage
        rise = np.clip((clock - knee) / (1 - knee), 0.0, None)
        return np.asarray(lowest + (1 - lowest) * rise)

    def energies_J(
        self, busy: Busy, clock: np.ndarray, span_s: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the joules of one device over a span, by part."""
        c, reference = self.constants, self._reference_W
        squared = self.voltage(clock) ** 2
        return {
            "idle": self.device.idle_W * span_s,
            "awake": c.awake_W * reference * squared * clock * span_s,
            "arithmetic": c.compute_W * reference * squared * busy.arithmetic_s,
            "memory": c.memory_W * reference * busy.memory_s,
            "links": c.link_W * reference * busy.link_s,
            "host link": c.host_link_W * reference * busy.host_link_s,
            "waiting": c.wait_W * reference * squared * clock * busy.wait_s,
        }

    def watts(self, busy: Busy, clock: np.ndarray, span_s: np.ndarray) -> np.ndarray:
        """Return the average watts of one device over a span."""
        return np.asarray(sum(self.energies_J(busy, clock, span_s).values()) / span_s)


@dataclass(frozen=True)
class _Group:
    members: np.ndarray  # numbers of the configurations
    launches: Launches
    row: np.ndarray  # number of each member's launch
    stages: Stages
    clock: np.ndarray  # (members, kinds of stage), as a share of the highest
    limit_W: np.ndarray  # (members, kinds of stage)
    memory_rate: np.ndarray  # (members, 1)

    def parts(self, setup: Setup) -> StepParts:
        """Return the members' steps but for the clock."""
        parts = step_parts(setup, self.launches, self.stages)
        return replace(parts[self.row], memory_rate=self.memory_rate)


class AnalyticModel:
    """Model of the step time, power and memory of a job on a cluster.

    Args:
        program: what the training program does that no knob states; by default the job's.
        partitions: number of blocks of each stage by pipeline degree, if known.

    Raises:
        InputError: the job's model lacks a size (from `facts_of`), or a partition does not fit it.
    """

    def __init__(
        self,
        job: TrainingJob,
        cluster: Cluster,
        *,
        constants: Constants | None = None,
        program: Program | None = None,
        partitions: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        device = cluster.device
        self._constants = constants or constants_of(device)
        self.setup = Setup(job, cluster, self.constants, program or job.program)
        self.job, self.cluster, self.facts = job, cluster, self.setup.facts
        self.power = PowerModel(device, self.constants)
        self._partitions = dict(partitions or {})
        self._top_MHz = float(max(device.clocks_MHz, default=device.default_clock_MHz or 1))
        self._default = (device.default_clock_MHz or self._top_MHz) / self._top_MHz

    @property
    def constants(self) -> Constants:
        return self._constants

    def with_constants(self, constants: Constants) -> AnalyticModel:
        """Return the same model by other constants."""
        more = {"program": self.setup.program, "partitions": self._partitions}
        return AnalyticModel(self.job, self.cluster, constants=constants, **more)  # type: ignore[arg-type]

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Return step time, power and memory; arrays of shape (len(configurations),)."""
        return self._predict(self._layout_of(configurations))

    def time_and_power(self, configurations: Sequence[Configuration]) -> ByConstants:
        """Return a function of the constants: step time and power, shape (n, 2)."""
        groups, n = list(self._groups(self._layout_of(configurations))), len(configurations)
        usual = {name: getattr(self._constants, name) for name in OUTSIDE_PARTS}

        @lru_cache(maxsize=1)
        def parts(constants: Constants) -> list[StepParts]:
            setup = self.with_constants(constants).setup
            return [group.parts(setup) for group in groups]

        def figures(constants: Constants) -> np.ndarray:
            of_each = zip(groups, parts(replace(constants, **usual)), strict=True)
            return np.column_stack(self.with_constants(constants)._run_all(of_each, n)[:2])

        return figures

    def predict_groups(self, groups: Sequence[tuple[Settings, tuple[Settings, ...]]]) -> Prediction:
        """Return the figures of launches with their live settings, one group after the other."""
        batch, compiled = self.job.global_batch, self.job.compiled
        return self._predict(layout_of_groups(groups, batch, compiled=compiled))

    def _predict(self, layout: Layout) -> Prediction:
        groups = ((group, group.parts(self.setup)) for group in self._groups(layout))
        time, power, clock = self._run_all(groups, len(layout.row))
        device, host = self._memory(layout.launches)
        return Prediction(
            step_time_s=time,
            power_W=power,
            memory_bytes=device[layout.row],
            host_memory_bytes=host[layout.row],
            clock_MHz=clock * self._top_MHz,
        )

    def _run_all(
        self, groups: Iterable[tuple[_Group, StepParts]], n: int
    ) -> tuple[np.ndarray, ...]:
        # Returns step time, power and mean clock (a share of the highest) of each configuration.
        time, power, clock = (np.empty(n) for _ in range(3))
        for group, parts in groups:
            clocks, slot, step = self._run(group, parts)
            joules = self._joules(group, parts, clocks, slot, step)
            time[group.members] = step
            power[group.members] = sum(joules.values()) / step
            clock[group.members] = clocks @ group.stages.count / group.stages.count.sum()
        return time, power, clock

    def memory_bytes(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Return the peak bytes on the device of the fullest rank."""
        return self.peaks(configurations)[0]

    def peaks(self, configurations: Sequence[Configuration]) -> tuple[np.ndarray, np.ndarray]:
        """Return peak bytes on the fullest rank's device and on a node's host, shape (n,) each."""
        layout = self._layout_of(configurations)
        device, host = self._memory(layout.launches)
        return device[layout.row], host[layout.row]

    def breakdown(self, configuration: Configuration) -> Breakdown:
        """Return the parts of one configuration's time, energy and memory."""
        layout = self._layout_of([configuration])
        (group,) = self._groups(layout)
        parts = group.parts(self.setup)
        clocks, slot, step = self._run(group, parts)
        joules = self._joules(group, parts, clocks, slot, step)
        stages = self._stages(float(layout.launches.p[0]))
        memory = memory_parts(self.setup, layout.launches, stages)
        time = _time_parts(parts, self.constants, clocks, slot)
        time["pipeline bubble"] = max(0.0, float(step[0]) - sum(time.values()))
        fullest = int(memory.device[0].argmax())
        clock = float(clocks[0] @ group.stages.count / group.stages.count.sum())
        device = self.cluster.device
        known = bool(device.clocks_MHz or device.default_clock_MHz)
        return Breakdown(
            step_time_s=float(step[0]),
            energy_J=sum(float(value[0]) for value in joules.values()),
            memory_bytes=float(memory.device[0, fullest]),
            host_memory_bytes=float(memory.host[0].max()),
            clock_MHz=clock * self._top_MHz if known else None,
            time_s=_largest_first(time),
            joules=_largest_first({name: float(value[0]) for name, value in joules.items()}),
            memory=_largest_first({n: float(getattr(memory, n)[0, fullest]) for n in DEVICE_PARTS}),
        )

    def _layout_of(self, configurations: Sequence[Configuration]) -> Layout:
        return read_layout(configurations, self.job.global_batch, compiled=self.job.compiled)

    def _stages(self, p: float) -> Stages:
        ends = end_weights(self.setup.program.partition, self.facts)
        return cut(self.facts.layers, int(p), self._partitions.get(int(p)), ends)

    def _groups(self, layout: Layout) -> Iterator[_Group]:
        staged = np.zeros(len(layout.row), dtype=bool)
        staged[[*layout.stage_clocks_MHz, *layout.stage_limits_W]] = True
        degree = layout.launches.p
        for p in np.unique(degree):
            launches = np.flatnonzero(degree == p)
            place = np.full(len(degree), -1, dtype=np.intp)
            place[launches] = np.arange(len(launches))
            here = degree[layout.row] == p
            for each in (False, True):
                members = np.flatnonzero(here & (staged == each))
                if not len(members):
                    continue
                stages = self._stages(float(p))
                stages = stages.each() if each else stages
                clock, limit = self._settings(layout, members, len(stages.count))
                yield _Group(
                    members=members,
                    launches=layout.launches[launches],
                    row=place[layout.row[members]],
                    stages=stages,
                    clock=clock,
                    limit_W=limit,
                    memory_rate=self._memory_rate(layout.memory_clock_MHz[members]),
                )

    def _memory_rate(self, clock_MHz: np.ndarray) -> np.ndarray:
        # Bandwidth is proportional to the memory's clock. A device whose file does not state that
        # clock is assumed to run at it always, and the surrogates learn the difference.
        stated = self.cluster.device.memory_clock_MHz
        if not stated:
            return np.ones((len(clock_MHz), 1))
        return np.where(np.isnan(clock_MHz), 1.0, clock_MHz / stated)[:, None]

    def _settings(
        self, layout: Layout, members: np.ndarray, kinds: int
    ) -> tuple[np.ndarray, np.ndarray]:
        device = self.cluster.device
        clock = np.repeat(layout.clock_MHz[members][:, None] / self._top_MHz, kinds, axis=1)
        limit = np.repeat(layout.limit_W[members][:, None], kinds, axis=1)
        staged = layout.stage_clocks_MHz or layout.stage_limits_W
        for i, member in enumerate(map(int, members)) if staged else ():
            if member in layout.stage_clocks_MHz:
                clock[i] = np.array(layout.stage_clocks_MHz[member]) / self._top_MHz
            if member in layout.stage_limits_W:
                limit[i] = layout.stage_limits_W[member]
        clock = np.where(np.isnan(clock), self._default, clock)
        # Devices that share a limit are taken to share it equally.
        limit = limit / device.devices_per_limit
        return clock, np.where(np.isnan(limit), device.max_W, limit)

    def _run(self, group: _Group, parts: StepParts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Returns clocks after the limit, slots at them (members, kinds), and steps (members,).
        clock = self._capped(group, parts)
        slot = parts.slot_s(clock, self.constants)
        return clock, slot, parts.step_s(slot, group.stages, self.constants)

    def _slot_W(self, parts: StepParts, clock: np.ndarray) -> np.ndarray:
        slot = parts.slot_s(clock, self.constants)
        return self.power.watts(_busy_slot(parts), clock, np.maximum(slot, 1e-12))

    def _capped(self, group: _Group, every: StepParts) -> np.ndarray:
        # A limit acts within milliseconds, so it applies to a slot's power, not a step's. It lowers
        # a clock to `LOWEST_CLOCK` at most, at which a device may exceed its limit.
        over = self._slot_W(every, group.clock) > group.limit_W
        rows = np.flatnonzero(over.any(axis=1))
        if not len(rows):
            return group.clock
        parts, limit_W = every[rows], group.limit_W[rows]
        high = group.clock[rows]
        low = np.full_like(high, LOWEST_CLOCK)
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            above = self._slot_W(parts, middle) > limit_W
            high, low = np.where(above, middle, high), np.where(above, low, middle)
        clock = group.clock.copy()
        clock[rows] = np.where(over[rows], low, clock[rows])
        return clock

    def _joules(
        self,
        group: _Group,
        parts: StepParts,
        clock: np.ndarray,
        slot: np.ndarray,
        step: np.ndarray,
    ) -> dict[str, np.ndarray]:
        launches, cluster = group.launches, self.cluster
        busy_slot = _busy_slot(parts)
        busy = Busy(
            arithmetic_s=parts.m * busy_slot.arithmetic_s,
            memory_s=parts.m * busy_slot.memory_s + parts.update,
            link_s=parts.m * busy_slot.link_s + parts.sync,
            host_link_s=parts.m * busy_slot.host_link_s
            + np.maximum(0.0, parts.offload + parts.offload_behind - parts.host_update),
            wait_s=parts.waiting_s(slot, step, self.constants),
        )
        span = np.repeat(step[:, None], slot.shape[1], axis=1)
        ranks = (launches.d * launches.t * launches.u)[group.row, None]
        each = self.power.energies_J(busy, clock, span)
        joules = {
            name: (value * group.stages.count * ranks).sum(axis=1) for name, value in each.items()
        }
        world = launches.ranks[group.row]
        nodes = np.ceil(world / cluster.devices_per_node)
        supply = cluster.supply_loss * sum(joules.values())
        joules["host"] = nodes * cluster.host_W * step + (
            self.constants.host_busy_W * world * parts.host_update.max(axis=1)
            if cluster.host_W
            else 0.0
        )
        joules["supply"] = np.asarray(supply)
        if not cluster.device.is_gpu:  # a CPU's counter is the whole package's
            joules["idle"] = joules["idle"] + (
                (nodes * cluster.devices_per_node - world) * cluster.device.idle_W * step
            )
        return joules

    def _memory(self, launches: Launches) -> tuple[np.ndarray, np.ndarray]:
        device, host = np.empty(len(launches)), np.empty(len(launches))
        for p in np.unique(launches.p):
            rows = np.flatnonzero(launches.p == p)
            parts = memory_parts(self.setup, launches[rows], self._stages(float(p)))
            device[rows], host[rows] = parts.device.max(axis=1), parts.host.max(axis=1)
        return device, host


def _busy_slot(parts: StepParts) -> Busy:
    return Busy(
        arithmetic_s=parts.arithmetic,
        memory_s=parts.operands + parts.stream,
        link_s=parts.links,
        host_link_s=parts.host_now + parts.host_behind,
        wait_s=parts.links,
    )


def _largest_first(parts: Mapping[str, float]) -> dict[str, float]:
    least = 1e-9 * sum(parts.values())  # the rounding of what adds up to nothing
    kept = ((name, value) for name, value in parts.items() if value > least)
    return dict(sorted(kept, key=lambda item: -item[1]))


def _time_parts(
    parts: StepParts, constants: Constants, clocks: np.ndarray, slot: np.ndarray
) -> dict[str, float]:
    # Seconds of one configuration's step on the busiest stage, without the bubble.
    busiest = int(slot[0].argmax())
    m = float(parts.m[0, 0])

    def of(values: np.ndarray) -> float:
        return float(values[0, busiest])

    device = of(parts.device_s(clocks, constants))
    arithmetic = of(parts.arithmetic / clocks)
    return {
        "arithmetic": m * min(arithmetic, device),
        "memory traffic": m * max(0.0, device - arithmetic),
        "dispatch": m * of(parts.dispatch_s(clocks, constants)),
        "tensor-parallel links": m * of(parts.tensor),
        "sequence links": m * of(parts.sequence),
        "expert all-to-all": m * of(parts.experts),
        "stage transfer": m * of(parts.transfer),
        "host's work on blocks": m * of(parts.units),
        "activation offload": m * of(parts.host_s(clocks, constants)),
        "gradients and ZeRO": float(parts.sync_s(slot, constants)[0, busiest]),
        "optimizer": of(parts.update),
        "optimizer offload": float(parts.offload_s(slot)[0, busiest]),
        "loop": constants.step_s,
    }


# Errors of the analytic models: those known from published measurements, and joint ones.
#
# `data/known_error.toml` keeps the figures of `benchmarks.published` by device kind, so that a
# prediction is shown with its error. For other kinds the error is unknown, and is shown so.
#
# The part of the error that is a configuration's own is taken as a sum over the launch knobs: each
# value of each knob that varies has an error of its own, all of one size. To that a clock or power
# limit adds an error that grows with the distance from the highest one. All errors are normal and
# independent, so what a probe tells of the others is linear regression.


#: Live knobs whose error grows as their value falls.
_FALLING = ("clock_MHz", "power_limit_W")
#: Standard deviation of one measured launch (log): launches of one configuration differ by 0.5 to
#: 1 % in the recorded tables with repeats.
LAUNCH_SD = 0.01
#: Tokens of one GPU in one pass below which a step is less well known, and the standard deviations
#: (log) of time and power that this adds, one error for all such configurations of a job: how much
#: of gathering and launching is exposed depends on the program as much as on the device. The times
#: of the four runs of 512 tokens in `benchmarks.validation.sfttrainer` are off by 0.18 (root mean
#: square of the log).
FEW_TOKENS, FEW_TOKENS_SD = 1024, (0.2, 0.2)
#: Median of the absolute value of a standard normal variable.
NORMAL_MEDIAN = 0.674


@dataclass(frozen=True)
class Check:
    """Comparison of the models with measurements."""

    devices: tuple[str, ...]
    what: str
    median: float
    worst: float
    held_out: bool  # True if no constant was fitted to these measurements
    against: str
    case: str = ""

    @property
    def sentence(self) -> str:
        """Description of the errors for the user."""
        fitted = "" if self.held_out else ", partly calibrated on it"
        what = f"{self.what}, {self.case}" if self.case else self.what
        return (
            f"{what}: median {100 * self.median:.1f} %, worst {100 * self.worst:.0f} % "
            f"({self.against}{fitted})"
        )


@dataclass(frozen=True)
class ErrorParts:
    """Parts of the models' error, as standard deviations of the logarithm.

    What all configurations of one job on one cluster share moves a front and leaves the order of
    its points; a configuration's own error changes the order.
    """

    devices: tuple[str, ...]
    what: str
    shared: float
    own: float
    against: str


def error_parts(what: str) -> ErrorParts:
    """Return the parts of the error of "step time" or of "power"."""
    return next(each for each in (ErrorParts(**e) for e in _tables("parts")) if each.what == what)


def _tables(name: str) -> list[dict[str, Any]]:
    source = resources.files("tuner.models") / "data" / "known_error.toml"
    data = tomllib.loads(source.read_text(encoding="utf-8"))[name]
    return [
        {key: tuple(value) if isinstance(value, list) else value for key, value in each.items()}
        for each in data
    ]


def known_errors(device: Device) -> tuple[Check, ...]:
    """Return the checks that hold for this kind of device."""
    checks = (Check(**each) for each in _tables("check"))
    return tuple(check for check in checks if device.name in check.devices)


#: What the origin of a device's constants says of their errors.
_ORIGINS = {
    "published": "its constants were set to published runs on it",
    "scaled": "its constants are those of all NVIDIA GPUs, scaled by its data sheet",
    "guessed": "its constants are those of NVIDIA GPUs, a guess, scaled by its data sheet",
    "estimated": "its constants are estimates",
}


def known_error_lines(device: Device) -> list[str]:
    """Return sentences on the models' error on this kind of device."""
    return [check.sentence for check in known_errors(device)] or [
        f"unknown: the models were not compared with measurements on {device.name}; "
        f"{_ORIGINS[origin_of(device)]} (for other kinds see benchmarks.published)",
    ]


@dataclass(frozen=True)
class Spread:
    """Standard deviations (log) of the shared and the own part of the error."""

    shared: float
    own: float

    @classmethod
    def of(cls, what: str, device: Device | None = None) -> Spread:
        """Return the known parts of the error of "step time" or "power".

        On a kind of device whose errors are known but not divided, what they exceed the own part by
        is shared: a normal error of median m has the standard deviation m / 0.674.
        """
        parts = error_parts(what)
        total = 0.0
        if device is not None and device.name not in parts.devices:
            checks = (c for c in known_errors(device) if c.what == what and not c.case)
            total = max((check.median / NORMAL_MEDIAN for check in checks), default=0.0)
        shared = math.sqrt(max(parts.shared**2, total**2 - parts.own**2))
        return cls(shared, parts.own)


class ModelError:
    """Joint error of the predictions of some configurations.

    Args:
        sequence_length: of the job, tokens; 0 if unknown.
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        *,
        time: Spread | None = None,
        power: Spread | None = None,
        sequence_length: int = 0,
    ) -> None:
        self.time, self.power = time or Spread.of("step time"), power or Spread.of("power")
        self._own = _features(configurations)
        self._few = np.array([has_few_tokens(c, sequence_length) for c in configurations], float)

    @property
    def time_sd(self) -> np.ndarray:
        """Standard deviation of the log of each step time, (n,)."""
        return self._sd(self.time, FEW_TOKENS_SD[0])

    @property
    def power_sd(self) -> np.ndarray:
        """Standard deviation of the log of each power, (n,)."""
        return self._sd(self.power, FEW_TOKENS_SD[1])

    def _sd(self, spread: Spread, few: float) -> np.ndarray:
        own = spread.own**2 * (self._own**2).sum(axis=1)
        return np.asarray(np.sqrt(spread.shared**2 + own + (few * self._few) ** 2))

    def ratio_sd(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the standard deviations of log time and log energy over those of one row, (n,)."""
        own = np.sqrt(((self._own - self._own[row]) ** 2).sum(axis=1))
        few = np.abs(self._few - self._few[row])
        time = np.hypot(self.time.own * own, FEW_TOKENS_SD[0] * few)
        both = math.hypot(self.time.own, self.power.own)
        return time, np.hypot(both * own, math.hypot(*FEW_TOKENS_SD) * few)

    def draw(self, draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return joint draws of the errors of log time and log power, (draws, n) each."""
        rng = np.random.default_rng(seed)
        time, power = (self._drawn(rng, draws, each) for each in (self.time, self.power))
        if not self._few.any():
            return time, power
        few = rng.standard_normal((2, draws, 1)) * self._few
        return time + FEW_TOKENS_SD[0] * few[0], power + FEW_TOKENS_SD[1] * few[1]

    def _drawn(self, rng: np.random.Generator, draws: int, spread: Spread) -> np.ndarray:
        own = rng.standard_normal((draws, self._own.shape[1])) @ self._own.T
        return np.asarray(spread.shared * rng.standard_normal((draws, 1)) + spread.own * own)

    def energy_features(self) -> np.ndarray:
        """Return features (n, k) with standard normal weights; their sum is the energy's error."""
        shared = math.hypot(self.time.shared, self.power.shared)
        own = math.hypot(self.time.own, self.power.own)
        columns = [np.full((len(self._own), 1), shared), own * self._own]
        if self._few.any():
            columns.append(math.hypot(*FEW_TOKENS_SD) * self._few[:, None])
        return np.hstack(columns)


def has_few_tokens(configuration: Configuration, sequence_length: int) -> bool:
    """Return True if a pass of one GPU has fewer than `FEW_TOKENS` tokens.

    Args:
        sequence_length: tokens; 0 if unknown, of which nothing is said.
    """
    tokens = configuration.micro_batch * sequence_length / configuration.sequence_parallel
    return 0 < tokens < FEW_TOKENS


def _features(configurations: Sequence[Configuration]) -> np.ndarray:
    if not configurations:
        return np.empty((0, 0))
    names = sorted({name for c in configurations for name in c.launch})
    values = {name: [c.get(name) for c in configurations] for name in names}
    varying = [name for name in names if len(set(values[name])) > 1]
    columns = []
    for name in varying:
        for value in sorted(set(values[name]), key=str):
            here = np.array([each == value for each in values[name]], dtype=float)
            columns.append(here / math.sqrt(len(varying)))
    for name in _FALLING:
        column = _depth(configurations, name)
        if column.any():
            columns.append(column)
    return np.column_stack(columns) if columns else np.zeros((len(configurations), 1))


def _depth(configurations: Sequence[Configuration], name: str) -> np.ndarray:
    means = []
    for configuration in configurations:
        value = configuration.live.get(name)
        numbers = [float(v) for v in stage_values(value) if isinstance(v, int | float)]
        means.append(sum(numbers) / len(numbers) if numbers else math.nan)
    found = np.array(means)
    if np.isnan(found).all() or np.nanmin(found) == np.nanmax(found):
        return np.zeros(len(configurations))
    top, low = np.log(np.nanmax(found)), np.log(np.nanmin(found))
    return np.nan_to_num((top - np.log(found)) / (top - low))


def most_informative(features: np.ndarray, weight: np.ndarray, first: int, count: int) -> list[int]:
    """Return the probes, one after the other, that reduce the weighted variance most.

    Greedy design for linear regression on `features` (n, k) with standard normal weights.
    """
    covariance = np.eye(features.shape[1])
    wanted = features[weight > 0]
    shares = weight[weight > 0]
    chosen: list[int] = []
    for _ in range(min(count, len(features))):
        spread = features @ covariance
        variance = np.einsum("ij,ij->i", spread, features) + LAUNCH_SD**2
        gain = shares @ (wanted @ spread.T) ** 2 / variance
        gain[chosen] = -1.0
        best = int(np.argmax(gain)) if chosen else first
        chosen.append(best)
        covariance = covariance - np.outer(spread[best], spread[best]) / variance[best]
    return chosen
