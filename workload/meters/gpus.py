"""GPUs that this process may use, and NVML queries shared by several modules.

NVML numbers every GPU of the machine; the training processes see those of CUDA_VISIBLE_DEVICES
only, which may hold indices, UUIDs or prefixes of UUIDs. Meter, governor and machine detection all
resolve them here, to UUIDs, so that none of them ever reads or sets a neighbour's GPU. A MIG slice
is refused: NVML counts energy and sets clocks for the whole GPU, which others share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.meters.errors import MeterError

__all__ = [
    "Gpu",
    "ask",
    "clock_state",
    "cuda_numbering",
    "each_device",
    "field_W",
    "on_twin",
    "open_nvml",
    "over_devices",
    "visible_gpus",
]


def on_twin(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if this node's GPUs are a library for tests, which names its state file so.

    Its ranks compute on cores, and nothing that its NVML answers is a measurement of a GPU.
    """
    return bool((os.environ if environ is None else environ).get("JOULEFRONT_TWIN"))


@dataclass(frozen=True)
class Gpu:
    """Visible GPU.

    Attributes:
        index: NVML's number of it (PCI bus order).
        uuid: "GPU-...", the same in every process and after every restart.
        name: the product as NVML tells it, e.g. "NVIDIA A100-SXM4-80GB".
        handle: NVML's handle.
    """

    index: int
    uuid: str
    name: str
    handle: Any = field(compare=False, repr=False)


def open_nvml(nvml: Any = None) -> Any:
    """Initialise NVML: `nvml` itself, or the pynvml module. Each call needs one `nvmlShutdown`.

    Raises:
        MeterError: the Python package or the driver's library is missing, or will not start.
    """
    if nvml is None:
        try:
            import pynvml
        except ImportError as error:
            raise MeterError(
                "NVML cannot be asked: the Python package nvidia-ml-py is not installed"
            ) from error
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise MeterError(f"NVML does not start: {error}") from error
    return nvml


