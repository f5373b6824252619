"""Energy of NVIDIA GPUs by NVML.

Where a card has the total-energy counter (found by trying it, not by the card's name), the counter
is the truth and sampled power only draws the timeline and checks it. Where it has none, or counts
more than the GPU (on a GH200 it counts the module), a thread samples power and integrates it, and
the meter says so in its source. A counter that runs backwards or stands still is an error, since
the joules it lost cannot be known. Energy at a window's edge is drawn from the updates that a
source shows while its device is idle (`Settling`).
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from tuner.workload.node.meters.base import (
    LAG_S,
    MeterError,
    Reading,
    Ticker,
    each_device,
    over_devices,
)
from tuner.workload.node.meters.gpus import (
    Gpu,
    NoEnergy,
    clock_state,
    on_twin,
    open_nvml,
    query,
    visible_gpus,
)
from tuner.workload.records.probe import MeterInfo, PowerSample

#: A counter that has not moved for so long is broken: it updates every 20 to 100 ms
#: (ML.ENERGY blog; arXiv 2312.02741), and no GPU draws nothing. Power that was not sampled for so
#: long leaves joules unknown just the same.
SILENT_S = 2.0
#: Least length of a span whose slope is taken: an update period of the slowest counters.
SPAN_S = 0.1
#: Slopes that differ by less are the same: at 70 W idle, an error of 2 W over half a second.
ALIKE = 0.05
#: By now a source that lags has counted the work's last joules: filters and updates of NVML's
#: counters take up to 0.1 s each.
UPDATE_LAG_S = 0.2


#: A counter is watched this often for its next update, and power without a counter is sampled so
#: often meanwhile.
POLL_S, SAMPLE_S = 0.001, 0.01
#: At a window's edge the counter is watched at most this long: a 1 s average takes a second.
SETTLE_MAX_S = 1.5


class EnergySource(Protocol):
    """Source of joules since it was opened."""

    def energy_J(self, now_s: float) -> float:
        """Return the joules now."""


class LostJoules(MeterError):
    """Loss of joules: no later difference of readings would be right."""


class Integral:
    """Joules since construction, by integrating sampled power."""

    def __init__(self, power_W: Callable[[], float], now_s: float) -> None:
        self._power_W = power_W
        self._total_J = 0.0
        self._last = (now_s, power_W())

    def energy_J(self, now_s: float) -> float:
        """Add the energy since the last sample; LostJoules if that is over `SILENT_S` ago."""
        last_s, last_W = self._last
        power_W = self._power_W()
        if now_s - last_s > SILENT_S:
            raise LostJoules(f"the GPU's power was not sampled for {now_s - last_s:.1f} s")
        self._total_J += max(0.0, now_s - last_s) * (last_W + power_W) / 2
        self._last = (max(now_s, last_s), power_W)
        return self._total_J


class Settling:
    """Updates of one source's energy after the ranks have begun to wait.

    Power sensors and energy counters of GPUs see power through a filter and publish it late (A100
    and H100 sample a quarter of each 100 ms: arXiv 2312.02741). Right after work has ended, the
    last joules of the work are not counted yet, and the instant power still shows it. So the source
    is watched until two successive spans have the same slope. That slope is the idle power as this
    very source counts it, and the line through the last update, drawn back to the edge, is the
    energy there. What the source still holds back is the same at both edges of a window and
    cancels.

    A device with power smoothing draws on after the work has ended, and its power falls at a set
    rate (NVML API, Power Smoothing). Where it `smooths`, the line is that of the first span after
    `UPDATE_LAG_S` if its slope is above the last one.
    """

    def __init__(self, *, smooths: bool = False) -> None:
        self._smooths = smooths
        self._updates: list[tuple[float, float]] = []

    def add(self, time_s: float, energy_J: float) -> None:
        """Record that the source was at this energy at this time."""
        self._updates.append((time_s, energy_J))

    def _slope_W(self, last: int) -> tuple[float, int] | None:
        # Of the shortest span that ends at update `last`, and the span's first update.
        last_s, last_J = self._updates[last]
        for first in range(last - 1, -1, -1):
            time_s, energy_J = self._updates[first]
            if last_s - time_s >= SPAN_S - 1e-3:
                return (last_J - energy_J) / (last_s - time_s), first
        return None

    @property
    def settled(self) -> bool:
        """True if the last two spans have the same slope."""
        late = self._slope_W(len(self._updates) - 1) if self._updates else None
        early = self._slope_W(late[1]) if late is not None else None
        if late is None or early is None:
            return False
        return abs(late[0] - early[0]) <= ALIKE * max(abs(late[0]), abs(early[0]))

    def energy_J(self, at_s: float) -> float | None:
        """Return the energy at a time of this wait; None if the source was not updated twice."""
        if len(self._updates) < 2:
            return None
        if self._smooths and (fall := self._fall(at_s)) is not None:
            number, early_W, _ = fall
            time_s, energy_J = self._updates[number]
            return energy_J + early_W * (at_s - time_s)
        return self._drawn_J(at_s)

    def _drawn_J(self, at_s: float) -> float:
        last_s, last_J = self._updates[-1]
        late = self._slope_W(len(self._updates) - 1)
        first_s, first_J = self._updates[0]
        slope_W = late[0] if late is not None else (last_J - first_J) / (last_s - first_s)
        return last_J + slope_W * (at_s - last_s)

    def _fall(self, at_s: float) -> tuple[int, float, float] | None:
        # The first update after the lag, the slope of the span that begins there, and the last
        # slope; None unless the power still fell from the one to the other.
        late = self._slope_W(len(self._updates) - 1)
        numbers = range(len(self._updates))
        first = next((i for i in numbers if self._updates[i][0] >= at_s + UPDATE_LAG_S), None)
        if late is None or first is None:
            return None
        first_s, first_J = self._updates[first]
        for time_s, energy_J in self._updates[first + 1 :]:
            if time_s - first_s >= SPAN_S - 1e-3:
                early_W = (energy_J - first_J) / (time_s - first_s)
                falls = early_W - late[0] > 2 * ALIKE * abs(late[0])
                return (first, early_W, late[0]) if falls else None
        return None

    def doubt_J(self, at_s: float, seen_J: float) -> float:
        """Return the joules by which the energy at a time may be wrong.

        They are what a fall of the power would have added since then. Where the device smooths its
        power, a fast fall looks like the source's own lag, so all that came late is in doubt.

        Args:
            seen_J: the source's energy at that time, which lags.
        """
        if len(self._updates) < 2:
            return 0.0
        if self._smooths:
            return max(0.0, self._drawn_J(at_s) - seen_J)
        if (fall := self._fall(at_s)) is None:
            return 0.0
        return (fall[1] - fall[2]) * (self._updates[-1][0] - at_s)


class Edge:
    """The energy of one source at a window's edge, watched while its GPU is idle."""

    def __init__(
        self, source: EnergySource, now_s: float, *, counts: bool, smooths: bool = False
    ) -> None:
        self._source, self._settling = source, Settling(smooths=smooths)
        self._counts = counts
        self._first_J = self._last_J = source.energy_J(now_s)
        self._polled_s = now_s
        if not self._counts:
            self._settling.add(now_s, self._last_J)

    def poll(self, clock: Callable[[], float]) -> bool:
        """Look for an update; return True if the source counts the idle power alone."""
        now_s = clock()
        if self._counts:
            value_J = self._source.energy_J(now_s)
            if value_J != self._last_J:  # it was updated between the two looks
                self._settling.add((self._polled_s + now_s) / 2, value_J)
            self._last_J, self._polled_s = value_J, now_s
        elif now_s - self._polled_s >= SAMPLE_S:
            self._last_J, self._polled_s = self._source.energy_J(now_s), now_s
            self._settling.add(now_s, self._last_J)
        return self._settling.settled

    def energy_J(self, at_s: float) -> float:
        """Return the energy at a time; the value when watching began if it never changed."""
        value_J = self._settling.energy_J(at_s)
        return self._first_J if value_J is None else value_J

    def doubt_J(self, called_s: float) -> float:
        """Return the joules that power which still falls may have added since a time."""
        return self._settling.doubt_J(called_s, self._first_J)


