"""Recording of NVML's answers on a node, so that a report of a fault can be replayed elsewhere.

    python -m benchmarks.gpu_hour.nvml_recording nvml.json [--seconds 60] [--names]

The file holds each query's answer or error code, and for a while the readings of every GPU with
their times. It names neither the host nor a process, and GPUs by their numbers unless asked for
their UUIDs. `tests.twin` replays it. Nothing is set on the GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import write_text
from tuner.workload.node.meters.base import MeterError
from tuner.workload.node.meters.gpus import Gpu, open_nvml

FORMAT = "joulefront-nvml-1"


def _call(name: str, *arguments: str) -> tuple[str, Callable[[Gpu], Any]]:
    return f"nvmlDeviceGet{name}", lambda gpu: gpu.get(name, *arguments)


#: Readings of a row after its time, each with its name among the errors and its query. Units are
#: NVML's: utilisation in %, `reasons` for a lower clock as a bit mask.
_READINGS: dict[str, tuple[str, Callable[[Gpu], Any]]] = {
    "energy_mJ": _call("TotalEnergyConsumption"),
    "instant_mW": ("power.instant", lambda gpu: gpu.field_mW("NVML_POWER_SCOPE_GPU")),
    "averaged_mW": _call("PowerUsage"),
    "module_mW": ("power.module", lambda gpu: gpu.field_mW("NVML_POWER_SCOPE_MODULE")),
    "sm_MHz": _call("ClockInfo", "NVML_CLOCK_SM"),
    "memory_MHz": _call("ClockInfo", "NVML_CLOCK_MEM"),
    "temperature_C": ("nvmlDeviceGetTemperature", Gpu.temperature_C),
    "utilisation": ("nvmlDeviceGetUtilizationRates", lambda gpu: gpu.get("UtilizationRates").gpu),
    "reasons": _call("CurrentClocksEventReasons"),
    "limit_mW": _call("PowerManagementLimit"),
}
COLUMNS = tuple(_READINGS)
#: Rows of a recording at most, and their period at least: counters update every 20 to 100 ms.
MAX_ROWS, PERIOD_S = 6000, 0.01
#: Queries of a device without arguments, whose answers do not change.
_PLAIN = (
    "Name",
    "NumGpuCores",
    "MemoryBusWidth",
    "Architecture",
    "CudaComputeCapability",
    "MaxPcieLinkGeneration",
    "MaxPcieLinkWidth",
    "PersistenceMode",
    "PowerManagementLimit",
    "EnforcedPowerLimit",
    "PowerManagementDefaultLimit",
    "PowerManagementLimitConstraints",
    "MigMode",
    "MemoryInfo",
    "C2cModeInfoV",
    "SupportedMemoryClocks",
    "TotalEnergyConsumption",
    "PowerUsage",
    "UtilizationRates",
    "CurrentClocksEventReasons",
)
_PROCESSES = ("ComputeRunningProcesses", "GraphicsRunningProcesses")
_MOST_LINKS = 18
_SYSTEM = (
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount",
)


@dataclass(frozen=True)
class NvmlRecording:
    """Replies of NVML on one node.

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
        write_text(path, json.dumps(asdict(self)))

    def lines(self, path: str | Path) -> list[str]:
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
            rows = tuple(tuple(map(_row, series)) for series in data["rows"])
            for key, count in data["errors"].items():
                if len(key.split()) != 3 or type(count) is not int:
                    raise ValueError(f"failed calls {key!r}: {count!r}")
            return cls(data["system"], tuple(data["devices"]), rows, data["errors"], data["root"])
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise InputError(f"{path} is not a recording of NVML: {error}") from error


def _row(row: Sequence[Any]) -> tuple[float | None, ...]:
    # A time, and what was read then; None is what could not be read.
    numbers = all(value is None or type(value) in (int, float) for value in row)
    if not numbers or row[0] is None:
        raise ValueError(f"a reading of {row!r}")
    return tuple(row)


def _plain(value: Any) -> Any:
    # To JSON: structs by their fields.
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if hasattr(value, "_fields_"):
        return {entry[0]: _plain(getattr(value, entry[0])) for entry in value._fields_}
    if isinstance(value, int | float | str):
        return value
    return {name: _plain(part) for name, part in vars(value).items()}  # pynvml's copy of a struct


def _reply(nvml: Any, question: Callable[[], Any]) -> Any:
    # {"error": code} if it fails; code None if the binding lacks the function.
    try:
        return _plain(question())
    except AttributeError:
        return {"error": None}
    except nvml.NVMLError as error:
        return {"error": error.value}


