"""Energy of NVIDIA GPUs by NVML.

Where a card has the total-energy counter (found by trying it, not by the card's name), the counter
is the truth and sampled power only draws the timeline. Where it has none, a thread samples power
and integrates it, and the meter says so in its source. A counter that runs backwards or stands
still is an error, since the joules it lost cannot be known.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workload.meters.base import PowerSample, Reading
from workload.meters.errors import MeterError
from workload.meters.gpus import Gpu, ask, clock_state, open_nvml, over_devices, visible_gpus
from workload.meters.ticker import Ticker
from workload.probe import MeterInfo

__all__ = ["NvmlMeter"]

#: A counter that has not moved for so long is broken: it updates every 20 to 100 ms
#: (ML.ENERGY blog; arXiv 2312.02741), and no GPU draws nothing. Power that was not sampled for so
#: long leaves joules unknown just the same.
SILENT_S = 2.0


class _LostJoules(MeterError):
    """What was drawn cannot be known any more: no later difference of readings would be right."""


class _Counter:
    """Joules since opening by one GPU's total-energy counter, which counts millijoules."""

    def __init__(self, nvml: Any, gpu: Gpu, now_s: float) -> None:
        self._nvml, self._gpu = nvml, gpu
        self._start_mJ = self._last_mJ = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle)
        self._moved_s = now_s  # when the last value was first seen

    def energy_J(self, now_s: float) -> float:
        value_mJ = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu.handle)
        which = f"the energy counter of GPU {self._gpu.index} ({self._gpu.uuid})"
        if value_mJ < self._last_mJ:
            raise _LostJoules(
                f"{which} went backwards, from {self._last_mJ} to {value_mJ} mJ: the driver was "
                "reloaded or the counter wrapped, and what was drawn meanwhile is not known"
            )
        if value_mJ > self._last_mJ:
            self._last_mJ, self._moved_s = value_mJ, now_s
        elif now_s - self._moved_s > SILENT_S:
            raise _LostJoules(f"{which} has not moved for {now_s - self._moved_s:.1f} s")
        return (value_mJ - self._start_mJ) / 1000


class _Integral:
    """Joules since opening by integrating sampled power (trapezoids between the samples)."""

    def __init__(self, power_W: Callable[[], float], now_s: float) -> None:
        self._power_W = power_W
        self._total_J = 0.0
        self._last = (now_s, power_W())

    def energy_J(self, now_s: float) -> float:
        last_s, last_W = self._last
        power_W = self._power_W()
        if now_s - last_s > SILENT_S:
            raise _LostJoules(f"the GPU's power was not sampled for {now_s - last_s:.1f} s")
        self._total_J += max(0.0, now_s - last_s) * (last_W + power_W) / 2
        self._last = (max(now_s, last_s), power_W)
        return self._total_J


