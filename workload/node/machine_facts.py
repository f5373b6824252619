"""Facts about this machine that `tuner doctor` shows.

Versions come from the records of installed packages, and compiled ops from their folders, so that
neither torch nor deepspeed nor ray is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from sys import executable
from typing import Any

from tuner.search_spaces.cluster import load_device
from tuner.search_spaces.errors import InputError
from tuner.workload.clocks.cpu import CpuGovernor
from tuner.workload.clocks.governor import NvmlGovernor
from tuner.workload.meters import METERS, open_meter
from tuner.workload.meters.errors import MeterError, NoDriver
from tuner.workload.meters.gpus import ask, no_gpu_wanted, open_nvml, unusable_gpus, visible_gpus
from tuner.workload.node.host import granted_cores, host_memory, shared_memory_bytes
from tuner.workload.node.machine import gpu_memory_bytes
from tuner.workload.node.ops import extensions_dir, installed_version
from tuner.workload.node.readiness import (
    ENOUGH_CORES,
    LEAST_CORES,
    Missing,
    missing_clocks,
    missing_of_cores,
    missing_parts,
    why_few_cores,
)

PACKAGES = ("torch", "deepspeed", "transformers", "ray", "optuna", "nvidia-ml-py")
COMPILERS = ("g++", "ninja", "nvcc")
FORGETS = ", persistence mode off (it forgets its clocks when no process uses it)"


@dataclass(frozen=True)
class GpuFacts:
    """One visible GPU."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    persistence_mode: bool = True


@dataclass(frozen=True)
class MeterFacts:
    """Availability of a meter here, with its source or the reason against it."""

    name: str
    available: bool
    note: str