class WatchedMeter:
    """Base of the meters whose sources are watched at a window's edge; a subclass has `read`.

    Lost joules break the meter for good.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock, self._sleep = clock, sleep
        self._lock, self._broken = threading.Lock(), ""

    def read(self) -> Reading:
        """Return the joules since the meter was opened."""
        raise NotImplementedError

    def _integrate(self) -> None:
        # The next reader meets the error.
        with contextlib.suppress(MeterError):
            self.read()

    def _check(self) -> None:
        if self._broken:
            raise MeterError(self._broken)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            self._check()
            try:
                yield
            except LostJoules as error:
                self._broken = str(error)
                raise

    def _at_edge(self, edges: Sequence[Edge], called_s: float, *, opens: bool) -> Reading:
        # Watch the sources, while their devices are idle, until each counts the idle power alone.
        waiting, tries = list(edges), round(SETTLE_MAX_S / POLL_S)
        while waiting and tries > 0 and self._clock() - called_s < SETTLE_MAX_S:
            self._sleep(POLL_S)
            tries -= 1
            waiting = [edge for edge in waiting if not edge.poll(self._clock)]
        edge_s = self._clock() if opens else called_s
        energy_J = math.fsum(edge.energy_J(edge_s) for edge in edges)
        return Reading(edge_s, energy_J, math.fsum(edge.doubt_J(called_s) for edge in edges))


#: Counters of older drivers hold 32 bits of millijoules, 3.6 h at 330 W; a step back that this
#: explains at no more than a power that no GPU draws is a wrap.
WRAP_MJ, MOST_W = 2**32, 3000.0
#: The update period is looked for at most this long.
POLL_MAX_S = 0.5
#: The update period of the slowest counters (ML.ENERGY blog).
USUAL_PERIOD_S = 0.1
#: How long a counter is compared with the GPU's and the module's power where NVML offers both.
TRIAL_S = 0.5
#: Superchips with two GPUs to a processor (NVIDIA GB200 and GB300 data sheets).
TWO_ON_A_MODULE = re.compile(r"\bGB[23]00\b")
#: NVML averages power over so long where it does not tell the instant one (Ampere and later).
AVERAGED_S = 1.0
#: An answer that fails once in some thousand calls is asked for again after this: NVML's "unknown
#: error", "timeout" and "in use" (Azure's azhpc-diagnostics 77). A lost GPU is another error.
AGAIN_S = 0.01
TRANSIENT = ("NVML_ERROR_UNKNOWN", "NVML_ERROR_TIMEOUT", "NVML_ERROR_IN_USE")


def queried_again(nvml: Any, question: Callable[[], Any], sleep: Callable[[float], None]) -> Any:
    """Return the answer to a question that NVML may fail to answer once."""
    try:
        return question()
    except nvml.NVMLError as error:
        if error.value not in [getattr(nvml, name, None) for name in TRANSIENT]:
            raise
    sleep(AGAIN_S)
    return question()


class _Counter:
    """Joules since opening by one GPU's total-energy counter, which counts millijoules."""

    def __init__(self, gpu: Gpu, now_s: float, sleep: Callable[[float], None]) -> None:
        self._gpu, self._sleep = gpu, sleep
        self._start_mJ = self._last_mJ = self._read_mJ()
        self._moved_s = self._read_s = now_s  # when the last value was first seen, and last read

    def _read_mJ(self) -> int:
        question = partial(self._gpu.get, "TotalEnergyConsumption")
        return int(queried_again(self._gpu.nvml, question, self._sleep))

    def energy_J(self, now_s: float) -> float:
        value_mJ = self._read_mJ()
        counter = f"the energy counter of GPU {self._gpu.index} ({self._gpu.uuid})"
        if value_mJ < self._last_mJ:
            over_mJ = value_mJ + WRAP_MJ - self._last_mJ
            if not 0 <= over_mJ <= 1000 * MOST_W * (now_s - self._read_s + USUAL_PERIOD_S):
                raise LostJoules(
                    f"{counter} went backwards, from {self._last_mJ} to {value_mJ} mJ: the driver "
                    "was reloaded, and what was drawn meanwhile is not known"
                )
            self._start_mJ -= WRAP_MJ
        self._read_s = now_s
        if value_mJ != self._last_mJ:
            self._last_mJ, self._moved_s = value_mJ, now_s
        elif now_s - self._moved_s > SILENT_S:
            raise LostJoules(f"{counter} has not moved for {now_s - self._moved_s:.1f} s")
        return (value_mJ - self._start_mJ) / 1000