def ask(nvml: Any, default: Any, question: Callable[[], Any]) -> Any:
    """Return the answer to an optional query; `default` if the GPU or binding lacks it."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return default


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bindings before 11.5 give bytes


def _choose(
    entries: Sequence[str], gpus: Sequence[Gpu], where: str, environ: Mapping[str, str]
) -> tuple[Gpu, ...]:
    known = ", ".join(f"{gpu.index} = {gpu.uuid}" for gpu in gpus)
    chosen: list[Gpu] = []
    for entry in entries:
        if entry in ("-1", "NoDevFiles"):
            break  # CUDA: "-1" hides itself and whatever follows; Slurm's word for no GPU
        if entry.upper().startswith("MIG-"):
            raise InputError(
                f"{where} names the MIG slice {entry!r}; NVML counts energy and sets clocks for "
                "whole GPUs only, so name a whole GPU with MIG switched off"
            )
        if entry.isdigit():
            matches = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            matches = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
        if len(matches) != 1:
            problem = "several GPUs" if matches else "no GPU of this machine"
            raise InputError(f"{where} has the entry {entry!r}, which names {problem}: {known}")
        if matches[0] in chosen:
            raise InputError(f"{where} names {matches[0].uuid} twice; name each GPU once")
        chosen.append(matches[0])
    by_index = any(entry.isdigit() for entry in entries)
    mixed = len({gpu.name for gpu in gpus}) > 1
    if by_index and mixed and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # CUDA numbers the fastest GPU first, NVML by bus; only among like GPUs do the two agree.
        raise InputError(
            f"{where} names GPUs by number on a machine with different GPUs, where CUDA and NVML "
            "number differently; set CUDA_DEVICE_ORDER=PCI_BUS_ID or name them by UUID: " + known
        )
    return tuple(chosen)


def _mig(nvml: Any, gpu: Gpu) -> bool:
    current, _pending = ask(nvml, (0, 0), lambda: nvml.nvmlDeviceGetMigMode(gpu.handle))
    return bool(current)


def visible_gpus(
    nvml: Any, *, devices: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Gpu, ...]:
    """Return the GPUs this process may use, in CUDA's order.

    Args:
        nvml: an initialised NVML.
        devices: indices, UUIDs or prefixes of UUIDs; None takes CUDA_VISIBLE_DEVICES, and every
            GPU where that is not set.
        environ: the environment; the process's own by default.

    Raises:
        InputError: an entry names a MIG slice, no GPU, several GPUs, or one that has MIG on.
        MeterError: NVML does not answer.
    """
    environ = os.environ if environ is None else environ
    try:
        gpus = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            gpus.append(Gpu(index, _text(uuid), _text(name), handle))
    except nvml.NVMLError as error:
        raise MeterError(f"NVML does not list the GPUs: {error}") from error
    where, entries = "devices", devices
    if entries is None:
        where, listed = "CUDA_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")
        if listed is not None:
            entries = [part.strip() for part in listed.split(",") if part.strip()]
    chosen = tuple(gpus)
    if entries is not None and gpus:
        chosen = _choose([str(entry) for entry in entries], gpus, where, environ)
    for gpu in chosen:
        if _mig(nvml, gpu):
            raise InputError(
                f"GPU {gpu.index} ({gpu.uuid}) has MIG on; NVML counts energy and sets clocks for "
                f"whole GPUs only, so switch it off (nvidia-smi -i {gpu.index} -mig 0) or choose "
                "another GPU with CUDA_VISIBLE_DEVICES"
            )
    return chosen


def cuda_numbering(environ: Mapping[str, str], *, nvml: Any = None) -> dict[str, str]:
    """Return variables with which CUDA numbers the visible GPUs as NVML does, by index.

    CUDA_VISIBLE_DEVICES may hold UUIDs or prefixes of them, but DeepSpeed reads integers there
    (`accelerator/cuda_accelerator.py`, called at every start of ZeRO 1 and 2), and CUDA numbers the
    fastest GPU first unless told to follow the PCI bus.

    Args:
        environ: the environment of a rank.
        nvml: a stand-in for the pynvml module.

    Raises:
        InputError: an entry names no GPU or several, or a MIG slice.
    """
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return order
    try:
        opened = open_nvml(nvml)
    except MeterError:
        return order
    try:
        gpus = visible_gpus(opened, environ=environ)
    finally:
        ask(opened, None, opened.nvmlShutdown)
    return {**order, "CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in gpus)}


def field_W(nvml: Any, gpu: Gpu, name: str, of: str = "GPU") -> float:
    """Return a power that NVML provides as a field value, watts.

    Args:
        nvml: an initialised NVML.
        gpu: whose.
        name: "NVML_FI_DEV_POWER_INSTANT" or "NVML_FI_DEV_POWER_AVERAGE".
        of: NVML's power scope: "GPU", "MODULE" or "MEMORY".

    Raises:
        NVMLError, AttributeError: this GPU, driver or binding does not offer it.
    """
    field = getattr(nvml, name)
    scope = getattr(nvml, f"NVML_POWER_SCOPE_{of}", None)
    if scope is None and of != "GPU":
        raise AttributeError(f"this binding knows no power scope {of}")
    asked = field if of == "GPU" else (field, scope)
    value = nvml.nvmlDeviceGetFieldValues(gpu.handle, [asked])[0]
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    return float(value.value.uiVal) / 1000


def clock_state(nvml: Any, gpu: Gpu) -> dict[str, float]:
    """Return the GPU's present clocks, temperature, utilisation and throttling.

    Returns: those that the GPU tells of "clock_MHz" and "memory_clock_MHz"; "temperature_C";
        "utilisation" (0 to 1); "throttle_power", "throttle_thermal" and "throttle_hw", 1 where the
        power limit, the temperature or the board (power brake, hardware slowdown) lowers the clock.

    Raises:
        MeterError: the GPU is lost.
    """
    state: dict[str, float] = {}

    def put(name: str, question: Callable[[], float]) -> None:
        try:
            state[name] = float(question())
        except AttributeError:
            pass
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise MeterError(f"GPU {gpu.index} ({gpu.uuid}) is lost") from error

    handle = gpu.handle
    put("clock_MHz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    put("memory_clock_MHz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
    sensor = nvml.NVML_TEMPERATURE_GPU
    put("temperature_C", lambda: nvml.nvmlDeviceGetTemperature(handle, sensor))
    put("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    # The same call under its newer and its older name; a driver may know one only.
    reasons = ask(nvml, None, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reasons is None:
        reasons = ask(nvml, None, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    if reasons is not None:
        for name, mask in (
            ("throttle_power", nvml.nvmlClocksThrottleReasonSwPowerCap),
            (
                "throttle_thermal",
                nvml.nvmlClocksThrottleReasonSwThermalSlowdown
                | nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            ),
            (
                "throttle_hw",
                nvml.nvmlClocksThrottleReasonHwSlowdown
                | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
            ),
        ):
            state[name] = float(bool(reasons & mask))
    return state


def over_devices(states: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine several GPUs' `clock_state`: means, but the hottest temperature and any throttle."""
    merged: dict[str, float] = {}
    for name in {name for state in states for name in state}:
        values = [state[name] for state in states if name in state]
        worst = name.startswith("throttle") or name == "temperature_C"
        merged[name] = max(values) if worst else sum(values) / len(values)
    return dict(sorted(merged.items()))


def each_device(states: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each GPU's power and state as "gpu0_power_W", ...; nothing for a single GPU."""
    if len(states) < 2:
        return {}
    return {
        f"gpu{number}_{name}": state[name] for number, state in enumerate(states) for name in state
    }
