"""Record what NVML answers on a node, so that a report of a fault can be replayed elsewhere.

The file holds each query's answer or error code, and for a while the readings of every GPU with
their times. It names neither the host nor a process, and GPUs by their numbers unless asked for
their UUIDs. `tuner.testing.twin` replays it. Nothing is set on the GPUs.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import write_text
from tuner.workload.meters.gpus import open_nvml, temperature_C

FORMAT = "joulefront-nvml-1"
#: Readings of a row after its time: counter (mJ); power instant, averaged and of the module (mW);
#: clocks of SM and memory (MHz); temperature (C), utilisation (%), bit mask of the reasons for a
#: lower clock, and power limit (mW).
COLUMNS = (
    "energy_mJ",
    "instant_mW",
    "averaged_mW",
    "module_mW",
    "sm_MHz",
    "memory_MHz",
    "temperature_C",
    "utilisation",
    "reasons",
    "limit_mW",
)
#: Rows of a recording at most, and their period at least: counters update every 20 to 100 ms.
MAX_ROWS, PERIOD_S = 6000, 0.01
#: Queries of a device without arguments, whose answers do not change.
_PLAIN = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetMemoryBusWidth",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetC2cModeInfoV",
    "nvmlDeviceGetSupportedMemoryClocks",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetCurrentClocksEventReasons",
)
_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
_MOST_LINKS = 18


@dataclass(frozen=True)
class NvmlRecording:
    """What NVML answered on one node.

    Attributes:
        system, devices: answers about the node, and about each GPU in NVML's order, by function; an
            error is {"error": code}.
        rows: readings of each GPU, (rows, 1 + len(COLUMNS)): seconds since the recording began, and
            `COLUMNS`; None for a reading that failed.
        errors: failed calls by GPU, function and code ({"0 nvmlDeviceGetPowerUsage 3": 6000}).
    """

    system: dict[str, Any]
    devices: tuple[dict[str, Any], ...]
    rows: tuple[tuple[tuple[float | None, ...], ...], ...]
    errors: dict[str, int] = field(default_factory=dict)
    root: bool = False
    version: str = FORMAT

    def write(self, path: str | Path) -> None:
        """Write the recording as JSON."""
        write_text(path, json.dumps(asdict(self)))

    def lines(self, path: str | Path) -> list[str]:
        """Return what was recorded, as lines."""
        lines = [f"recorded {len(self.devices)} GPUs in {path}"]
        if self.rows and self.rows[0]:
            lines[0] += f": {len(self.rows[0])} readings of each in {self.rows[0][-1][0]:.1f} s"
        for key, count in sorted(self.errors.items()):
            gpu, call, code = key.split()
            why = "is not in this nvidia-ml-py" if code == "None" else f"failed with error {code}"
            lines.append(f"GPU {gpu}: {call} {why}, {count} times")
        return lines

    @classmethod
    def read(cls, path: str | Path) -> NvmlRecording:
        """Read a recording; InputError if the file is none."""
        try:
            data = json.loads(Path(path).read_text())
            if data["version"] != FORMAT:
                raise InputError(f"{path} has the format {data['version']!r}, not {FORMAT!r}")
            rows = tuple(tuple(tuple(row) for row in series) for series in data["rows"])
            return cls(data["system"], tuple(data["devices"]), rows, data["errors"], data["root"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is no recording of NVML: {error}") from error


def _plain(value: Any) -> Any:
    """Convert an answer of pynvml to JSON: structs by their fields."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if hasattr(value, "_fields_"):
        return {entry[0]: _plain(getattr(value, entry[0])) for entry in value._fields_}
    if isinstance(value, int | float | str):
        return value
    return {name: _plain(part) for name, part in vars(value).items()}  # pynvml's copy of a struct


