"""GPUs that this process may use, and NVML queries shared by several modules.

NVML numbers every GPU of the machine; the training processes see those of CUDA_VISIBLE_DEVICES
only, which may hold indices, UUIDs or prefixes of UUIDs. Meter, governor and machine detection all
resolve them here, to UUIDs, so that none of them ever reads or sets a neighbour's GPU. Of a MIG
slice NVML tells name, memory and processes; energy and clocks are those of the whole GPU, which
others share, so that a slice has neither meter nor clocks here.

NVML also counts GPUs that cannot be opened: those that a control group hides (NO_PERMISSION), and
damaged ones (GPU_IS_LOST). They are left out. CUDA does not see the hidden ones and numbers the
rest from 0, as Slurm does in CUDA_VISIBLE_DEVICES. Its numbers of the GPUs behind a damaged one are
not documented, so those are named by UUID.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import whole_number
from tuner.workload.node.meters.base import TIME_ALONE, CounterMeter, MeterError, NoDriver, Reading
from tuner.workload.records.probe import STAND_IN_W, MeterInfo, PowerSample

#: CUDA: "-1" hides itself and whatever follows; Slurm's word for no GPU.
_NONE = ("-1", "NoDevFiles")
#: What to do about an NVML that does not start, by its error.
_REMEDIES = {
    12: "in a container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility, which brings "
    "NVML's library",
    18: "reboot, or reload the driver",  # the driver was updated under a loaded older one
    999: "in a container, start it again: it may have lost its GPUs",  # nvidia-container-toolkit 48
}
#: Bytes of NVML's record of a process (nvml.h, nvmlProcessInfo_t).
PROCESS_BYTES = 24
#: Sizes of a memory node's pages, kB (Linux, drivers/base/node.c).
_NODE_PAGES = re.compile(r"(FilePages|Shmem):\s+(\d+) kB")
#: NVML's reasons for a lower clock.
_THROTTLES = {
    "throttle_power": ("SwPowerCap",),
    "throttle_thermal": ("SwThermalSlowdown", "HwThermalSlowdown"),
    "throttle_hw": ("HwSlowdown", "HwPowerBrakeSlowdown"),
}


def on_twin(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if this node's GPUs are a library for tests, which names its state file so.

    Its ranks compute on cores, and nothing that its NVML answers is a measurement of a GPU.
    """
    return bool((os.environ if environ is None else environ).get("JOULEFRONT_TWIN"))