def _device(gpu: Gpu, names: bool) -> dict[str, Any]:
    def query(name: str, *arguments: Any) -> Any:
        return _reply(gpu.nvml, lambda: gpu.get(name, *arguments))

    fields = {f"nvmlDeviceGet{name}": query(name) for name in _PLAIN}
    uuid = query("UUID")
    fields["nvmlDeviceGetUUID"] = uuid if names else f"GPU-recorded-{gpu.index}"
    fields["nvmlDeviceGetPciInfo.bus"] = _part(query("PciInfo"), "bus")
    fields["nvmlDeviceGetMemoryInfo.v2"] = query("MemoryInfo", "nvmlMemory_v2")
    memory_MHz = fields["nvmlDeviceGetSupportedMemoryClocks"]
    if isinstance(memory_MHz, list) and memory_MHz:
        clocks_MHz = query("SupportedGraphicsClocks", max(memory_MHz))
        fields["nvmlDeviceGetSupportedGraphicsClocks"] = clocks_MHz
    for kind in ("SM", "MEM"):
        for name in ("MaxClockInfo", "DefaultApplicationsClock"):
            fields[f"nvmlDeviceGet{name}.{kind}"] = query(name, f"NVML_CLOCK_{kind}")
    links = [query("NvLinkState", link) for link in range(_MOST_LINKS)]
    fields["nvmlDeviceGetNvLinkState.active"] = links.count(1)
    for name in _PROCESSES:
        found = query(name)
        if isinstance(found, list):
            found = [_part(process, "usedGpuMemory") for process in found]
        fields[f"nvmlDeviceGet{name}.bytes"] = found
    return fields


def _call_system(nvml: Any, name: str) -> Any:
    return getattr(nvml, name)()


def _part(reply: Any, name: str) -> Any:
    # Of a struct, or the error that came in its place.
    return reply.get(name, reply) if isinstance(reply, dict) else reply


def record_nvml(
    seconds: float = 60.0,
    *,
    names: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> NvmlRecording:
    """Record NVML's answers here; MeterError if it does not start, InputError without a GPU."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError(f"a recording of {seconds:g} s is not possible; give a positive length")
    nvml = open_nvml()
    try:
        system = {name: _reply(nvml, partial(_call_system, nvml, name)) for name in _SYSTEM}
        count = system["nvmlDeviceGetCount"]
        if not isinstance(count, int) or not count:
            raise InputError(f"NVML lists no GPU to record: {count}")
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        gpus = [Gpu(index, "", "", handle, nvml) for index, handle in enumerate(handles)]
        devices = tuple(_device(gpu, names) for gpu in gpus)
        errors: dict[str, int] = {}
        rows = _rows(gpus, seconds, errors, clock, sleep)
    finally:
        nvml.nvmlShutdown()
    return NvmlRecording(system, devices, rows, errors, os.geteuid() == 0)


def _rows(
    gpus: Sequence[Gpu],
    seconds: float,
    errors: dict[str, int],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> tuple[tuple[tuple[float | None, ...], ...], ...]:
    period_s = max(PERIOD_S, seconds / MAX_ROWS)
    series: list[list[tuple[float | None, ...]]] = [[] for _ in gpus]
    began_s = clock()
    while (now_s := clock()) - began_s < seconds and len(series[0]) < MAX_ROWS:
        for gpu, rows in zip(gpus, series, strict=True):
            at_s = round(clock() - began_s, 6)
            rows.append((at_s, *(_reading(gpu, *each, errors) for each in _READINGS.values())))
        sleep(max(0.0, now_s + period_s - clock()))
    return tuple(tuple(rows) for rows in series)


def _reading(
    gpu: Gpu, name: str, question: Callable[[Gpu], Any], errors: dict[str, int]
) -> float | None:
    reply = _reply(gpu.nvml, lambda: float(question(gpu)))
    if not isinstance(reply, dict):
        return float(reply)
    key = f"{gpu.index} {name} {reply['error']}"
    errors[key] = errors.get(key, 0) + 1
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_hour.nvml_recording",
        description="record what the NVIDIA driver answers, for a bug report",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="length of the recording (default: 60)"
    )
    parser.add_argument(
        "--names", action="store_true", help="keep the GPUs' UUIDs in the recording"
    )
    options = parser.parse_args(argv)
    try:
        recording = record_nvml(options.seconds, names=options.names)
    except (InputError, MeterError) as error:
        print(f"nothing was recorded: {error}", file=sys.stderr)
        return 2
    recording.write(options.file)
    print(*recording.lines(options.file), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