@dataclass(frozen=True)
class MachineFacts:
    """Equipment of this machine.

    Attributes:
        memory_bytes: what this process may use; `free_bytes` of it is free now.
        shm_bytes: size of /dev/shm, through which ranks on one host exchange; 0: there is none.
        meters: in the order of preference.
        clock_control: whether clocks may be set; `clock_note` says why not and what to run.
        deepspeed_ops: op to where it stands ready: "installed" or a folder of compiled ones; an op
            that is missing is compiled when first used.
        missing: what is not permitted or not there, with what an administrator runs.
    """

    host: str
    python: str
    cores: int
    memory_bytes: int
    free_bytes: int
    shm_bytes: int
    driver: str
    gpus: tuple[GpuFacts, ...]
    gpu_note: str
    meters: tuple[MeterFacts, ...]
    clock_control: bool
    clock_note: str
    compilers: Mapping[str, str | None]
    packages: Mapping[str, str | None]
    deepspeed_ops: Mapping[str, str]
    notes: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()

    @property
    def ready(self) -> bool:
        """True if nothing is missing."""
        return not self.missing

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON."""
        return {**asdict(self), "ready": self.ready}

    def lines(self) -> list[str]:
        """Return the facts as text, one a line; the last say what is missing, or "ready"."""
        gib = 2**30
        lines = [
            f"machine     {self.host}, {self.cores} usable cores, Python {self.python}",
            f"memory      {self.memory_bytes / gib:.1f} GiB, {self.free_bytes / gib:.1f} GiB free; "
            f"/dev/shm {self.shm_bytes / gib:.1f} GiB",
        ]
        lines += [
            f"GPU {gpu.index:<8}{gpu.name}, {gpu.memory_bytes / gib:.1f} GiB, {gpu.uuid}"
            + FORGETS * (not gpu.persistence_mode)
            for gpu in self.gpus
        ]
        lines.append(f"driver      {self.driver}" if self.gpus else f"GPUs        {self.gpu_note}")
        lines += [f"meter       {m.name}: {m.note}" for m in self.meters if m.available]
        if absent := [meter.name for meter in self.meters if not meter.available]:
            lines.append(f"            not available: {', '.join(absent)}")
        lines.append(f"clocks      {'may be set' if self.clock_control else self.clock_note}")
        paths = ", ".join(f"{name}: {path or '-'}" for name, path in self.compilers.items())
        lines.append(f"compilers   {paths}")
        versions = ", ".join(f"{name} {version or '-'}" for name, version in self.packages.items())
        lines.append(f"packages    {versions}")
        if self.packages.get("deepspeed"):
            ops = ", ".join(self.deepspeed_ops) or "none yet; each is compiled when first used"
            lines.append(f"ops         compiled: {ops}")
        lines += [f"note        {note}" for note in self.notes]
        if self.ready:
            return [*lines, "ready"]
        return [*lines, *(line for thing in self.missing for line in thing.text())]


def _gpu_facts(
    nvml: Any, notes: list[str], missing: list[Missing]
) -> tuple[tuple[GpuFacts, ...], str, str]:
    """Return the visible GPUs, the driver's version, and the reason if there are none.

    GPUs that cannot be used are noted; where GPUs cannot be asked at all, that is missing.
    """
    if no_gpu_wanted(os.environ):
        return (), "", "none is visible to this process"
    try:
        nvml = open_nvml(nvml)
    except NoDriver as error:
        return (), "", f"none: {error}"
    except MeterError as error:
        missing.append(Missing(f"usable GPUs: {error}"))
        return (), "", f"none usable: {error}"
    try:
        driver = str(ask(nvml, "", nvml.nvmlSystemGetDriverVersion))
        notes += [f"GPU {i} cannot be used: {why}" for i, why in unusable_gpus(nvml).items()]
        facts = []
        for gpu in visible_gpus(nvml):
            total = ask(nvml, 0, partial(gpu_memory_bytes, nvml, gpu.handle))
            keeps = ask(nvml, 1, partial(nvml.nvmlDeviceGetPersistenceMode, gpu.handle))
            facts.append(GpuFacts(gpu.index, gpu.uuid, gpu.name, total, bool(keeps)))
        return tuple(facts), driver, "" if facts else "none is visible to this process"
    except (InputError, MeterError) as error:
        missing.append(Missing(f"usable GPUs: {error}"))
        return (), "", f"none usable: {error}"
    finally:
        ask(nvml, None, nvml.nvmlShutdown)


def _meter_facts(
    nvml: Any, powercap: str | Path, hwmon: str | Path, core: str
) -> Iterator[MeterFacts]:
    for name in METERS:
        try:
            meter = open_meter(
                nvml=nvml, prefer=name, powercap=powercap, hwmon=hwmon, envelope=load_device(core)
            )
        except InputError as error:
            yield MeterFacts(name, False, str(error).partition("metered: ")[2] or str(error))
        else:
            meter.close()
            yield MeterFacts(name, True, meter.info.source.removeprefix(f"{name}: "))


def _clock_facts(
    nvml: Any, environ: Mapping[str, str], sys: Path, rapl: MeterFacts, *, gpus: int, slurm: bool
) -> tuple[bool, str, list[Missing]]:
    """Return whether clocks may be set, why not, and what permits them."""
    if not gpus:
        cores = CpuGovernor(sys, guarded=False)
        cores.close()
        missing = list(missing_of_cores(cores, "" if rapl.available else rapl.note))
        if cores.can_set and not rapl.available:
            return False, "set only where energy is metered (RAPL)", missing
        return cores.can_set, "not permitted" if missing else cores.why_not, missing
    try:
        governor = NvmlGovernor(nvml=nvml, environ=environ, guard_nvml="")
    except (MeterError, InputError) as error:
        return False, f"cannot be set: {error}", []
    governor.close()
    if governor.can_set:
        return True, "", []
    if "needs root" not in governor.why_not:
        return False, governor.why_not, []
    return False, "not permitted", [missing_clocks(environ, slurm=slurm)]


def _deepspeed_ops(extensions: Path) -> tuple[dict[str, str], list[str]]:
    """Return where each op is ready, and notes, without importing deepspeed."""
    ops: dict[str, str] = {}
    notes = []
    spec = importlib.util.find_spec("deepspeed")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        record = Path(folder) / "git_version_info_installed.py"
        found = re.search(r"^installed_ops=(\{.*\})$", _read(record), flags=re.MULTILINE)
        if found:
            installed: dict[str, bool] = ast.literal_eval(found.group(1))
            ops |= {op: "installed" for op, there in installed.items() if there}
    for built in sorted(extensions.glob("**/*.so")):
        ops.setdefault(built.stem, str(built.parent))
    for lock in sorted(extensions.glob("**/lock")):
        notes.append(
            f"{lock} is there: a build is under way, or one was killed and every later one waits "
            "for it for ever; if none runs, remove the file"
        )
    return dict(sorted(ops.items())), notes


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def machine_facts(
    *,
    nvml: Any = None,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    powercap: str | Path = "/sys/class/powercap",
    hwmon: str | Path = "/sys/class/hwmon",
    extensions: str | Path | None = None,
    core: str = "cpu-core",
    which: Callable[[str], str | None] = shutil.which,
    sys: str | Path = "/sys",
    environ: Mapping[str, str] | None = None,
) -> MachineFacts:
    """Collect the facts without changing anything or importing a framework.

    Args:
        extensions: where compiled DeepSpeed ops are kept; None takes
            `tuner.workload.node.rank_server`'s folder.
    """
    environ = os.environ if environ is None else environ
    total_bytes, free_bytes = host_memory(proc=proc, cgroup=cgroup)
    broken: list[Missing] = []
    notes: list[str] = []
    gpus, driver, gpu_note = _gpu_facts(nvml, notes, broken)
    meters = tuple(_meter_facts(nvml, powercap, hwmon, core))
    rapl = next(meter for meter in meters if meter.name == "rapl")
    clock_control, clock_note, missing = _clock_facts(
        nvml, environ, Path(sys), rapl, gpus=len(gpus), slurm=which("sbatch") is not None
    )
    ops, of_ops = _deepspeed_ops(Path(extensions_dir() if extensions is None else extensions))
    notes += of_ops
    cores = granted_cores(proc=proc, cgroup=cgroup)
    if not why_few_cores(cores, len(gpus), LEAST_CORES):  # which is missing, below
        notes += filter(None, [why_few_cores(cores, len(gpus), ENOUGH_CORES)])
    compilers = {name: which(name) for name in COMPILERS if name != "nvcc" or gpus}
    if gpus and any(meter.name == "hwmon" and meter.available for meter in meters):
        notes.append(
            "energy is that of the GPUs; hwmon meters the whole superchips, with the processors to "
            "which offload moves work, and is shown beside"
        )
    if compilers["ninja"] is None:  # pip puts it beside the interpreter, where ranks find it
        compilers["ninja"] = which(str(Path(executable).parent / "ninja"))
    shm_bytes = shared_memory_bytes()
    packages = {name: installed_version(name) for name in PACKAGES}
    return MachineFacts(
        host=platform.node(),
        python=platform.python_version(),
        cores=max(1, int(cores)),
        memory_bytes=total_bytes,
        free_bytes=free_bytes,
        shm_bytes=shm_bytes,
        driver=driver,
        gpus=gpus,
        gpu_note=gpu_note,
        meters=meters,
        clock_control=clock_control,
        clock_note=clock_note,
        compilers=compilers,
        packages=packages,
        deepspeed_ops=ops,
        notes=tuple(notes),
        missing=(
            *broken,
            *missing_parts(
                packages,
                compilers,
                gpus=len(gpus),
                cores=cores,
                shm_bytes=shm_bytes,
                nvml=nvml,
            ),
            *missing,
        ),
    )
