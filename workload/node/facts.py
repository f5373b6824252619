"""Facts about this node, for `tuner doctor` and for a study that uses or refuses it.

`look` changes nothing and takes about a second. Versions come from the records of installed
packages: neither torch nor deepspeed nor ray is imported.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from platform import python_version
from sys import executable
from typing import Any

from tuner.search_spaces.cluster import Cluster, load_device
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.plugins import install_command
from tuner.workload.node.clocks.base import SOCKET as CLOCKS
from tuner.workload.node.host import (
    ENOUGH_CORES,
    granted_cores,
    host_memory,
    shared_memory_bytes,
    why_few_cores,
)
from tuner.workload.node.meters import MeterError
from tuner.workload.node.meters.base import METER, opener_of
from tuner.workload.node.meters.gpus import REMEDY, NoEnergy, permits_time_alone
from tuner.workload.node.platforms import SOCKET, detect_cluster, platform_of, platforms
from tuner.workload.node.platforms.base import (
    NEEDED,
    PROGRAMS,
    USED,
    DeviceFacts,
    GpuFacts,
    MissingItem,
    Platform,
    missing_parts,
)
from tuner.workload.scripts import SOCKET as ROUTES
from tuner.workload.scripts.installed import installed_torch, installed_version
from tuner.workload.scripts.job import why_not_built_in

#: Time after which it stays unknown whether packages can be imported, seconds.
IMPORT_LIMIT_S = 180.0
#: Program that prints the error of each import as JSON; what the imports print goes elsewhere.
_TRY = """
import importlib, json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for name in sys.argv[1:]:
    error = None
    try:
        importlib.import_module(name)
    except BaseException as raised:
        lines = f"{type(raised).__name__}: {raised}".splitlines()
        error = next(filter(None, lines), type(raised).__name__)
    print(json.dumps([name, error]), file=out, flush=True)