def _module_W(gpu: Gpu) -> float:
    return gpu.field_W("NVML_POWER_SCOPE_MODULE")


class NvmlMeter(WatchedMeter):
    """Energy and power of the visible GPUs, scope "gpu", or "module" if NVML has no other.

    MeterError if NVML does not start, no GPU is visible, or one tells neither energy nor power;
    InputError if CUDA_VISIBLE_DEVICES misnames one.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        sample_period_s: float = 0.05,
    ) -> None:
        self._nvml = open_nvml()
        super().__init__(clock, sleep)
        self._sample_period_s, self._closed = sample_period_s, False
        self._ticker: Ticker | None = None
        self._period_s: float | None = None
        self._averaged: set[str] = set()  # GPUs that tell a 1 s average only
        try:
            self.gpus = visible_gpus(self._nvml, environ=environ)
            if not self.gpus:
                raise MeterError("NVML runs, but no GPU is visible to this process")
            if self.gpus[0].whole:
                raise NoEnergy(f"{self.gpus[0].name}, a MIG slice, shares its GPU's meter")
            self._powers = {gpu.uuid: self._find_power(gpu) for gpu in self.gpus}
            self._sources = [self._find_source(gpu) for gpu in self.gpus]
            self._smooth = [gpu.smooths_power for gpu in self.gpus]
            self._modules = any(self._is_module_meter(gpu) for gpu in self.gpus)
            if self._modules and any(TWO_ON_A_MODULE.search(gpu.name) for gpu in self.gpus):
                raise NoEnergy(
                    f"{self.gpus[0].name} tells the power of its module only, and two GPUs share "
                    "a module, so that their sum would count it twice; update the driver"
                )
        except BaseException:
            self._nvml.nvmlShutdown()
            raise
        sampled = sum(isinstance(source, Integral) for source in self._sources)
        self.info = MeterInfo(
            name="nvml",
            scope="module" if self._modules else "gpu",
            source=self._describe(sampled, sample_period_s),
            host="the superchips' modules: this driver does not tell the GPUs from their processors"
            if self._modules
            else "none of the host: the GPUs' boards alone, idle ones of the lease included",
            independent=sampled < len(self.gpus)
            and all(power is not None for power in self._powers.values()),
            twin=on_twin(),
            tells_clocks=True,
        )
        if sampled:
            self._ticker = Ticker(
                self._integrate, period_s=sample_period_s, name="joulefront-nvml-power"
            )

    def _describe(self, sampled: int, period_s: float) -> str:
        counted = len(self.gpus) - sampled
        of = "twin GPU" if on_twin() else "GPU"
        by_counter = f"NVML total-energy counter of {counted} {of}{'s' if counted > 1 else ''}"
        by_power = (
            f"NVML power of {sampled} {of}{'s' if sampled > 1 else ''} without a counter, "
            f"integrated every {period_s * 1000:.0f} ms"
        )
        return ", and ".join([by_counter] * bool(counted) + [by_power] * bool(sampled))

    def _find_power(self, gpu: Gpu) -> Callable[[], float] | None:
        def averaged_W() -> float:
            return float(gpu.get("PowerUsage")) / 1000

        for power_W in (gpu.field_W, averaged_W):
            if query(gpu.nvml, 0.0, power_W) > 0:  # a binding may answer 0 for "not supported"
                if power_W is averaged_W:
                    self._averaged.add(gpu.uuid)
                return partial(queried_again, gpu.nvml, power_W, self._sleep)
        return None

    def _find_source(self, gpu: Gpu) -> _Counter | Integral:
        power_W = self._powers[gpu.uuid]
        try:
            counter = _Counter(gpu, self._clock(), self._sleep)
            if power_W is None or not self._counts_the_module(gpu, power_W):
                return counter
        except (self._nvml.NVMLError, AttributeError) as error:
            if power_W is None:
                raise NoEnergy(
                    f"GPU {gpu.index} ({gpu.name}) tells neither its energy nor its power: {error}"
                ) from error
        return Integral(power_W, self._clock())

    def _is_module_meter(self, gpu: Gpu) -> bool:
        # As with some Grace Hopper drivers (Zeus, `nvidia.py:_resolve_power_field_scope`).
        return (
            query(gpu.nvml, 0.0, gpu.field_W) <= 0 < query(gpu.nvml, 0.0, partial(_module_W, gpu))
        )

    def _counts_the_module(self, gpu: Gpu, power_W: Callable[[], float]) -> bool:
        # Found by watching the counter, only where NVML tells a power of the superchip's module
        # that differs from the GPU's (GH200; Zeus PR 172).
        module_W = partial(_module_W, gpu)
        reported_W = query(gpu.nvml, 0.0, module_W)
        if not reported_W or reported_W < 1.05 * power_W():
            return False
        counter = _Counter(gpu, self._clock(), self._sleep)
        gpu_J, module_J = Integral(power_W, self._clock()), Integral(module_W, self._clock())
        began_s = self._clock()
        polls = max(1, round(TRIAL_S / USUAL_PERIOD_S))
        for _ in range(polls):
            self._sleep(TRIAL_S / polls)
            counted, now_s = counter.energy_J(self._clock()), self._clock()
            alone, whole = gpu_J.energy_J(now_s), module_J.energy_J(now_s)
        return now_s > began_s and abs(counted - whole) < abs(counted - alone)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with super()._reading():
            try:
                yield
            except self._nvml.NVMLError as error:
                raise MeterError(f"NVML does not tell the GPUs' energy: {error}") from error

    def read(self) -> Reading:
        """Return the joules of all GPUs since the meter was opened, or raise MeterError.

        Where joules were lost (a counter that ran backwards or stood still, power not sampled for
        2 s) the meter stays broken, for no later difference would be right.
        """
        with self._reading():
            before_s = self._clock()
            energy_J = math.fsum(source.energy_J(self._clock()) for source in self._sources)
            return Reading((before_s + self._clock()) / 2, energy_J)

    def boundary(self, *, opens: bool) -> Reading:
        """Return the joules at a window's edge, finer than the counter's steps.

        The counter shows its value of the last update, up to a period ago, and lags behind. This
        waits, while the GPUs are idle, until it counts the idle power alone
        (`Settling`), and charges the wait on neither side: an opening reading
        tells the energy when the call returns, a closing one when it was called.
        """
        with self._reading():
            called_s = self._clock()
            edges = [
                Edge(
                    source,
                    self._clock(),
                    counts=isinstance(source, _Counter),
                    smooths=smooths,
                )
                for source, smooths in zip(self._sources, self._smooth, strict=True)
            ]
            reading = self._at_edge(edges, called_s, opens=opens)
            return replace(reading, lag_s=AVERAGED_S + LAG_S) if self._averaged else reading

    @property
    def resolution_s(self) -> float:
        """Update period of the counter, measured once; without one, that of the power samples."""
        if self._period_s is None:
            with self._reading():
                self._period_s = max(
                    self._watch(source)
                    if isinstance(source, _Counter)
                    else (AVERAGED_S if gpu.uuid in self._averaged else self._sample_period_s)
                    for gpu, source in zip(self.gpus, self._sources, strict=True)
                )
        return self._period_s

    def _watch(self, counter: _Counter) -> float:
        # The seconds between two updates; 0.5 s if it is not faster.
        began_s = now_s = self._clock()
        value_J, updates = counter.energy_J(now_s), list[float]()
        tries = round(POLL_MAX_S / POLL_S)
        while len(updates) < 3 and tries > 0 and now_s - began_s < POLL_MAX_S:
            self._sleep(POLL_S)
            tries -= 1
            now_s = self._clock()
            if (newer_J := counter.energy_J(now_s)) != value_J:
                value_J = newer_J
                updates.append(now_s)
        if len(updates) < 2:
            return POLL_MAX_S
        return (updates[-1] - updates[0]) / (len(updates) - 1)

    def sample(self) -> PowerSample:
        """Return the power of all GPUs, with clocks, temperature, utilisation and throttling.

        `extra` holds the means over the GPUs of `clock_state` and, of several GPUs, each one's
        "gpu0_power_W", "gpu0_clock_MHz", ... in the order in which CUDA numbers them.
        """
        self._check()
        now_s, powers = self._clock(), list[float]()
        for gpu in self.gpus:
            read_W = self._powers[gpu.uuid]
            if read_W is None:
                raise MeterError(f"GPU {gpu.index} ({gpu.name}) does not tell its power")
            try:
                powers.append(read_W())
            except self._nvml.NVMLError as error:
                raise MeterError(f"NVML does not tell the GPUs' power: {error}") from error
        states = [clock_state(gpu) for gpu in self.gpus]
        extra = over_devices(states) | each_device(
            [{"power_W": power, **state} for power, state in zip(powers, states, strict=True)]
        )
        return PowerSample(now_s, math.fsum(powers), extra)

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
        with self._lock:
            closed, self._closed, self._broken = self._closed, True, "the NVML meter is closed"
        if not closed:
            query(self._nvml, None, self._nvml.nvmlShutdown)
