"""Governor of processors: clocks by cpufreq, power limits by RAPL's power caps.

The knobs of a machine without GPUs, where a device is a core. `clock_MHz` is the highest clock that
a core may take (`scaling_max_freq`, with every driver: intel_pstate, amd-pstate, cppc_cpufreq of
Grace, acpi-cpufreq). `power_limit_W` caps each package, in its long-term and its short-term
constraint, because the long-term one alone acts after up to half a minute. (Linux,
Documentation/admin-guide/pm/cpufreq.rst and Documentation/power/powercap/powercap.rst.)
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.knobs import Value
from tuner.workload.node.clocks.base import (
    FASTEST,
    AppliedSettings,
    GovernorError,
    SetByOthers,
    all_or_nothing,
    require_settable,
    snapped,
)
from tuner.workload.node.clocks.own_guard import (
    READ_BACK,
    EarlierFile,
    Guard,
    put_back_files,
    written_by_others,
)

#: Cores whose clock is read ten times a second: reading one interrupts it.
CORES_READ = 16
#: Steps between the lowest and the highest clock of drivers that list none: the bus clock of x86.
STEP_MHZ = 100
#: The lowest power limit offered, as a share of the present one: an assumption, for the kernel
#: states no lowest limit.
LOWEST_LIMIT = 0.5


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(file: Path) -> int:
    text = _text(file)
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True)
class _Policy:
    """Cores that share one clock."""

    folder: Path
    cpus: frozenset[int]

    @property
    def offered_MHz(self) -> tuple[int, ...]:
        """Selectable clocks, ascending."""
        listed = _text(self.folder / "scaling_available_frequencies").split()
        if listed:
            return tuple(sorted({int(word) // 1000 for word in listed}))
        low, high = (_number(self.folder / f"cpuinfo_{end}_freq") // 1000 for end in ("min", "max"))
        return tuple(sorted(range(high, max(low, 1) - 1, -STEP_MHZ)))


@dataclass(frozen=True)
class _Package:
    folder: Path
    cores: int
    limits: tuple[Path, ...]
    limit_W: float


def _policies(root: Path, cpus: frozenset[int]) -> tuple[list[_Policy], str]:
    # And the reason if clocks cannot be set.
    found, others = [], set[int]()
    for folder in sorted(root.glob("devices/system/cpu/cpufreq/policy*")):
        members = frozenset(int(word) for word in _text(folder / "affected_cpus").split())
        if members & cpus:
            found.append(_Policy(folder, members))
            others |= members - cpus
    if not found or not cpus <= frozenset().union(*(policy.cpus for policy in found)):
        return [], "the kernel offers no clock control here (no cpufreq), as in a virtual machine"
    if others:
        return [], f"the cores share their clock with {_not_ours(others)}"
    return found, ""


def _not_ours(others: set[int]) -> str:
    return f"CPU {', '.join(map(str, sorted(others)))}, which this process may not use"


def _packages(root: Path, cpus: frozenset[int]) -> tuple[list[_Package], str]:
    # And the reason if their power cannot be capped.
    members: dict[int, set[int]] = {}
    for folder in root.glob("devices/system/cpu/cpu[0-9]*"):
        text = _text(folder / "topology/physical_package_id")
        if text.isdecimal():
            members.setdefault(int(text), set()).add(int(folder.name.removeprefix("cpu")))
    found = []
    for number, cores in sorted(members.items()):
        if not cores & cpus:
            continue
        if others := cores - cpus:
            return [], f"package {number} is shared with {_not_ours(others)}"
        package = _package(root, number, len(cores))
        if package is None:
            return [], f"RAPL offers no power cap for package {number}"
        found.append(package)
    return found, "" if found else "the kernel does not tell the packages of these cores"


def _package(root: Path, number: int, cores: int) -> _Package | None:
    for zone in sorted(root.glob("class/powercap/intel-rapl:*")):
        if _text(zone / "name") != f"package-{number}":
            continue
        limits = {}
        for name in sorted(zone.glob("constraint_*_name")):
            if (term := _text(name)) in ("long_term", "short_term"):
                limits[term] = name.with_name(name.name.replace("_name", "_power_limit_uw"))
        if "long_term" in limits and (limit_uW := _number(limits["long_term"])):
            return _Package(
                zone, cores, tuple(limits[term] for term in sorted(limits)), limit_uW / 1e6
            )
    return None


def _why_not_writable(files: Sequence[Path], action: str) -> tuple[str, str]:
    # Writes what the files say into them; the second text is what permits it.
    for file in files:
        try:
            text = file.read_text().strip()
            file.write_text(text)
        except PermissionError:
            names = " ".join(sorted({re.sub(r"\d+(?=/[^/]*$)", "*", str(path)) for path in files}))
            grant = f"chgrp GROUP {names}; chmod g+w {names}"
            return (
                f"{action} needs root; an administrator can permit it to a group until the next "
                f"boot: {grant}",
                grant,
            )
        except OSError as error:
            return f"{action} is refused by {file}: {error.strerror}", ""
    return "", ""


class CpuGovernor:
    """Highest clock of the cores and power cap of their packages, through the kernel's files.

    `cpus` are the cores in the order of the ranks, None: those that this process may use.
    `why_no_clock` and `why_no_limit` are the reasons if clocks, or power limits, cannot be set; the
    other attributes are those of `CoreGovernor`.
    """

    def __init__(
        self,
        root: str | Path = "/sys",
        *,
        cpus: Iterable[int] | None = None,
        guarded: bool = True,
    ) -> None:
        chosen = os.sched_getaffinity(0) if cpus is None else cpus
        self._cpus = tuple(sorted(set(chosen)))
        self._closed = False
        self._guard = Guard("" if guarded else None)
        self._earlier: dict[Path, str] = {}
        self._written: dict[Path, int] = {}  # by this search, the last
        self._others: dict[Path, int] = {}  # by others, meanwhile
        self._changed: list[str] = []  # sentences on these
        self._read: tuple[Path, ...] = ()
        everything = frozenset(self._cpus)
        self._policies, self.why_no_clock = _policies(Path(root), everything)
        self._packages, self.why_no_limit = _packages(Path(root), everything)
        ceilings = [policy.folder / "scaling_max_freq" for policy in self._policies]
        caps = [file for package in self._packages for file in package.limits]
        self.clock_grant = self.limit_grant = ""
        if not self.why_no_clock:
            self.why_no_clock, self.clock_grant = _why_not_writable(ceilings, "setting clocks")
        if not self.why_no_limit:
            self.why_no_limit, self.limit_grant = _why_not_writable(caps, "capping power")
        self.can_set = not (self.why_no_clock and self.why_no_limit)
        self.why_not = "" if self.can_set else f"{self.why_no_clock}; {self.why_no_limit}"
        offered = [set(policy.offered_MHz) for policy in self._policies]
        common = set.intersection(*offered) if offered and not self.why_no_clock else set()
        self.supported_clocks_MHz = tuple(sorted(common))
        self.default_clock_MHz = min((_number(file) // 1000 for file in ceilings), default=0)
        limited = [] if self.why_no_limit else self._packages
        high_W = min((package.limit_W for package in limited), default=0.0)
        self.limit_range_W = (LOWEST_LIMIT * high_W, high_W)
        self.cores_per_package = max((package.cores for package in limited), default=0)
        self._watch(len(self._cpus))

    def _watch(self, ranks: int) -> None:
        cores = frozenset(self._cpus[:ranks])
        files = [
            policy.folder / "scaling_cur_freq" for policy in self._policies if policy.cpus & cores
        ]
        self._read = tuple(files[:CORES_READ])

    # ---- from a setting to the files' contents

    def _ceilings(self, value: Value, notes: list[str]) -> tuple[dict[Path, int], Value]:
        # In kHz, and the setting as snapped.
        if self.why_no_clock:
            raise InputError(f"clock_MHz cannot be set: {self.why_no_clock}")
        if not isinstance(value, int):
            legal = "an integer; cores take one clock for all"
            raise InvalidValue("clock_MHz", value, legal)
        if not self.supported_clocks_MHz:
            raise InvalidValue("clock_MHz", value, "none is offered")
        clock_MHz = snapped("clock_MHz", value, self.supported_clocks_MHz, notes)
        files: dict[Path, int] = {}
        for policy in self._policies:
            # Lowered first, restored last: the lowest clock must not be above the highest.
            lowest = policy.folder / "scaling_min_freq"
            lowest_kHz = int(self._earlier.get(lowest, _number(lowest)))
            if lowest_kHz > 1000 * clock_MHz or lowest in self._earlier:
                files[lowest] = min(lowest_kHz, 1000 * clock_MHz)
            files[policy.folder / "scaling_max_freq"] = 1000 * clock_MHz
        return files, clock_MHz

    def _caps(self, value: Value) -> dict[Path, int]:
        # In microwatts.
        if self.why_no_limit:
            raise InputError(f"power_limit_W cannot be set: {self.why_no_limit}")
        if not isinstance(value, int | float):
            legal = "a number of watts; the cores of a package share one limit"
            raise InvalidValue("power_limit_W", value, legal)
        low, high = self.limit_range_W
        if not low <= value <= high:
            raise InvalidValue("power_limit_W", value, f"from {low:g} to {high:g} for each package")
        files: dict[Path, int] = {}
        limit_uW = round(1e6 * value)
        for package in self._packages:
            for file in package.limits:
                # A short-term limit below the cap stays.
                files[file] = min(limit_uW, int(self._earlier.get(file, _number(file))))
            if _text(package.folder / "enabled") == "0":
                files[package.folder / "enabled"] = 1
        return files

    # ---- the protocol

    def apply(self, live: Settings, *, ranks: int | None = None) -> AppliedSettings:
        require_settable(self, live)
        if "memory_clock_MHz" in live:
            raise InputError("memory_clock_MHz cannot be set: it is a knob of GPUs")
        ranks = len(self._cpus) if ranks is None else min(ranks, len(self._cpus))
        self._watch(ranks)
        notes: list[str] = []
        settings, wanted = dict(live), dict[Path, int]()
        if "clock_MHz" in live:
            files, settings["clock_MHz"] = self._ceilings(live["clock_MHz"], notes)
            wanted |= files
        if "power_limit_W" in live:
            wanted |= self._caps(live["power_limit_W"])
        self._look()
        for path, value in wanted.items():
            if value > self._others.get(path, value):
                raise SetByOthers(
                    f"{live.short} is above what another process has set since: {path} says "
                    f"{self._others[path]}; it stays"
                )
        with all_or_nothing(self, live, "the processor", OSError):
            self._change(wanted)
        return AppliedSettings(Settings(settings), tuple(notes))

    def _files(
        self,
        without: Mapping[Path, int] | None = None,
        wanted: Mapping[Path, int] | None = None,
    ) -> list[EarlierFile]:
        # The last change first.
        numbers = [self._written, wanted or {}]
        return [
            EarlierFile(str(path), text, tuple(each[path] for each in numbers if path in each))
            for path, text in reversed(self._earlier.items())
            if not without or path not in without
        ]

    def _look(self) -> None:
        # What another process has written is what stood, from now on.
        for file in self._files():
            path, text = Path(file.path), ""
            with contextlib.suppress(OSError):
                text = written_by_others(file)
            if text:
                self._changed.append(
                    f"{path} says {text} and not the {self._written.pop(path)} of this search: "
                    "another process has set it"
                )
                self._earlier[path], self._others[path] = text, int(text)

    def foreign(self) -> tuple[str, ...]:
        self._look()
        changed, self._changed = tuple(self._changed), []
        return changed

    def _change(self, wanted: Mapping[Path, int]) -> None:
        # And restore those that were changed and are no longer wanted.
        for path in wanted:
            self._earlier.setdefault(path, path.read_text().strip())
        if self._earlier:
            self._guard.expect([], self._files(wanted=wanted))
        if problems := put_back_files(self._files(without=wanted)):
            raise GovernorError("; ".join(problems))
        self._written = {}
        for path, value in wanted.items():
            path.write_text(str(value))
            self._written[path] = value
        for path, value in wanted.items():
            now = _number(path)
            if abs(now - value) > READ_BACK * value:
                self._written[path] = now
                raise GovernorError(f"{path} says {now} after {value} was written")

    def delivered(self) -> dict[str, float]:
        """Return the clock of the fastest core that the job uses, MHz; empty if unknown."""
        clocks_kHz = [_number(file) for file in self._read]
        return {FASTEST: max(clocks_kHz) / 1000} if any(clocks_kHz) else {}

    def restore(self) -> None:
        self._look()
        if problems := put_back_files(self._files()):
            raise GovernorError("; ".join(problems))
        self._earlier, self._written = {}, {}
        self._guard.done()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._guard.take_over)  # there is one if restoring failed
            self.restore()
            for sentence in self.foreign():
                print(f"{sentence}; it stays", file=sys.stderr)
