"""Step time, power and memory of any configuration, from first principles and data sheets.

A step is arithmetic (which the SM clock scales), memory traffic, dispatch, collectives over the
links they cross, the pipeline's bubble and offload traffic (none of which the clock scales). Energy
is what each part draws while it is busy, above what a device draws for being there. The figures are
a prior, not a truth: the surrogates fit its scale to measurements and learn the rest
(`models.surrogate`), and `benchmarks.published` says how wrong it was where it could be checked.
All candidates are computed at once with NumPy; the parts are in `models.step`, `models.compute`,
`models.collectives`, `models.memory` and `models.power`, the constants in `models.constants`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, runtime_checkable

import numpy as np

from models.breakdown import Breakdown, break_down
from models.constants import Constants, constants_of
from models.layout import Launches, Layout, read_layout
from models.memory import MemoryParts, memory_parts
from models.power import Busy, PowerModel, capped_clock
from models.stages import Stages, cut
from models.step import StepParts, step_parts
from search_spaces.cluster import Cluster
from search_spaces.configuration import Configuration
from search_spaces.job import TrainingJob
from search_spaces.model_facts import ModelFacts, facts_of

__all__ = ["AnalyticModel", "Breakdown", "Prediction", "Prior"]


@dataclass(frozen=True)
class Prediction:
    """What configurations are predicted to do; arrays of one figure a configuration.

    Attributes:
        step_time_s: seconds of one optimizer step.
        power_W: average power of the whole job, watts.
        memory_bytes: peak of the fullest rank's device, bytes.
        host_memory_bytes: peak of what the job's ranks put on one node's host, bytes; empty where
            whoever predicted says nothing of it.
        clock_MHz: mean clock of the devices after any limit; empty likewise.
    """

    step_time_s: np.ndarray
    power_W: np.ndarray
    memory_bytes: np.ndarray
    host_memory_bytes: np.ndarray = field(default_factory=lambda: np.empty(0))
    clock_MHz: np.ndarray = field(default_factory=lambda: np.empty(0))


@runtime_checkable
class Prior(Protocol):
    """Anything that predicts before a measurement: the surrogates' mean."""

    def predict(self, configurations: Sequence[Configuration]) -> Prediction: ...


@dataclass(frozen=True)
class _Group:
    """Configurations whose pipelines are cut alike.

    Attributes:
        members: their numbers.
        launches: their launches' knobs, one row a member.
        stages: the kinds of stage.
        parts: their steps but for the clock, one row a member.
        clock, limit_W: what each kind of stage was asked for, shape (members, kinds); the clock as
            a share of the highest.
    """

    members: np.ndarray
    launches: Launches
    stages: Stages
    parts: StepParts
    clock: np.ndarray
    limit_W: np.ndarray