class NvmlMeter:
    """Energy and power of the visible GPUs together; scope "gpu".

    Args:
        devices: indices, UUIDs or prefixes of UUIDs; None takes CUDA_VISIBLE_DEVICES.
        nvml: the pynvml module, or what stands in for it; None imports pynvml.
        clock: monotonic seconds.
        environ: where CUDA_VISIBLE_DEVICES stands; the process's environment by default.
        sample_period_s: how often power is sampled on GPUs without a counter.

    Attributes:
        info: name "nvml", scope "gpu", and whether a counter or integrated power is the source.
        gpus: the GPUs it meters.

    Raises:
        MeterError: NVML does not start, no GPU is visible, or one offers neither energy nor power.
        InputError: the devices cannot be metered as named (`workload.meters.gpus`).
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] | None = None,
        sample_period_s: float = 0.05,
    ) -> None:
        self._nvml = open_nvml(nvml)
        self._clock = clock
        self._lock = threading.Lock()
        self._broken = ""
        self._closed = False
        self._ticker: Ticker | None = None
        try:
            self.gpus = visible_gpus(self._nvml, devices=devices, environ=environ)
            if not self.gpus:
                raise MeterError("NVML runs, but no GPU is visible to this process")
            self._powers = {gpu.uuid: self._find_power(gpu) for gpu in self.gpus}
            self._sources = [self._find_source(gpu) for gpu in self.gpus]
        except BaseException:
            self._nvml.nvmlShutdown()
            raise
        sampled = sum(isinstance(source, _Integral) for source in self._sources)
        self.info = MeterInfo(
            name="nvml", scope="gpu", source=self._describe(sampled, sample_period_s)
        )
        if sampled:
            self._ticker = Ticker(
                self._integrate, period_s=sample_period_s, name="joulefront-nvml-power"
            )

    def _describe(self, sampled: int, period_s: float) -> str:
        counted = len(self.gpus) - sampled
        by_counter = f"NVML total-energy counter of {counted} GPU{'s' if counted > 1 else ''}"
        by_power = (
            f"NVML power of {sampled} GPU{'s' if sampled > 1 else ''} without a counter, "
            f"integrated every {period_s * 1000:.0f} ms"
        )
        return ", and ".join([by_counter] * bool(counted) + [by_power] * bool(sampled))

    def _find_power(self, gpu: Gpu) -> Callable[[], float] | None:
        """Instant power where offered (the plain call is a 1 s average from Ampere on), watts."""
        nvml = self._nvml

        def instant_W() -> float:
            field = nvml.nvmlDeviceGetFieldValues(gpu.handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if field.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(field.nvmlReturn)
            return field.value.uiVal / 1000

        def averaged_W() -> float:
            return nvml.nvmlDeviceGetPowerUsage(gpu.handle) / 1000

        for power_W in (instant_W, averaged_W):
            if ask(nvml, 0.0, power_W) > 0:  # a binding may answer 0 for "not supported"
                return power_W
        return None

    def _find_source(self, gpu: Gpu) -> _Counter | _Integral:
        try:
            return _Counter(self._nvml, gpu, self._clock())
        except (self._nvml.NVMLError, AttributeError) as error:
            power_W = self._powers[gpu.uuid]
            if power_W is None:
                raise MeterError(
                    f"GPU {gpu.index} ({gpu.name}) tells neither its energy nor its power: {error}"
                ) from error
            return _Integral(power_W, self._clock())

    def _integrate(self) -> None:
        # What cannot be read now, or is lost for good, the next reader is told.
        with contextlib.suppress(MeterError):
            self.read()

    def _check(self) -> None:
        if self._broken:
            raise MeterError(self._broken)

    def read(self) -> Reading:
        """Joules of all GPUs since the meter was opened.

        Raises:
            MeterError: a GPU does not answer. Where joules were lost (a counter that ran backwards
                or stood still, power not sampled for 2 s) the meter stays broken, for no later
                difference would be right; open a new one.
        """
        with self._lock:
            self._check()
            before_s = self._clock()
            try:
                energy_J = math.fsum(source.energy_J(self._clock()) for source in self._sources)
            except _LostJoules as error:
                self._broken = str(error)
                raise
            except self._nvml.NVMLError as error:
                raise MeterError(f"NVML does not tell the GPUs' energy: {error}") from error
            return Reading((before_s + self._clock()) / 2, energy_J)

    def sample(self) -> PowerSample:
        """Power of all GPUs now, with clocks, temperature, utilisation and throttling.

        Raises:
            MeterError: a GPU does not answer.
        """
        self._check()
        now_s, power_W = self._clock(), 0.0
        for gpu in self.gpus:
            read_W = self._powers[gpu.uuid]
            if read_W is None:
                raise MeterError(f"GPU {gpu.index} ({gpu.name}) does not tell its power")
            try:
                power_W += read_W()
            except self._nvml.NVMLError as error:
                raise MeterError(f"NVML does not tell the GPUs' power: {error}") from error
        states = [clock_state(self._nvml, gpu) for gpu in self.gpus]
        return PowerSample(now_s, power_W, over_devices(states))

    def close(self) -> None:
        """Stop sampling and let NVML go. May be called twice; reading afterwards is an error."""
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
        with self._lock:
            closed, self._closed, self._broken = self._closed, True, "the NVML meter is closed"
        if not closed:
            ask(self._nvml, None, self._nvml.nvmlShutdown)
