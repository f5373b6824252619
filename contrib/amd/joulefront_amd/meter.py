"""Energy and power of AMD's GPUs, queried through amdsmi (releases 6.3 to 7).

Energy is that of the GPUs' accumulators, or integrated power where an accumulator does not follow
the power (MI100) or does not exist (virtual machines). Names and units of answers: amdsmi's Python
interface, `amdsmi_interface.py` and `amdsmi.h`; powers in W, caps in uW, memory in MB. No GPU has
been measured with it yet.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.node.meters.base import (
    MeterError,
    NoDriver,
    Reading,
    Ticker,
    each_device,
    over_devices,
)
from tuner.workload.node.meters.nvml import (
    SILENT_S,
    Edge,
    Integral,
    LostJoules,
    WatchedMeter,
)
from tuner.workload.records.probe import MeterInfo, PowerSample

#: Variables that hide GPUs, the outer one first; HIP takes the third in place of the second (ROCm,
#: "GPU isolation techniques").
OUTER, INNER = "ROCR_VISIBLE_DEVICES", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
#: An accumulator is compared with sampled power for this long, and must agree to this share.
TRIAL_S, TRIAL_POLL_S, TRIAL_ERROR = 0.5, 0.02, 0.25


def as_number(value: Any) -> float | None:
    """Return a value of amdsmi; None for "N/A"."""
    return None if value == "N/A" or value is None else float(value)


@dataclass(frozen=True)
class AmdGpu:
    """One visible GPU: its index among all, its processor handle, and amdsmi."""

    index: int
    handle: Any
    smi: Any

    def get(self, query_name: str, *arguments: Any) -> Any:
        """Return a figure of amdsmi; MeterError if there is none."""
        try:
            return getattr(self.smi, f"amdsmi_get_{query_name}")(self.handle, *arguments)
        except self.smi.AmdSmiException as error:
            reason = " ".join(str(error).split())
            raise MeterError(f"GPU {self.index} does not tell {query_name}: {reason}") from error

    def query(self, default: Any, query_name: str, *arguments: Any) -> Any:
        """Return the answer, or a default if there is none."""
        try:
            return self.get(query_name, *arguments)
        except (MeterError, AttributeError):
            return default

    @property
    def uuid(self) -> str:
        """HIP's UUID, by which variables may name the GPU; else amdsmi's."""
        reply = self.query({}, "gpu_enumeration_info").get("hip_uuid", "")
        return str(reply or self.query("", "gpu_device_uuid"))

    @property
    def name(self) -> str:
        return str(self.query({}, "gpu_asic_info").get("market_name", "AMD GPU"))

    @property
    def memory_bytes(self) -> int:
        return int(self.get("gpu_vram_usage")["vram_total"]) * 2**20

    def power_W(self) -> float:
        """Return the socket's power: current where available (MI300), else average (MI200)."""
        reply = self.get("power_info")
        for key in ("current_socket_power", "average_socket_power", "socket_power"):
            if power_W := as_number(reply.get(key)):
                return power_W
        raise MeterError(f"GPU {self.index} ({self.name}) does not tell its power")

    def energy_J(self) -> float:
        """Return the accumulator's value."""
        reply = self.get("energy_count")
        return float(reply["energy_accumulator"]) * float(reply["counter_resolution"]) / 1e6

    def state(self) -> dict[str, float]:
        """Return the available ones of clocks, temperature, utilisation and throttling."""
        smi = self.smi
        hit = self.query({}, "violation_status")
        found = {
            "clock_MHz": self.query({}, "clock_info", smi.AmdSmiClkType.GFX).get("clk"),
            "memory_clock_MHz": self.query({}, "clock_info", smi.AmdSmiClkType.MEM).get("clk"),
            "temperature_C": self.query(
                None,
                "temp_metric",
                smi.AmdSmiTemperatureType.HOTSPOT,
                smi.AmdSmiTemperatureMetric.CURRENT,
            ),
            "throttle_power": float(hit.get("active_ppt_pwr") is True),
            "throttle_thermal": float(hit.get("active_socket_thrm") is True),
        }
        busy = as_number(self.query({}, "gpu_activity").get("gfx_activity"))
        found["utilisation"] = None if busy is None else busy / 100
        numbers = {name: as_number(value) for name, value in found.items()}
        return {name: value for name, value in numbers.items() if value is not None}


