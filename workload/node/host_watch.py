"""Contention on the host, by rank: time on a core, in wait for one, and held back by a quota."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.workload.measure.stragglers import RankState
from tuner.workload.node.host import cgroup_folders


@dataclass(frozen=True)
class _Times:
    at_s: float
    busy_s: float
    waiting_s: Mapping[int, float]  # by thread
    held_s: float
    nice: int


class HostWatch:
    """Readings of the kernel's counters of each rank's process, over the latest readings.

    Args:
        kept: number of readings between which the shares are taken.
    """

    def __init__(
        self,
        *,
        kept: int = 60,
        proc: str | Path = "/proc",
        cgroup: str | Path = "/sys/fs/cgroup",
    ) -> None:
        self._kept, self._proc, self._cgroup = kept, Path(proc), Path(cgroup)
        self._read: dict[int, deque[_Times]] = {}

    def read(self, pids: Mapping[int, int]) -> None:
        """Read the counters of each rank's process; a process that has ended is passed over."""
        for rank, pid in pids.items():
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._read.setdefault(rank, deque(maxlen=self._kept)).append(self._times(pid))

    def _times(self, pid: int) -> _Times:
        folder = self._proc / str(pid)
        # Fields from the third on, behind the name (man 5 proc_pid_stat).
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        waiting_s = {}
        for task in folder.glob("task/[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
                waiting_s[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
        held_s = 0.0
        for group in cgroup_folders(self._proc, self._cgroup, "cpu", pid=str(pid)):
            held_s = max(held_s, _held_s(group / "cpu.stat"))
        busy_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return _Times(time.monotonic(), busy_s, waiting_s, held_s, int(fields[16]))

    def state(self, state: RankState) -> RankState:
        """Return a rank's state with what its process tells."""
        read = self._read.get(state.rank)
        if not read or read[-1].at_s <= read[0].at_s:
            return state
        first, last = read[0], read[-1]
        seconds = last.at_s - first.at_s
        waited_s = sum(
            now_s - first.waiting_s.get(task, now_s) for task, now_s in last.waiting_s.items()
        )
        return replace(
            state,
            nice=last.nice,
            busy=(last.busy_s - first.busy_s) / seconds,
            waiting=waited_s / seconds,
            held=max(0.0, last.held_s - first.held_s) / seconds,
        )


def _held_s(stat: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time"):
                return int(value) / (1e6 if name == "throttled_usec" else 1e9)
    return 0.0