class AnalyticModel:
    """Predicts step time, power and memory of a job on a cluster.

    Args:
        job: what is trained.
        cluster: what it runs on.
        constants: how much of the data sheet is reached; the device's own when not given.
        fused_attention: attention runs in a fused kernel and never stores its scores, as in the
            built-in training program; False for programs that store them.
        partitions: blocks of each stage by pipeline degree, where they are known.

    Raises:
        InputError: the job's model lacks a size (from `facts_of`), or a partition does not fit it.
    """

    def __init__(
        self,
        job: TrainingJob,
        cluster: Cluster,
        *,
        constants: Constants | None = None,
        fused_attention: bool = True,
        partitions: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.job, self.cluster = job, cluster
        self.constants = constants or constants_of(cluster.device)
        self.facts: ModelFacts = facts_of(job)
        self.power = PowerModel(cluster.device, self.constants)
        self._fused = fused_attention
        self._partitions = dict(partitions or {})
        fp32 = job.precision == "fp32"
        self._element = 4.0 if fp32 else 2.0
        # TF32 runs at half the bf16 rate (156 of 312 TFLOP/s on A100, 494 of 989 on H100: NVIDIA
        # data sheets); a CPU's stated peak is taken for what its job uses.
        halved = fp32 and cluster.device.type == "cuda"
        self._peak_flops = cluster.device.peak_flops / (2.0 if halved else 1.0)
        device = cluster.device
        self._top_MHz = float(max(device.clocks_MHz, default=device.default_clock_MHz or 1))
        self._default = (device.default_clock_MHz or self._top_MHz) / self._top_MHz

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Step time, power and memory; arrays of shape (len(configurations),).

        Raises:
            InvalidValue: a degree is not an integer.
        """
        layout = read_layout(configurations, self.job.global_batch)
        time, power, clock = (np.empty(len(configurations)) for _ in range(3))
        for group in self._groups(layout):
            clocks, slot, step = self._run(group)
            joules = self._joules(group, clocks, slot, step)
            time[group.members] = step
            power[group.members] = sum(joules.values()) / step
            clock[group.members] = clocks @ group.stages.count / group.stages.count.sum()
        device, host = self._memory(layout.launches)
        return Prediction(
            step_time_s=time,
            power_W=power,
            memory_bytes=device[layout.row],
            host_memory_bytes=host[layout.row],
            clock_MHz=clock * self._top_MHz,
        )

    def memory_bytes(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Peak bytes on the device of the fullest rank: states, activations, logits, buffers."""
        layout = read_layout(configurations, self.job.global_batch)
        return self._memory(layout.launches)[0][layout.row]

    def breakdown(self, configuration: Configuration) -> Breakdown:
        """Where one configuration's time, energy and memory go.

        Raises:
            InvalidValue: a degree is not an integer.
        """
        layout = read_layout([configuration], self.job.global_batch)
        (group,) = self._groups(layout)
        clocks, slot, step = self._run(group)
        return break_down(
            parts=group.parts,
            stages=group.stages,
            constants=self.constants,
            clocks=clocks,
            slot=slot,
            step_time_s=float(step[0]),
            joules={
                name: float(value[0])
                for name, value in self._joules(group, clocks, slot, step).items()
            },
            memory=self._memory_parts(layout.launches, self._stages(float(layout.launches.p[0]))),
            clock_MHz=float(clocks[0] @ group.stages.count / group.stages.count.sum())
            * self._top_MHz,
        )

    # -- the step ------------------------------------------------------------------------------

    def _stages(self, p: float) -> Stages:
        return cut(self.facts.layers, int(p), self._partitions.get(int(p)))

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
                parts = step_parts(
                    self.job,
                    self.facts,
                    self.cluster,
                    self.constants,
                    layout.launches[launches],
                    stages,
                    peak_flops=self._peak_flops,
                    element=self._element,
                    fused_attention=self._fused,
                )
                clock, limit = self._asked(layout, members, len(stages.count))
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
        """Memory clocks as shares of the one that the bandwidth is stated for, shape (n, 1).

        Memory's bandwidth goes with its clock. A device whose file does not say that clock is taken
        to run at it whatever is asked, and the surrogates learn the difference.
        """
        stated = self.cluster.device.memory_clock_MHz
        if not stated:
            return np.ones((len(clock_MHz), 1))
        return np.where(np.isnan(clock_MHz), 1.0, clock_MHz / stated)[:, None]

    def _asked(
        self, layout: Layout, members: np.ndarray, kinds: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Clocks (shares of the highest) and limits of each kind of stage."""
        device = self.cluster.device
        clock = np.repeat(layout.clock_MHz[members][:, None] / self._top_MHz, kinds, axis=1)
        limit = np.repeat(layout.limit_W[members][:, None], kinds, axis=1)
        for i, member in enumerate(members) if layout.stage_clocks_MHz else ():
            if int(member) in layout.stage_clocks_MHz:
                clock[i] = np.array(layout.stage_clocks_MHz[int(member)]) / self._top_MHz
        for i, member in enumerate(members) if layout.stage_limits_W else ():
            if int(member) in layout.stage_limits_W:
                limit[i] = layout.stage_limits_W[int(member)]
        clock = np.where(np.isnan(clock), self._default, clock)
        return clock, np.where(np.isnan(limit), device.max_W, limit)

    def _run(self, group: _Group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Clocks after the limit, slots at them (members, kinds), and the step (members,)."""
        parts, constants = group.parts, self.constants

        def power_at(flat: np.ndarray, clock: np.ndarray) -> np.ndarray:
            # A limit acts within milliseconds, so what counts is a slot's own power, not a step's.
            one = flat.reshape(-1, 1)
            row, kind = np.divmod(one[:, 0], group.clock.shape[1])
            here = _flat(parts, row, kind)
            slot = here.slot_s(clock, constants)
            busy = _busy_slot(here)
            return self.power.watts(busy, clock, np.maximum(slot, 1e-12))

        clock = capped_clock(power_at, group.clock, group.limit_W)
        slot = parts.slot_s(clock, constants)
        return clock, slot, parts.step_s(slot, group.stages, constants)

    def _joules(
        self, group: _Group, clock: np.ndarray, slot: np.ndarray, step: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Joules of the whole job in one step, by what draws them; each of shape (members,)."""
        parts, cluster = group.parts, self.cluster
        busy_slot = _busy_slot(parts)
        hidden_offload = np.minimum(parts.offload_behind, parts.m * slot)
        busy = Busy(
            arithmetic_s=parts.m * busy_slot.arithmetic_s,
            memory_s=parts.m * busy_slot.memory_s + parts.update,
            link_s=parts.m * busy_slot.link_s + parts.sync,
            host_link_s=parts.m * busy_slot.host_link_s
            + np.maximum(0.0, parts.offload + hidden_offload - parts.host_update),
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
        if cluster.device.type == "cpu":  # a CPU's counter is the whole package's
            joules["idle"] = joules["idle"] + (
                (nodes * cluster.devices_per_node - world) * cluster.device.idle_W * step
            )
        return joules

    # -- memory --------------------------------------------------------------------------------

    def _memory_parts(self, launches: Launches, stages: Stages) -> MemoryParts:
        return memory_parts(
            self.job,
            self.facts,
            self.constants,
            launches,
            stages,
            element=self._element,
            fused_attention=self._fused,
            devices_per_node=self.cluster.devices_per_node,
            on_cpu=self.cluster.device.type == "cpu",
        )

    def _memory(self, launches: Launches) -> tuple[np.ndarray, np.ndarray]:
        """Peak bytes on the device and on one host, one a launch."""
        device, host = np.empty(len(launches)), np.empty(len(launches))
        for p in np.unique(launches.p):
            rows = np.flatnonzero(launches.p == p)
            parts = self._memory_parts(launches[rows], self._stages(float(p)))
            device[rows], host[rows] = parts.device.max(axis=1), parts.host.max(axis=1)
        return device, host


def _flat(parts: StepParts, row: np.ndarray, kind: np.ndarray) -> StepParts:
    """Single (row, kind) entries of the parts, as flat arrays."""
    values = []
    for each in fields(parts):
        array = getattr(parts, each.name)
        values.append(array[row, 0] if array.shape[1] == 1 else array[row, kind])
    return StepParts(*values)


def _busy_slot(parts: StepParts) -> Busy:
    """What a micro-batch keeps busy on a device."""
    return Busy(
        arithmetic_s=parts.arithmetic,
        memory_s=parts.operands + parts.stream,
        link_s=parts.links,
        host_link_s=parts.host_now + parts.host_behind,
    )