os._exit(0)
"""


def import_errors(
    packages: Sequence[str], *, python: str = sys.executable, limit_s: float = IMPORT_LIMIT_S
) -> Mapping[str, str]:
    """Return the first line of the error of each package that cannot be imported.

    The packages are imported in this order in one interpreter. One that ends the interpreter is
    named with its exit code; what was not tried by the limit is left out.
    """
    words = [python, "-c", _TRY, *packages]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {name: text for name, text in _responds(error.stdout or b"") if text}
    found = _responds(done.stdout)
    errors = {name: text for name, text in found if text}
    if len(found) < len(packages):
        errors[packages[len(found)]] = f"the interpreter ended with code {done.returncode}"
    return errors


def _responds(output: bytes) -> list[tuple[str, str | None]]:
    lines = [line for line in output.decode(errors="replace").split("\n") if line.endswith("]")]
    return [(name, error) for name, error in map(json.loads, lines)]


PACKAGES = (*USED, "nvidia-ml-py")
#: Programs that are looked for; nvcc only where there are GPUs.
_LOOKED_FOR = (*(program.name for program in PROGRAMS), "nvcc")
#: Host memory that must be free: ranks load the frameworks before they load the model.
FREE_EACH_BYTES = 2**30


@dataclass(frozen=True)
class MeterFacts:
    """Availability of a meter here, with its source or the reason against it."""

    name: str
    available: bool
    note: str
    estimated: bool = False


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node; `cluster` is None if it cannot be used at all, for its `trouble`.

    `memory_bytes` is what this process may use, `shm_bytes` the size of /dev/shm. `clock_note` says
    in a word why clocks cannot be set, `why_clocks_fixed` in a sentence.
    """

    host: str
    cluster: Cluster | None
    trouble: str = ""
    python: str = ""
    cores: float = 0.0
    memory_bytes: int = 0
    free_bytes: int = 0
    shm_bytes: int = 0
    driver: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    gpu_note: str = ""
    meters: tuple[MeterFacts, ...] = ()
    clock_control: bool = False
    clock_note: str = ""
    why_clocks_fixed: str = ""
    programs: Mapping[str, str | None] = field(default_factory=dict)
    packages: Mapping[str, str | None] = field(default_factory=dict)
    import_errors: Mapping[str, str] = field(default_factory=dict)
    busy: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[MissingItem, ...] = ()

    @property
    def ready(self) -> bool:
        """True if nothing is missing."""
        return not self.missing

    @property
    def kind(self) -> str:
        """The kind of device; empty if unknown."""
        return self.cluster.device.name if self.cluster is not None else ""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, without the cluster but for kind and number of its devices."""
        data = asdict(replace(self, cluster=None))
        del data["cluster"]
        devices = self.cluster.devices_per_node if self.cluster else 0
        return {**data, "kind": self.kind, "devices": devices, "ready": self.ready}

    def refusals(self, requested: Cluster | None = None) -> tuple[str, ...]:
        """Return the reasons against this node for a study, one sentence each; empty if it fits."""
        if self.cluster is None:
            return (f"node {self.host} is not used: {self.trouble}",)
        lacking = [name for name in NEEDED if self.packages.get(name) is None]
        found = []
        if lacking:
            names = f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'}"
            found.append(f"{names} not installed there ({install_command('train')})")
        if requested is not None and requested.clock_control and self.why_clocks_fixed:
            found.append(f"its clocks may not be set ({self.why_clocks_fixed})")
        devices = self._devices(requested)
        if why := self._few_cores(devices):
            found.append(why)
        need_bytes = min(FREE_EACH_BYTES * devices, self.memory_bytes // 2)
        if self.free_bytes < need_bytes:
            found.append(
                f"{self.free_bytes / 2**30:.1f} GiB of its memory are free, "
                f"and the ranks of a probe need {need_bytes / 2**30:.1f} GiB to start"
            )
        if self.busy:
            found.append("; ".join(self.busy))
        return tuple(f"node {self.host} is not used: {reason}" for reason in found)

    def warning(self, requested: Cluster | None = None) -> str:
        """Return one sentence if a rank of the study would have few cores, else ""."""
        few = self.cluster and self._few_cores(self._devices(requested), ENOUGH_CORES)
        return f"node {self.host}: {few}" if few else ""

    def _devices(self, requested: Cluster | None) -> int:
        assert self.cluster is not None
        here = self.cluster.devices_per_node
        return here if requested is None else min(here, requested.devices_per_node)

    def _few_cores(self, ranks: int, *each: float) -> str:
        assert self.cluster is not None
        platform = platform_of(self.cluster)
        return platform.why_few_cores(self.cores, ranks, *each) if self.cores else ""


def _meter_facts(
    platforms: Iterable[Platform], core: str, environ: Mapping[str, str]
) -> Iterator[MeterFacts]:
    cores = Cluster("this-machine", load_device(core), 1)
    every = [pair for each in platforms for pair in each.meters(cores).items()]
    if (own := opener_of(environ)) is not None:
        every = [(environ[METER], own)]
    for name, opened in every:
        try:
            meter = opened()
        except NoEnergy as error:
            yield MeterFacts(name, permits_time_alone(environ), f"{error}; {REMEDY}")
        except (MeterError, InputError) as error:
            yield MeterFacts(name, False, str(error))
        else:
            meter.close()
            source = meter.info.source.removeprefix(f"{name}: ")
            yield MeterFacts(name, True, source, meter.info.estimated)


def _in_use(inspected: Sequence[tuple[Platform, DeviceFacts]]) -> tuple[Platform, DeviceFacts]:
    # The first platform that has devices; the last one, of cores, is always usable.
    why_none = "; ".join(facts.why_none for _, facts in inspected[:-1])
    unseen = (inspected[-1][0], DeviceFacts(why_none=why_none))
    return next((pair for pair in inspected if pair[1].devices), unseen)


def _meters(
    inspected: Iterable[tuple[Platform, DeviceFacts]],
    in_use: tuple[Platform, DeviceFacts],
    core: str,
    environ: Mapping[str, str],
) -> tuple[MeterFacts, ...]:
    # A study opens the meters of its devices' platform only.
    platform, found = in_use
    metering = [each for each, _ in inspected if each is platform or not found.devices]
    return tuple(_meter_facts(metering, core, environ))


def _detected(
    platform: Platform, where: Mapping[str, Any]
) -> tuple[Cluster | None, tuple[str, ...], str]:
    """Return the cluster that this node is, its other users, and why it cannot be used."""
    try:
        return detect_cluster(**where), platform.busy(), ""
    except (InputError, MeterError) as error:
        return None, (), str(error)


def _why_not_torch(platform: Platform) -> str:
    torch = installed_torch()
    return platform.why_not_torch(torch) if torch else ""


def _notes(inspected: Iterable[DeviceFacts], cores: float, gpus: int) -> tuple[str, ...]:
    notes = [note for facts in inspected for note in facts.notes]
    notes += [*SOCKET.plugins.left_out, *CLOCKS.plugins.left_out, *ROUTES.plugins.left_out]
    notes.append(why_not_built_in())
    if not why_few_cores(cores, gpus):  # too few are among the missing parts
        notes.append(why_few_cores(cores, gpus, ENOUGH_CORES))
    return tuple(filter(None, notes))


def _unusable(
    broken: Sequence[str], trouble: str, busy: Sequence[str], meters: Sequence[MeterFacts]
) -> Iterator[MissingItem]:
    """Yield why every study on this node would be refused."""
    yield from (MissingItem(f"usable GPUs: {why}") for why in broken)
    if trouble and not broken:
        yield MissingItem(f"devices for a study: {trouble}")
    yield from (MissingItem(f"free devices: {phrase}") for phrase in busy)
    if not any(meter.available for meter in meters):
        yield MissingItem(f"a meter: {'; '.join(meter.note for meter in meters)}")


def _programs(find_program: Callable[[str], str | None], *, nvcc: bool) -> dict[str, str | None]:
    found = {name: find_program(name) for name in _LOOKED_FOR if name != "nvcc" or nvcc}
    if found["ninja"] is None:  # pip puts it beside the interpreter, where ranks find it
        found["ninja"] = find_program(str(Path(executable).parent / "ninja"))
    return found


def _packages(*, imports: bool) -> tuple[dict[str, str | None], Mapping[str, str]]:
    # Versions of the packages, and why some cannot be imported.
    found = {name: installed_version(name) for name in PACKAGES}
    installed = [name for name in NEEDED if found[name]]
    return found, import_errors(installed) if imports else {}


def inspect_node(
    *,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    affinity: Iterable[int] | None = None,
    core: str = "cpu-core",
    find_program: Callable[[str], str | None] = shutil.which,
    sys: str | Path = "/sys",
    environ: Mapping[str, str] | None = None,
    imports: bool = False,
) -> NodeFacts:
    """Collect this node's facts, with `imports` by importing the installed packages, too.

    Never raises: an error becomes their `trouble`.
    """
    environ = os.environ if environ is None else environ
    host = socket.gethostname()
    try:
        memory_bytes, free_bytes = host_memory(proc=proc, cgroup=cgroup)
    except InputError as error:
        return NodeFacts(host, None, str(error))
    every = [kind(environ, sys=sys) for kind in platforms().values()]
    inspected = [(each, each.facts()) for each in every]
    inspected = [(k, f) for k, f in inspected if k.always_listed or f.devices or f.broken]
    platform, found = _in_use(inspected)
    clocks = platform.clocks()
    where = {"proc": proc, "cgroup": cgroup, "environ": environ, "core": core, "sys": sys}
    cluster, busy, trouble = _detected(platform, where)
    broken = [facts.why_none for _, facts in inspected if facts.broken]
    cores = granted_cores(proc=proc, cgroup=cgroup, affinity=affinity)
    shm_bytes, gpus = shared_memory_bytes(), found.devices
    programs = _programs(find_program, nvcc=bool(gpus))
    packages, errors = _packages(imports=imports)
    why = _why_not_torch(platform) if gpus else ""
    given: dict[str, Any] = {"gpus": len(gpus), "cores": cores, "shm_bytes": shm_bytes}
    parts = missing_parts(packages, programs, why_not_torch=why, import_errors=errors, **given)
    meters = _meters(inspected, (platform, found), core, environ)
    return NodeFacts(
        host,
        cluster,
        trouble,
        python=python_version(),
        cores=cores,
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        shm_bytes=shm_bytes,
        driver=found.driver,
        gpus=gpus,
        gpu_note=f"none usable: {found.why_none}" if broken else found.why_none,
        meters=meters,
        clock_control=clocks.can_set,
        clock_note=clocks.note,
        why_clocks_fixed="" if cluster and cluster.clock_control else clocks.why_not,
        programs=programs,
        packages=packages,
        import_errors=errors,
        busy=busy,
        notes=_notes([facts for _, facts in inspected], cores, len(gpus)),
        missing=(*_unusable(broken, trouble, busy, meters), *parts, *clocks.missing),
    )