@dataclass(frozen=True)
class Gpu:
    """Visible GPU: NVML's number of it (PCI bus order), and its UUID ("GPU-...").

    A MIG slice has the number of its GPU, `whole`, and a UUID of its own ("MIG-...").
    """

    index: int
    uuid: str
    name: str
    handle: Any = field(compare=False, repr=False)
    nvml: Any = field(compare=False, repr=False)
    whole: Gpu | None = field(default=None, compare=False, repr=False)

    def get(self, query_name: str, *arguments: Any) -> Any:
        """Return the answer of NVML's nvmlDeviceGet`query_name`, where a text names one of its
        constants.

        NVMLError if the GPU refuses, AttributeError if the binding has no such call or constant.
        """
        given = [getattr(self.nvml, each) if isinstance(each, str) else each for each in arguments]
        return getattr(self.nvml, f"nvmlDeviceGet{query_name}")(self.handle, *given)

    def query(self, default: Any, query_name: str, *arguments: Any) -> Any:
        """Return the answer to an optional query; `default` if the GPU or binding lacks it."""
        return query(self.nvml, default, lambda: self.get(query_name, *arguments))

    @property
    def memory_bytes(self) -> int | None:
        """All of the memory; None if the GPU has none of its own (GB10)."""
        try:
            return int(self.get("MemoryInfo").total) or None
        except self.nvml.NVMLError_NotSupported:
            return None

    def file_cache_bytes(self, sys: str | Path = "/sys") -> int:
        """Return the bytes of the GPU's memory in which Linux caches files; 0 if it caches none.

        On superchips (GH200, GB200) and POWER9 the memory is a memory node of Linux, which gives
        cached files up for whoever allocates memory. Shared memory is no cache.
        """
        node = self._memory_node()
        if node is None:
            return 0
        root = f"{os.environ['JOULEFRONT_TWIN']}.sys" if on_twin() else sys
        try:
            text = Path(root, f"devices/system/node/node{node}/meminfo").read_text()
        except OSError:
            return 0
        pages = {name: int(size) for name, size in _NODE_PAGES.findall(text)}
        return 1024 * max(0, pages.get("FilePages", 0) - pages.get("Shmem", 0))

    def _memory_node(self) -> int | None:
        """Return the memory node that the GPU's own memory is to Linux; None if it is none."""
        node: int | None = self.query(None, "NumaNodeId")
        if node is not None:
            return node
        # The kernel module tells it of older drivers, too (nv-procfs.c).
        address = str(getattr(self.query(None, "PciInfo"), "busId", ""))[-12:].lower()
        proc = f"{os.environ['JOULEFRONT_TWIN']}.proc" if on_twin() else "/proc"
        try:
            text = Path(proc, f"driver/nvidia/gpus/{address}/numa_status").read_text()
        except OSError:
            return None
        found = re.search(r"Node:\s+(\d+)", text)
        return int(found[1]) if found else None

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA's compute capability; (0, 0) if unknown."""
        major, minor = self.query((0, 0), "CudaComputeCapability")
        return major, minor

    @property
    def memory_clocks_MHz(self) -> tuple[int, ...]:
        """Supported memory clocks; empty if unknown."""
        return tuple(self.query((), "SupportedMemoryClocks"))

    @property
    def clocks_MHz(self) -> tuple[int, ...]:
        """Supported SM clocks at the highest memory clock, ascending; empty if unknown."""
        memory_MHz = self.memory_clocks_MHz
        return tuple(
            sorted(self.query((), "SupportedGraphicsClocks", max(memory_MHz)) if memory_MHz else ())
        )

    def field_mW(self, *scope: str) -> float:
        """Return the instant power as NVML's field value, of the GPU or of another scope."""
        field = self.nvml.NVML_FI_DEV_POWER_INSTANT
        query = (field, getattr(self.nvml, *scope)) if scope else field
        value = self.get("FieldValues", [query])[0]
        if value.nvmlReturn != self.nvml.NVML_SUCCESS:
            raise self.nvml.NVMLError(value.nvmlReturn)
        return float(value.value.uiVal)

    def field_W(self, *scope: str) -> float:
        """Return the instant power of a scope, watts."""
        return self.field_mW(*scope) / 1000

    def temperature_C(self) -> float:
        """Return the temperature, degrees Celsius; NVMLError or AttributeError if unreadable."""
        # Drivers of CUDA 14 no longer have the older of the two calls (nvidia-ml-py 13.615), and
        # older drivers or bindings lack the newer one.
        reply = self.query(None, "TemperatureV", "NVML_TEMPERATURE_GPU")
        return float(self.get("Temperature", "NVML_TEMPERATURE_GPU") if reply is None else reply)

    def field(self, name: str) -> int | None:
        """Return a field value that is a count or a code; None if the GPU or binding lacks it."""
        number = getattr(self.nvml, name, None)
        found = number and self.query(None, "FieldValues", [number])
        if not found or found[0].nvmlReturn != self.nvml.NVML_SUCCESS:
            return None
        long = found[0].valueType == self.nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        return int(found[0].value.ullVal if long else found[0].value.uiVal)

    @property
    def smooths_power(self) -> bool:
        """True if the GPU lets its power fall slowly after work (Blackwell's power smoothing)."""
        return bool(self.field("NVML_FI_PWR_SMOOTHING_ENABLED"))

    def fabric_state(self) -> tuple[int, str] | None:
        """Return NVML's state of the GPU in its NVLink fabric, and the error with which its
        registration ended; None without a fabric.
        """
        nvml = self.nvml
        try:
            reply = nvml.c_nvmlGpuFabricInfo_v2_t()
            nvml.nvmlDeviceGetGpuFabricInfoV(self.handle, ctypes.byref(reply))
        except (nvml.NVMLError, AttributeError):
            return None
        # The status has a meaning only once the registration is complete (nvml.h).
        state, status = int(reply.state), int(reply.status)
        failed = state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and status != nvml.NVML_SUCCESS
        return state, str(nvml.NVMLError(status)) if failed else ""

    def slices(self) -> tuple[Gpu, ...]:
        """Return the MIG slices that this process may open; empty without MIG."""
        if not self.query((0, 0), "MigMode")[0]:
            return ()
        found = []
        for number in range(self.query(0, "MaxMigDeviceCount")):
            try:
                handle = self.get("MigDeviceHandleByIndex", number)
                uuid = self.nvml.nvmlDeviceGetUUID(handle)
                name = self.nvml.nvmlDeviceGetName(handle)
            except self.nvml.NVMLError:
                continue  # no slice has this number, or it is another container's
            found.append(Gpu(self.index, uuid, name, handle, self.nvml, self))
        return tuple(found)

    def variant(self) -> str:
        """Return the suffix of a GPU's kind beyond its name, as " (MAX_Q)", or ""."""
        return self.power_profile() + " (power smoothing)" * self.smooths_power

    def power_profile(self) -> str:
        """Return the profiles in force (Blackwell), which lower clocks, as " (MAX_Q)", or ""."""
        prefix = "NVML_POWER_PROFILE_"
        listed = (name for name in dir(self.nvml) if name.startswith(prefix))
        names = {getattr(self.nvml, name): name for name in listed if "OPERATION" not in name}
        found = [names.get(bit, str(bit)).removeprefix(prefix) for bit in self._profiles()]
        return f" ({', '.join(found)})" if found else ""

    def _profiles(self) -> list[int]:
        try:
            reply = self.nvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
            query = self.nvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles
            query(self.handle, ctypes.byref(reply))
        except (self.nvml.NVMLError, AttributeError):
            return []
        words = reply.enforcedProfilesMask.mask
        return [bit for bit in range(32 * len(words)) if words[bit // 32] >> bit % 32 & 1]


def open_nvml(*, dev: str | Path = "/dev") -> Any:
    """Initialise NVML and return its module. Each call needs one `nvmlShutdown`.

    Raises:
        NoDriver: this machine has no driver, or the Python package is missing, and no GPU's file.
        MeterError: NVML does not start, although there are GPUs.
    """
    absent = NoDriver if not any(Path(dev).glob("nvidia[0-9]*")) else MeterError
    try:
        import pynvml as nvml
    except ImportError as error:
        raise absent(
            "NVML cannot be asked: the Python package nvidia-ml-py is not installed"
        ) from error
    if why := why_not_binding(nvml):
        raise absent(why)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        missing = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        kind = absent if error.value in missing else MeterError
        remedy = "" if kind is NoDriver else _REMEDIES.get(error.value, "")
        why = str(error).rstrip(".") + (remedy and f"; {remedy}")
        raise kind(f"NVML does not start: {why}") from error
    return nvml


def why_not_binding(nvml: Any) -> str:
    """Return why a module that is named pynvml is not a usable nvidia-ml-py; "" if it is."""
    if not hasattr(nvml, "nvmlDeviceSetGpuLockedClocks"):  # a package with the same name
        return (
            "the Python module pynvml is not NVIDIA's nvidia-ml-py; run: pip uninstall -y pynvml "
            "nvidia-ml-py3; pip install --force-reinstall nvidia-ml-py"
        )
    record = getattr(nvml, "c_nvmlProcessInfo_v3_t", None)
    if record is not None and ctypes.sizeof(record) != PROCESS_BYTES:
        return (
            "this release of nvidia-ml-py misreads the records of processes; run: pip install "
            "--upgrade nvidia-ml-py"
        )
    return ""


@contextlib.contextmanager
def opened_gpus(
    environ: Mapping[str, str] | None = None, *, dev: str | Path = "/dev"
) -> Iterator[tuple[Any, tuple[Gpu, ...]]]:
    """Open NVML, and list the visible GPUs, until the context ends."""
    nvml = open_nvml(dev=dev)
    try:
        yield nvml, visible_gpus(nvml, environ=environ)
    finally:
        query(nvml, None, nvml.nvmlShutdown)


def query(nvml: Any, default: Any, question: Callable[[], Any]) -> Any:
    """Return the answer to an optional query; `default` if the GPU or binding lacks it."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return default


@dataclass(frozen=True)
class _CountedGpus:
    """GPUs that NVML counts."""

    #: In PCI order, which is CUDA's with CUDA_DEVICE_ORDER.
    gpus: tuple[Gpu, ...]
    #: The reason against each GPU that cannot be used, by NVML's index.
    unusable: Mapping[int, str]
    #: The lowest index of those that CUDA may count; the number of all GPUs if there are none.
    damaged: int

    @property
    def names(self) -> str:
        """All GPUs, by the numbers that CUDA gives them."""
        found = {gpu.index: f"{number} = {gpu.uuid}" for number, gpu in enumerate(self.gpus)}
        for gpu in self.gpus:
            if slices := gpu.slices():
                found[gpu.index] += f" (slices {', '.join(each.uuid for each in slices)})"
        found |= {index: f"GPU {index} of NVML: {why}" for index, why in self.unusable.items()}
        return ", ".join(found[index] for index in sorted(found))


def _list(nvml: Any) -> _CountedGpus:
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise MeterError(f"NVML does not list the GPUs: {error}") from error
    gpus, unusable, damaged = [], {}, count
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            gpus.append(Gpu(index, uuid, name, handle, nvml))
        except nvml.NVMLError as error:
            unusable[index] = str(error)
            if error.value != nvml.NVML_ERROR_NO_PERMISSION:
                damaged = min(damaged, index)
    return _CountedGpus(tuple(gpus), unusable, damaged)


def unusable_gpus(nvml: Any) -> dict[int, str]:
    """Return the reason against each GPU that NVML counts and that cannot be used, by its index."""
    return dict(_list(nvml).unusable)


def no_gpu_wanted(environ: Mapping[str, str]) -> bool:
    """Return True if CUDA_VISIBLE_DEVICES leaves this process no GPU."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    return named is not None and named.partition(",")[0].strip() in ("", *_NONE)


def _choose(
    entries: Sequence[str], listed: _CountedGpus, environ: Mapping[str, str]
) -> tuple[Gpu, ...]:
    gpus, where = listed.gpus, "CUDA_VISIBLE_DEVICES"
    chosen: list[Gpu] = []
    for entry in entries:
        if entry in _NONE:
            break
        if (number := whole_number(entry)) is not None:
            matches = list(gpus[number : number + 1])
            if matches and matches[0].index > listed.damaged:
                raise InputError(
                    f"{where} has the entry {entry!r}, but GPU {listed.damaged} cannot be used "
                    f"({listed.unusable[listed.damaged]}), and the numbers from there on are not "
                    f"certain; name GPUs by UUID: {listed.names}"
                )
        else:
            of_mig = entry.upper().startswith("MIG-")
            named = [each for gpu in gpus for each in gpu.slices()] if of_mig else gpus
            matches = [gpu for gpu in named if gpu.uuid.lower().startswith(entry.lower())]
        if len(matches) != 1:
            problem = "several GPUs" if matches else "no GPU or MIG slice of this machine"
            raise InputError(
                f"{where} has the entry {entry!r}, which names {problem}: {listed.names}"
            )
        if matches[0] in chosen:
            raise InputError(f"{where} names {matches[0].uuid} twice; name each GPU once")
        chosen.append(matches[0])
    by_index = any(whole_number(entry) is not None for entry in entries)
    mixed = len({gpu.name for gpu in gpus}) > 1
    if by_index and mixed and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # CUDA numbers the fastest GPU first, NVML by bus; only among like GPUs do the two agree.
        raise InputError(
            f"{where} names GPUs by number on a machine with different GPUs, where CUDA and NVML "
            "number differently; set CUDA_DEVICE_ORDER=PCI_BUS_ID or name them by UUID: "
            f"{listed.names}"
        )
    return tuple(chosen)


def visible_gpus(nvml: Any, *, environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs this process may use, in CUDA's order: every GPU without its variable.

    Of a GPU with MIG on it is a slice: the one that is named, or the only one.

    Raises:
        InputError: an entry names no GPU or several, or slices of which CUDA uses none or one.
        MeterError: NVML does not answer, or none of the GPUs that it counts can be used.
    """
    environ = os.environ if environ is None else environ
    listed = _list(nvml)
    named, chosen = environ.get("CUDA_VISIBLE_DEVICES"), listed.gpus
    if named is not None and (listed.gpus or listed.unusable):
        entries = [part.strip() for part in named.split(",") if part.strip()]
        chosen = _choose(entries, listed, environ)
    elif listed.unusable and not listed.gpus:
        raise MeterError(f"NVML opens no GPU: {listed.names}")
    return _sliced(chosen)


def _sliced(chosen: Sequence[Gpu]) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    for gpu in chosen:
        if gpu.whole is None and gpu.query((0, 0), "MigMode")[0]:
            slices = gpu.slices()
            if not slices:
                raise InputError(
                    f"GPU {gpu.index} ({gpu.uuid}) has MIG on and no slice that this process may "
                    "use; create one (nvidia-smi mig -cgi), switch MIG off (nvidia-smi -i "
                    f"{gpu.index} -mig 0), or choose another GPU with CUDA_VISIBLE_DEVICES"
                )
            found += slices
        else:
            found.append(gpu)
    if len(found) > 1 and (sliced := [gpu for gpu in found if gpu.whole]):
        # MIG User Guide, "CUDA Device Enumeration": an application sees one instance.
        raise InputError(
            "CUDA uses one MIG slice in a program, and no GPU beside it; name one in "
            f"CUDA_VISIBLE_DEVICES: {', '.join(gpu.uuid for gpu in sliced)}"
        )
    return tuple(found)


def cuda_numbering(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which CUDA sees the visible GPUs in their order, by number.

    CUDA_VISIBLE_DEVICES may hold UUIDs or prefixes of them, but programs read integers there, and
    CUDA numbers the fastest GPU first unless told to follow the PCI bus. A number counts the GPUs
    that this process may open; behind a damaged GPU there is none to rely on, and UUIDs stay, as
    that of a MIG slice does, which has no number.
    """
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        with opened_gpus(environ) as (nvml, chosen):
            listed = _list(nvml)
    except MeterError:
        return order
    numbers = {gpu.uuid: str(number) for number, gpu in enumerate(listed.gpus)}
    certain = all(gpu.index < listed.damaged and not gpu.whole for gpu in chosen)
    if certain and "CUDA_VISIBLE_DEVICES" not in environ:
        return order
    names = [numbers[gpu.uuid] if certain else gpu.uuid for gpu in chosen]
    return {**order, "CUDA_VISIBLE_DEVICES": ",".join(names)}


def clock_state(gpu: Gpu) -> dict[str, float]:
    """Return the available ones of the GPU's clocks, temperature, utilisation and throttling.

    "clock_MHz", "memory_clock_MHz", "temperature_C", "utilisation" (0 to 1); "throttle_power",
    "throttle_thermal" and "throttle_hw" are 1 where the power limit, the temperature or the board
    (power brake, hardware slowdown) lowers the clock. MeterError if the GPU is lost.
    """
    nvml, state = gpu.nvml, dict[str, float]()
    questions: dict[str, Callable[[], float]] = {
        "clock_MHz": lambda: gpu.get("ClockInfo", "NVML_CLOCK_SM"),
        "memory_clock_MHz": lambda: gpu.get("ClockInfo", "NVML_CLOCK_MEM"),
        "temperature_C": gpu.temperature_C,
        "utilisation": lambda: gpu.get("UtilizationRates").gpu / 100,
    }
    for name, question in questions.items():
        try:
            state[name] = float(question())
        except AttributeError:
            pass
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise MeterError(f"GPU {gpu.index} ({gpu.uuid}) is lost") from error
    # The same call under its newer and its older name; a driver may know one only.
    reasons = gpu.query(None, "CurrentClocksEventReasons")
    if reasons is None:
        reasons = gpu.query(None, "CurrentClocksThrottleReasons")
    for name, causes in _THROTTLES.items() if reasons is not None else ():
        bits = [getattr(nvml, f"nvmlClocksThrottleReason{cause}") for cause in causes]
        state[name] = float(any(reasons & bit for bit in bits))
    return state


# Time alone: the substitute for a meter where devices report neither energy nor power.
#
# Slices of a GPU (MIG, vGPU) share its meter with others, and a study that minimizes time needs
# none.


#: What a user does about devices whose energy cannot be metered.
REMEDY = "tuner optimize --minimize time, with no limit on energy or power, tunes time alone"


class NoEnergy(MeterError):
    """Reason of devices that report neither energy nor power, whatever the permissions."""


class TimeMeter(CounterMeter):
    """Stand-in for a meter, of scope "none"; `why` there is no energy is its source."""

    def __init__(self, why: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock_s, self._start_s = clock, clock()
        self.info = MeterInfo("time", "none", why, twin=on_twin())
        self.resolution_s = 1e-6
        super().__init__("time", min_s=0.0, clock=clock, sleep=time.sleep)

    def _count(self) -> Reading:
        now_s = self._clock_s()
        return Reading(now_s, STAND_IN_W * (now_s - self._start_s))

    def sample(self) -> PowerSample:
        """Raise MeterError: there is no power to sample."""
        raise MeterError(f"no power is told: {self.info.source}")


@contextlib.contextmanager
def time_alone(permitted: bool) -> Iterator[None]:
    """Let studies run on devices without energy, if `permitted`, until the context ends."""
    before = os.environ.get(TIME_ALONE)
    if permitted:
        os.environ[TIME_ALONE] = "1"
    try:
        yield
    finally:
        if permitted and before is None:
            del os.environ[TIME_ALONE]


def permits_time_alone(environ: Mapping[str, str]) -> bool:
    """Return True if the current study is of time only."""
    return bool(environ.get(TIME_ALONE))