@contextlib.contextmanager
def opened(environ: Mapping[str, str]) -> Iterator[list[AmdGpu]]:
    """Start amdsmi and yield the visible GPUs in HIP's order.

    Raises:
        NoDriver: amdsmi is not installed, or does not start.
        InputError: a variable names a GPU that does not exist.
    """
    try:
        import amdsmi
    except (ImportError, KeyError, OSError, AttributeError) as error:
        # KeyError: the package without ROCm's library.
        raise NoDriver(f"amdsmi cannot be imported: {error!r}") from error
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as error:
        raise NoDriver(f"amdsmi does not start: {' '.join(str(error).split())}") from error
    try:
        try:
            handles = amdsmi.amdsmi_get_processor_handles()
        except amdsmi.AmdSmiException as error:
            raise NoDriver(f"amdsmi lists no GPU: {' '.join(str(error).split())}") from error
        gpus = [AmdGpu(index, handle, amdsmi) for index, handle in enumerate(handles)]
        # HIP's order, in which ranks number them; releases before 6.4 do not tell it.
        order = {
            gpu.index: as_number(gpu.query({}, "gpu_enumeration_info").get("hip_id"))
            for gpu in gpus
        }
        gpus.sort(key=lambda gpu: math.inf if (n := order[gpu.index]) is None else n)
        yield visible(gpus, environ)
    finally:
        with contextlib.suppress(amdsmi.AmdSmiException):
            amdsmi.amdsmi_shut_down()


def visible(gpus: list[AmdGpu], environ: Mapping[str, str]) -> list[AmdGpu]:
    """Return the GPUs that HIP shows to a process with these variables; else InputError."""
    inner = {environ[name] for name in INNER if name in environ}
    if len(inner) > 1:
        raise InputError(f"{' and '.join(INNER)} name different GPUs; set one of them")
    for name, value in ((OUTER, environ.get(OUTER)), (INNER[0], next(iter(inner), None))):
        if value is None:
            continue
        chosen = []
        for word in filter(None, map(str.strip, value.split(","))):
            if word == "-1":  # which ends the list
                break
            found = [gpu for at, gpu in enumerate(gpus) if word in (str(at), gpu.uuid)]
            if not found or found[0] in chosen:
                raise InputError(
                    f"{name}={value}: {word!r} is not the number or UUID of one of {len(gpus)} "
                    "GPUs, or stands there twice"
                )
            chosen.append(found[0])
        gpus = chosen
    return gpus


class _Accumulator:
    """Joules since construction by one GPU's energy accumulator."""

    def __init__(self, gpu: AmdGpu, now_s: float) -> None:
        self._gpu = gpu
        self._start_J = self._last_J = gpu.energy_J()
        self._moved_s = now_s

    def energy_J(self, now_s: float) -> float:
        value_J = self._gpu.energy_J()
        counter_name = f"the energy accumulator of GPU {self._gpu.index}"
        if value_J < self._last_J:
            raise LostJoules(f"{counter_name} went backwards: the driver was reloaded")
        if value_J > self._last_J:
            self._last_J, self._moved_s = value_J, now_s
        elif now_s - self._moved_s > SILENT_S:
            raise LostJoules(f"{counter_name} has not moved for {now_s - self._moved_s:.1f} s")
        return value_J - self._start_J


