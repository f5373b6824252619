"""Energy of NVIDIA GPUs by NVML.

Where a card has the total-energy counter (found by trying it, not by the card's name), the counter
is the truth and sampled power only draws the timeline and checks it. Where it has none, or counts
more than the GPU (on a GH200 it counts the module), a thread samples power and integrates it, and
the meter says so in its source. A counter that runs backwards or stands still is an error, since
the joules it lost cannot be known.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tuner.workload.node.meters.base import LAG_S, MeterError, Reading, each_device, over_devices
from tuner.workload.node.meters.gpus import (
    Gpu,
    clock_state,
    on_twin,
    open_nvml,
    query,
    visible_gpus,
)
from tuner.workload.node.meters.settling import (
    POLL_S,
    SILENT_S,
    Edge,
    Integral,
    LostJoules,
    WatchedMeter,
)
from tuner.workload.node.meters.time_meter import NoEnergy
from tuner.workload.node.meters.timeline import Ticker
from tuner.workload.records.probe import MeterInfo, PowerSample

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
