"""Step time, power and memory of any configuration, from first principles and data sheets.

Energy is the power of each part while it is busy, above the idle power of a device. The figures are
only a prior: the surrogates fit its scale to measurements and learn the rest, and
`benchmarks.published` prints its errors against published measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

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
    read_layout,
)
from tuner.models.analytic.memory import DEVICE_PARTS, memory_parts
from tuner.models.analytic.step import OUTSIDE_PARTS, StepParts, step_parts
from tuner.models.prior import Prediction, Prior
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import Program, TrainingJob

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
    stages: Stages
    parts: StepParts  # but for the clock
    clock: np.ndarray  # (members, kinds of stage), as a share of the highest
    limit_W: np.ndarray  # (members, kinds of stage)


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
        layout = self._layout_of(configurations)
        usual = {name: getattr(self._constants, name) for name in OUTSIDE_PARTS}

        @lru_cache(maxsize=1)
        def groups(constants: Constants) -> list[_Group]:
            return list(self.with_constants(constants)._groups(layout))

        def figures(constants: Constants) -> np.ndarray:
            model, same_parts = self.with_constants(constants), replace(constants, **usual)
            return np.column_stack(model._run_all(groups(same_parts), len(layout.row))[:2])

        return figures

    def predict_groups(self, groups: Sequence[tuple[Settings, tuple[Settings, ...]]]) -> Prediction:
        """Return the figures of launches with their live settings, one group after the other."""
        batch, compiled = self.job.global_batch, self.job.compiled
        return self._predict(layout_of_groups(groups, batch, compiled=compiled))

    def _predict(self, layout: Layout) -> Prediction:
        time, power, clock = self._run_all(self._groups(layout), len(layout.row))
        device, host = self._memory(layout.launches)
        return Prediction(
            step_time_s=time,
            power_W=power,
            memory_bytes=device[layout.row],
            host_memory_bytes=host[layout.row],
            clock_MHz=clock * self._top_MHz,
        )

    def _run_all(self, groups: Iterable[_Group], n: int) -> tuple[np.ndarray, ...]:
        # Returns step time, power and mean clock (a share of the highest) of each configuration.
        time, power, clock = (np.empty(n) for _ in range(3))
        for group in groups:
            clocks, slot, step = self._run(group)
            joules = self._joules(group, clocks, slot, step)
            time[group.members] = step
            power[group.members] = sum(joules.values()) / step
            clock[group.members] = clocks @ group.stages.count / group.stages.count.sum()
        return time, power, clock

    def memory_bytes(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Return the peak bytes on the device of the fullest rank."""
        layout = self._layout_of(configurations)
        return self._memory(layout.launches)[0][layout.row]

    def breakdown(self, configuration: Configuration) -> Breakdown:
        """Return the parts of one configuration's time, energy and memory."""
        layout = self._layout_of([configuration])
        (group,) = self._groups(layout)
        clocks, slot, step = self._run(group)
        joules = self._joules(group, clocks, slot, step)
        stages = self._stages(float(layout.launches.p[0]))
        memory = memory_parts(self.setup, layout.launches, stages)
        time = _time_parts(group.parts, self.constants, clocks, slot)
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
                parts = step_parts(self.setup, layout.launches[launches], stages)
                clock, limit = self._settings(layout, members, len(stages.count))
                yield _Group(
                    members=members,
                    launches=layout.launches[layout.row[members]],
                    stages=stages,
                    parts=replace(
                        parts[place[layout.row[members]]],
                        memory_rate=self._memory_rate(layout.memory_clock_MHz[members]),
                    ),
                    clock=clock,
                    limit_W=limit,
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

    def _run(self, group: _Group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Returns clocks after the limit, slots at them (members, kinds), and steps (members,).
        clock = self._capped(group)
        slot = group.parts.slot_s(clock, self.constants)
        return clock, slot, group.parts.step_s(slot, group.stages, self.constants)

    def _slot_W(self, parts: StepParts, clock: np.ndarray) -> np.ndarray:
        slot = parts.slot_s(clock, self.constants)
        return self.power.watts(_busy_slot(parts), clock, np.maximum(slot, 1e-12))

    def _capped(self, group: _Group) -> np.ndarray:
        # A limit acts within milliseconds, so it applies to a slot's power, not a step's. It lowers
        # a clock to `LOWEST_CLOCK` at most, at which a device may exceed its limit.
        over = self._slot_W(group.parts, group.clock) > group.limit_W
        rows = np.flatnonzero(over.any(axis=1))
        if not len(rows):
            return group.clock
        parts, limit_W = group.parts[rows], group.limit_W[rows]
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
        self, group: _Group, clock: np.ndarray, slot: np.ndarray, step: np.ndarray
    ) -> dict[str, np.ndarray]:
        parts, cluster = group.parts, self.cluster
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
        ranks = (group.launches.d * group.launches.t * group.launches.u)[:, None]
        each = self.power.energies_J(busy, clock, span)
        joules = {
            name: (value * group.stages.count * ranks).sum(axis=1) for name, value in each.items()
        }
        world = group.launches.ranks
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
