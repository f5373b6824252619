"""Facts about this machine that `tuner doctor` shows.

Versions come from the records of installed packages, and compiled ops from their folders, so that
neither torch nor deepspeed nor ray is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version
from sys import executable
from typing import Any

from tuner.search_spaces.cluster import Cluster, load_device
from tuner.search_spaces.errors import InputError
from tuner.workload.meters import MeterError
from tuner.workload.node.host import (
    ENOUGH_CORES,
    LEAST_CORES,
    granted_cores,
    host_memory,
    shared_memory_bytes,
    why_few_cores,
)
from tuner.workload.node.ops import extensions_dir, installed_version
from tuner.workload.node.readiness import NEEDED, Missing, missing_parts
from tuner.workload.node.torch_build import installed_torch
from tuner.workload.platforms import PLATFORMS
from tuner.workload.platforms.base import DeviceFacts, GpuFacts, Platform

PACKAGES = ("torch", "deepspeed", "transformers", "ray", "optuna", "nvidia-ml-py")
COMPILERS = ("g++", "ninja", "nvcc")
FORGETS = ", persistence mode off (it forgets its clocks when no process uses it)"


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
        clock_control: whether clocks may be set; `clock_note` says why not and what to run.
        deepspeed_ops: op to where it stands ready: "installed" or a folder of compiled ones.
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

    def verdict(self) -> list[str]:
        """Return whether probes can run, machine, energy, clocks, software, and what is missing."""
        free = f"{self.free_bytes / 2**30:.0f} GiB free"
        devices = f"{self.cores} cores, {free}, no GPU: each core is a device"
        if self.gpus:
            devices = f"{len(self.gpus)} x {self.gpus[0].name}, {self.cores} cores, {free}"
        meter = next((meter for meter in self.meters if meter.available), None)
        energy = "nothing here meters or estimates it"
        if meter is not None:
            kind = (
                "estimated, not metered"
                if meter.name == "estimated"
                else f"metered by {meter.name}"
            )
            energy = f"{kind}: {meter.note}"
        absent = [name for name in NEEDED if self.packages.get(name) is None]
        if absent:
            verdict = f"cannot train: {', '.join(absent)} missing; pip install 'joulefront[train]'"
        elif meter is None:
            verdict = "cannot measure: there is no meter"
        elif self.missing:
            verdict = "probes train here; what is missing is listed below"
        elif meter.name == "estimated":
            verdict = (
                "ready, without an energy meter: times are measured, energies are time x watts"
            )
        else:
            verdict = "ready: probes train here, in real DeepSpeed processes"
        versions = (f"{name} {version}" for name, version in self.packages.items() if version)
        return [
            f"verdict   {verdict}",
            f"machine   {self.host}: {devices}",
            f"energy    {energy}",
            f"clocks    {'searched, and put back' if self.clock_control else 'left as they are'}",
            f"software  Python {self.python}, {', '.join(versions)}",
            *(line for thing in self.missing for line in thing.text()),
        ]


def _meter_facts(platforms: Sequence[Platform], core: str) -> Iterator[MeterFacts]:
    cores = Cluster("this-machine", load_device(core), 1)
    for name, opened in (pair for each in platforms for pair in each.meters(cores).items()):
        try:
            meter = opened()
        except (MeterError, InputError) as error:
            yield MeterFacts(name, False, str(error))
        else:
            meter.close()
            yield MeterFacts(name, True, meter.info.source.removeprefix(f"{name}: "))


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


def _notes(gpus: int, cores: float) -> Iterator[str]:
    few = why_few_cores(cores, gpus, ENOUGH_CORES)
    if few and not why_few_cores(cores, gpus, LEAST_CORES):  # which is missing
        yield few


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def machine_facts(
    *,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    extensions: str | Path | None = None,
    core: str = "cpu-core",
    which: Callable[[str], str | None] = shutil.which,
    sys: str | Path = "/sys",
    environ: Mapping[str, str] | None = None,
) -> MachineFacts:
    """Collect the facts without changing anything or importing a framework."""
    environ = os.environ if environ is None else environ
    total_bytes, free_bytes = host_memory(proc=proc, cgroup=cgroup)
    platforms = [kind(environ, sys=sys) for kind in PLATFORMS.values()]
    looked = [(each, each.facts()) for each in platforms]
    unseen = (platforms[-1], DeviceFacts(why_none="; ".join(f.why_none for _, f in looked[:-1])))
    platform, found = next((pair for pair in looked if pair[1].devices), unseen)
    gpus, broken = found.devices, [facts.why_none for _, facts in looked if facts.broken]
    clocks = platform.clocks()
    ops, of_ops = _deepspeed_ops(Path(extensions_dir() if extensions is None else extensions))
    cores = granted_cores(proc=proc, cgroup=cgroup)
    notes = (
        *(note for _, facts in looked for note in facts.notes),
        *of_ops,
        *_notes(len(gpus), cores),
    )
    compilers = {name: which(name) for name in COMPILERS if name != "nvcc" or gpus}
    if compilers["ninja"] is None:  # pip puts it beside the interpreter, where ranks find it
        compilers["ninja"] = which(str(Path(executable).parent / "ninja"))
    shm_bytes = shared_memory_bytes()
    packages = {name: installed_version(name) for name in PACKAGES}
    torch = installed_torch() if gpus else None
    return MachineFacts(
        host=socket.gethostname(),
        python=python_version(),
        cores=max(1, int(cores)),
        memory_bytes=total_bytes,
        free_bytes=free_bytes,
        shm_bytes=shm_bytes,
        driver=found.driver,
        gpus=gpus,
        gpu_note=f"none usable: {found.why_none}" if broken else found.why_none,
        meters=tuple(_meter_facts(platforms, core)),
        clock_control=clocks.can_set,
        clock_note=clocks.note,
        compilers=compilers,
        packages=packages,
        deepspeed_ops=ops,
        notes=notes,
        missing=(
            *(Missing(f"usable GPUs: {why}") for why in broken),
            *missing_parts(
                packages,
                compilers,
                gpus=len(gpus),
                cores=cores,
                shm_bytes=shm_bytes,
                why_not_torch=platform.why_not_torch(torch) if torch else "",
            ),
            *clocks.missing,
        ),
    )