class _Recorder:
    def __init__(self, nvml: Any, names: bool) -> None:
        self._nvml, self._names = nvml, names
        self.errors: dict[str, int] = {}

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return an answer, or {"error": code}; code None if the binding lacks the function."""
        try:
            return _plain(getattr(self._nvml, name)(*arguments))
        except AttributeError:
            return {"error": None}
        except self._nvml.NVMLError as error:
            return {"error": error.value}

    def device(self, index: int, handle: Any) -> dict[str, Any]:
        nvml, ask = self._nvml, self.ask
        told = {name: ask(name, handle) for name in _PLAIN}
        uuid = ask("nvmlDeviceGetUUID", handle)
        told["nvmlDeviceGetUUID"] = uuid if self._names else f"GPU-recorded-{index}"
        told["nvmlDeviceGetPciInfo.bus"] = _part(ask("nvmlDeviceGetPciInfo", handle), "bus")
        second = getattr(nvml, "nvmlMemory_v2", 2)
        told["nvmlDeviceGetMemoryInfo.v2"] = ask("nvmlDeviceGetMemoryInfo", handle, second)
        memory = told["nvmlDeviceGetSupportedMemoryClocks"]
        if isinstance(memory, list) and memory:
            name = "nvmlDeviceGetSupportedGraphicsClocks"
            told[name] = ask(name, handle, max(memory))
        for kind in ("SM", "MEM"):
            of = getattr(nvml, f"NVML_CLOCK_{kind}")
            for name in ("nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetDefaultApplicationsClock"):
                told[f"{name}.{kind}"] = ask(name, handle, of)
        links = [ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(_MOST_LINKS)]
        told["nvmlDeviceGetNvLinkState.active"] = links.count(1)
        for name in _PROCESSES:
            found = ask(name, handle)
            if isinstance(found, list):
                found = [_part(process, "usedGpuMemory") for process in found]
            told[f"{name}.bytes"] = found
        return told

    def row(self, index: int, handle: Any) -> tuple[float | None, ...]:
        """Return the readings of a GPU, in the order of `COLUMNS`."""
        nvml = self._nvml

        def power(scope: str) -> Any:
            asked = (nvml.NVML_FI_DEV_POWER_INSTANT, getattr(nvml, f"NVML_POWER_SCOPE_{scope}"))
            value = nvml.nvmlDeviceGetFieldValues(handle, [asked])[0]
            if value.nvmlReturn:
                raise nvml.NVMLError(value.nvmlReturn)
            return value.value.uiVal

        def plain(name: str, *arguments: Any) -> tuple[str, Callable[[], Any]]:
            return name, lambda: getattr(nvml, name)(handle, *arguments)

        utilisation = "nvmlDeviceGetUtilizationRates"
        questions: tuple[tuple[str, Callable[[], Any]], ...] = (
            plain("nvmlDeviceGetTotalEnergyConsumption"),
            ("power.instant", lambda: power("GPU")),
            plain("nvmlDeviceGetPowerUsage"),
            ("power.module", lambda: power("MODULE")),
            plain("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            plain("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            ("nvmlDeviceGetTemperature", lambda: temperature_C(nvml, handle)),
            (utilisation, lambda: getattr(nvml, utilisation)(handle).gpu),
            plain("nvmlDeviceGetCurrentClocksEventReasons"),
            plain("nvmlDeviceGetPowerManagementLimit"),
        )
        return tuple(self._reading(index, name, question) for name, question in questions)

    def _reading(self, index: int, name: str, question: Callable[[], Any]) -> float | None:
        try:
            return float(question())
        except AttributeError:
            code = None
        except self._nvml.NVMLError as error:
            code = error.value
        key = f"{index} {name} {code}"
        self.errors[key] = self.errors.get(key, 0) + 1
        return None


def _part(answer: Any, name: str) -> Any:
    """Return a part of a struct, or the error that came in its place."""
    return answer.get(name, answer) if isinstance(answer, dict) else answer


def record_nvml(
    seconds: float = 60.0,
    *,
    names: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> NvmlRecording:
    """Record what NVML answers here; MeterError if it does not start, InputError without a GPU."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError(f"a recording of {seconds:g} s is not possible; give a positive length")
    nvml = open_nvml()
    try:
        recorder = _Recorder(nvml, names)
        system = {
            name: recorder.ask(name)
            for name in (
                "nvmlSystemGetDriverVersion",
                "nvmlSystemGetNVMLVersion",
                "nvmlSystemGetCudaDriverVersion_v2",
                "nvmlDeviceGetCount",
            )
        }
        count = system["nvmlDeviceGetCount"]
        if not isinstance(count, int) or not count:
            raise InputError(f"NVML lists no GPU to record: {count}")
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        devices = tuple(recorder.device(index, handle) for index, handle in enumerate(handles))
        rows = _readings(recorder, handles, seconds, clock, sleep)
    finally:
        nvml.nvmlShutdown()
    return NvmlRecording(system, devices, rows, recorder.errors, os.geteuid() == 0)


def _readings(
    recorder: _Recorder,
    handles: Sequence[Any],
    seconds: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> tuple[tuple[tuple[float | None, ...], ...], ...]:
    period_s = max(PERIOD_S, seconds / MAX_ROWS)
    series: list[list[tuple[float | None, ...]]] = [[] for _ in handles]
    began_s = clock()
    while (now_s := clock()) - began_s < seconds and len(series[0]) < MAX_ROWS:
        for index, handle in enumerate(handles):
            at_s = round(clock() - began_s, 6)
            series[index].append((at_s, *recorder.row(index, handle)))
        sleep(max(0.0, now_s + period_s - clock()))
    return tuple(tuple(rows) for rows in series)