class AmdMeter(WatchedMeter):
    """Energy and power of the visible GPUs, scope "gpu".

    MeterError if amdsmi does not start, no GPU is visible, or one tells no power: of an MI250X's
    two chiplets one tells the power of both, which is not divided here.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        sample_period_s: float = 0.05,
    ) -> None:
        super().__init__(clock, sleep)
        self._stack = contextlib.ExitStack()
        self._ticker: Ticker | None = None
        with contextlib.ExitStack() as until_open:
            self.gpus = until_open.enter_context(opened(environ))
            if not self.gpus:
                raise MeterError("amdsmi runs, but no GPU is visible to this process")
            self._sources = self._found_sources()
            self._stack = until_open.pop_all()
        sampled = sum(isinstance(source, Integral) for source in self._sources)
        counted = len(self.gpus) - sampled
        self.resolution_s = 0.1  # as the driver's table of metrics
        self.info = MeterInfo(
            name="amdsmi",
            scope="gpu",
            source=", and ".join(
                [f"amdsmi energy accumulators of {counted} GPUs"] * bool(counted)
                + [
                    f"amdsmi power of {sampled} GPUs without a right accumulator, integrated "
                    f"every {1000 * sample_period_s:.0f} ms"
                ]
                * bool(sampled)
            ),
            host="none of the host: the GPUs' packages alone, idle ones of the lease included",
            independent=not sampled,
            tells_clocks=True,
        )
        if sampled:
            self._ticker = Ticker(
                self._integrate, period_s=sample_period_s, name="joulefront-amdsmi"
            )

    def _found_sources(self) -> list[_Accumulator | Integral]:
        # An accumulator may stand still or count in another unit (MI100: amdsmi issues 22, 38).
        now_s = self._clock()
        counters: list[_Accumulator | None] = []
        for gpu in self.gpus:
            try:
                counters.append(_Accumulator(gpu, now_s))
            except MeterError:  # not in a virtual machine
                counters.append(None)
        powers = [Integral(gpu.power_W, self._clock()) for gpu in self.gpus]
        counted, drawn = [0.0] * len(powers), [0.0] * len(powers)
        for _ in range(round(TRIAL_S / TRIAL_POLL_S)):
            self._sleep(TRIAL_POLL_S)
            for at, (counter, power) in enumerate(zip(counters, powers, strict=True)):
                drawn[at] = power.energy_J(self._clock())
                if counter is not None:
                    try:
                        counted[at] = counter.energy_J(self._clock())
                    except LostJoules:
                        counters[at] = None
        return [
            counter
            if counter is not None and abs(joules - by_power) <= TRIAL_ERROR * by_power
            else Integral(gpu.power_W, self._clock())
            for gpu, counter, joules, by_power in zip(
                self.gpus, counters, counted, drawn, strict=True
            )
        ]

    def read(self) -> Reading:
        """Return the joules of all GPUs since the meter was opened."""
        with self._reading():
            before_s = self._clock()
            energy_J = math.fsum(source.energy_J(self._clock()) for source in self._sources)
            return Reading((before_s + self._clock()) / 2, energy_J)

    def boundary(self, *, opens: bool) -> Reading:
        """Return a reading at a window's edge, as `Meter.boundary` has it."""
        with self._reading():
            called_s = self._clock()
            edges = [
                Edge(source, called_s, counts=isinstance(source, _Accumulator))
                for source in self._sources
            ]
            return self._at_edge(edges, called_s, opens=opens)

    def sample(self) -> PowerSample:
        """Return the power of all GPUs, with clocks, temperature, utilisation and throttling."""
        self._check()
        now_s = self._clock()
        powers = [gpu.power_W() for gpu in self.gpus]
        states = [gpu.state() for gpu in self.gpus]
        both = [{"power_W": power, **state} for power, state in zip(powers, states, strict=True)]
        return PowerSample(now_s, math.fsum(powers), over_devices(states) | each_device(both))

    def close(self) -> None:
        """Stop sampling and shut amdsmi down. May be called twice."""
        if self._ticker is not None:
            self._ticker.stop()
        with self._lock:
            self._broken = "the amdsmi meter is closed"
        self._stack.close()
