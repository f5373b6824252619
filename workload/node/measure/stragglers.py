"""Attribution of lost time to ranks: the ones for which all others wait, and the evidence why.

In each step every rank notes when its own share is done and it waits for the others' gradients. A
rank that arrives behind its peers in most blocks of steps is a straggler. Rare long steps of one
rank (a checkpoint, an evaluation) are in few blocks, and stalls of all ranks put none behind.

Time is also lost to others who use the devices: processes that take a share s of the cores can make
steps take up to 1 / (1 - s) times as long, by how much nobody knows, so figures of such windows are
much less certain.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import read_fields
from tuner.workload.node.host import CONTENTION_SHARE, cgroup_folders
from tuner.workload.records.probe import Measurement

#: A rank is a straggler from this share of the step on by which it is behind the mean of the
#: others, in the median of the blocks; in three quarters of them it must be behind by half of that.
LEAST = 0.03
#: Least length of a block, seconds: a control group's quota holds back in periods of 0.1 s.
BLOCK_S = 1.0
#: Least number of blocks to judge by, and the number of the latest that are kept.
FEWEST, KEPT = 8, 60
#: A wait for a core sets a rank apart if it exceeds the others' by this factor, and by this many
#: seconds in each second: on a busy machine all ranks wait, by amounts that scatter.
LONGER, LONGER_S = 1.25, 0.02
#: Steps after which no arrival of a step is expected any more: ranks tell when their device has
#: got there.
LAG = 10

#: Words for each cause, with the rank's value and the others'.
CAUSES: Mapping[str, str] = {
    "memory": "{:.0f} memory errors where the others had {:.0f}",
    "hardware": "power brake or hardware slowdown, {:,.0f} MHz where the others run {:,.0f}",
    "heat": "heat, {:,.0f} MHz where the others run {:,.0f}",
    "power": "power limit, {:,.0f} MHz where the others run {:,.0f}",
    "clock": "{:,.0f} MHz where the others run {:,.0f}, without a reason",
    "quota": "its control group's quota held its threads back {:.2g} s in each second (other "
    "ranks: {:.2g} s)",
    "priority": "nice {:.0f} where the others have {:.0f}",
    "cores": "its threads waited {:.2g} s for a core in each second (other ranks: {:.2g} s)",
    "idle": "its threads computed {:.2g} s in each second (other ranks: {:.2g} s): it waits for "
    "something",
    "unknown": "neither its device nor its host tells why",
}


@dataclass(frozen=True)
class RankState:
    """State of a rank's device and process over the time that is judged; None: not known."""

    rank: int
    node: str = ""
    device: int | None = None  # its number on the node
    clock_MHz: float | None = None
    power_W: float | None = None
    temperature_C: float | None = None
    #: Share of the time with a reason to lower the clock: "hw", "thermal", "power".
    throttled: Mapping[str, float] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)  # as of `Platform.faults`
    nice: int | None = None  # higher is served later
    #: Seconds in each second in which it computed on a core, waited for one, and was held back by
    #: its control group's quota; a sum over threads, which may exceed 1.
    busy: float | None = None
    waiting: float | None = None
    held: float | None = None


def device_state(
    rank: int, device: int, seen: Sequence[Mapping[int, Mapping[str, float]]], node: str = ""
) -> RankState:
    """Return the state of a rank by samples of its device's states (`device_states`)."""
    states_of_device = [states[device] for states in seen if device in states]

    def usual(name: str) -> float | None:
        # Between steps and while it starts a device is idle.
        values = [state[name] for state in states_of_device if name in state]
        return statistics.median(values) if values else None

    names = {name for state in states_of_device for name in state if name.startswith("throttle_")}
    throttled = {
        name.removeprefix("throttle_"): statistics.fmean(
            state.get(name, 0.0) for state in states_of_device
        )
        for name in sorted(names)
    }
    return RankState(
        rank,
        node,
        device if states_of_device else None,
        usual("clock_MHz"),
        usual("power_W"),
        usual("temperature_C"),
        throttled,
    )


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait."""

    state: RankState
    behind: float  # the mean of the others, as a share of the step's time
    #: Share of the step that would be saved if it arrived with the latest of the others that are no
    #: stragglers.
    cost: float
    #: What sets it apart (`CAUSES`), and the others' median of the same.
    cause: str
    value: float = math.nan
    usual: float = math.nan


class Arrivals:
    """Arrivals of the ranks of a job, collected into blocks of whole steps."""

    def __init__(self, block_s: float = BLOCK_S) -> None:
        self._block_s = block_s
        self._open: dict[int, dict[int, float]] = {}
        self._last: tuple[int, float] | None = None
        self._ranks: set[int] = set()
        #: Seconds, and the arrivals in each step, by rank.
        self._block: tuple[float, list[dict[int, float]]] = 0.0, []
        self._blocks: deque[tuple[float, list[dict[int, float]]]] = deque(maxlen=KEPT)

    def add(self, rank: int, step: int, time_s: float) -> None:
        """Add a rank's arrival in a step; of several in a step the last one counts."""
        self._ranks.add(rank)
        self._open.setdefault(step, {})[rank] = time_s
        self.close(step - LAG)

    def close(self, step: int) -> None:
        """Add the steps up to `step`, without those that a rank did not report."""
        for each in sorted(number for number in self._open if number <= step):
            self._take(each, self._open.pop(each))

    def _take(self, step: int, arrived: dict[int, float]) -> None:
        last, self._last = self._last, None
        if len(arrived) < max(2, len(self._ranks)):
            return
        latest_s = max(arrived.values())
        self._last = step, latest_s
        if last is None or last[0] != step - 1 or latest_s <= last[1]:
            return
        seconds, arrivals = self._block
        self._block = seconds + (latest_s - last[1]), [*arrivals, arrived]
        if self._block[0] >= self._block_s:
            self._blocks.append(self._block)
            self._block = 0.0, []

    @property
    def blocks(self) -> int:
        """Number of blocks to judge by."""
        return len(self._blocks)

    def behind(self) -> dict[int, list[float]]:
        """Return by rank, for each block, its mean distance behind the mean of the others.

        As a share of the steps' time; negative if it is ahead.
        """
        found: dict[int, list[float]] = {rank: [] for rank in sorted(self._ranks)}
        for seconds, arrivals in self._blocks:
            for rank, shares in found.items():
                late_s = 0.0
                for arrived in arrivals:
                    rest_s = sum(arrived.values()) - arrived[rank]
                    late_s += arrived[rank] - rest_s / (len(arrived) - 1)
                shares.append(late_s / seconds)
        return found

    def cost(self, ranks: Sequence[int]) -> float:
        """Return the median share of the steps' time for which the other ranks wait for these."""
        shares = []
        for seconds, arrivals in self._blocks:
            lost_s = 0.0
            for arrived in arrivals:
                others = [time_s for rank, time_s in arrived.items() if rank not in ranks]
                lost_s += max(0.0, max(arrived.values()) - max(others)) if others else 0.0
            shares.append(lost_s / seconds)
        return statistics.median(shares)


def late_ranks(arrivals: Arrivals) -> dict[int, float]:
    """Return the ranks that are behind in most blocks, with the median share of the step."""
    if arrivals.blocks < FEWEST:
        return {}
    found = {}
    for rank, shares in arrivals.behind().items():
        ordered = sorted(shares)
        middle, quarter = statistics.median(ordered), ordered[len(ordered) // 4]
        if middle >= LEAST and quarter >= LEAST / 2:
            found[rank] = middle
    return found


def stragglers(arrivals: Arrivals, states: Mapping[int, RankState]) -> list[Straggler]:
    """Return the ranks for which the others wait, the worst first, each with its cause."""
    late = late_ranks(arrivals)
    if not late:
        return []
    cost = arrivals.cost(sorted(late))
    found = []
    for rank, behind in late.items():
        state = states.get(rank, RankState(rank))
        others = [other for each, other in sorted(states.items()) if each not in late]
        cause, value, usual = cause_of(state, others)
        # Of several, one alone would only leave the wait for the next.
        found.append(Straggler(state, behind, min(cost, behind), cause, value, usual))
    return sorted(found, key=lambda each: -each.behind)


def cause_of(state: RankState, others: Sequence[RankState]) -> tuple[str, float, float]:
    """Return the figure in which a rank differs most, its value and the others' median.

    The first that applies, the devices' own reasons before the host's. A difference that a fault
    would not explain (a clock 1 % lower) is none.
    """
    clock = _pair(state, others, "clock_MHz")
    slower = clock is not None and clock[0] < 0.98 * clock[1]
    if clock is not None and slower:
        for reason, cause in (("hw", "hardware"), ("thermal", "heat"), ("power", "power")):
            usual = [other.throttled.get(reason, 0.0) for other in others]
            if state.throttled.get(reason, 0.0) > 0.25 + statistics.median(usual or [0.0]):
                return cause, *clock
    for name, count in state.faults.items():
        usual = [other.faults.get(name, 0) for other in others]
        if count > max(usual, default=0):
            return "memory", count, statistics.median(usual or [0])
    if clock is not None and slower:
        return "clock", *clock
    held, nice = _pair(state, others, "held"), _pair(state, others, "nice")
    if held is not None and held[0] > 0.02 + held[1]:
        return "quota", *held
    waiting = _pair(state, others, "waiting")
    if waiting is not None and waiting[0] > LONGER_S + LONGER * waiting[1]:
        if nice is not None and nice[0] > nice[1]:
            return "priority", *nice
        return "cores", *waiting
    busy = _pair(state, others, "busy")
    if busy is not None and busy[0] < 0.98 * busy[1]:
        return "idle", *busy
    return "unknown", math.nan, math.nan


def _pair(state: RankState, others: Sequence[RankState], name: str) -> tuple[float, float] | None:
    value = getattr(state, name)
    usual = [getattr(other, name) for other in others if getattr(other, name) is not None]
    return (value, statistics.median(usual)) if value is not None and usual else None


def of_environment(environment: Mapping[str, Any]) -> list[Straggler]:
    """Return the stragglers of a probe's environment; without those that cannot be read, since a
    record may be a stranger's."""
    found, given = list[Straggler](), environment.get("stragglers", ())
    for each in given if isinstance(given, list | tuple) else ():
        with suppress(InputError, KeyError, TypeError, AttributeError):
            CAUSES[each["cause"]]
            found.append(
                read_fields(
                    Straggler,
                    each,
                    "straggler",
                    finite=("behind", "cost"),
                    state=lambda part: read_fields(RankState, part, "rank"),
                )
            )
    return found


def words(straggler: Straggler) -> tuple[str, str, str]:
    """Return who it is, the evidence and the cost: "GPU 5", "heat, ...", "9 %"."""
    state = straggler.state
    subject = f"rank {state.rank}" if state.device is None else f"GPU {state.device}"
    if state.node:
        subject += f" of node {state.node}"
    why = CAUSES[straggler.cause].format(straggler.value, straggler.usual)
    return subject, why, f"{100 * straggler.cost:.0f} %"


def sentence(straggler: Straggler) -> str:
    """Return the words: "GPU 5: heat, ...; costs 9 % of the step"."""
    subject, why, cost = words(straggler)
    return f"{subject}: {why}; costs {cost} of the step"


@dataclass(frozen=True)
class _Times:
    at_s: float
    busy_s: float
    waiting_s: Mapping[int, float]  # by thread
    held_s: float
    nice: int


class HostWatch:
    """Readings of the kernel's counters of each rank's process, of which the latest are kept."""

    def __init__(
        self,
        *,
        kept: int = KEPT,
        proc: str | Path = "/proc",
        cgroup: str | Path = "/sys/fs/cgroup",
    ) -> None:
        self._kept, self._proc, self._cgroup = kept, Path(proc), Path(cgroup)
        self._read: dict[int, deque[_Times]] = {}

    def read(self, pids: Mapping[int, int]) -> None:
        """Read the counters of each rank's process; a process that has ended is passed over."""
        for rank, pid in pids.items():
            with suppress(OSError, ValueError, IndexError):
                self._read.setdefault(rank, deque(maxlen=self._kept)).append(self._times(pid))

    def _times(self, pid: int) -> _Times:
        folder = self._proc / str(pid)
        # Fields from the third on, behind the name (man 5 proc_pid_stat).
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        waiting_s = {}
        for task in folder.glob("task/[0-9]*"):
            with suppress(OSError, ValueError, IndexError):  # the thread has ended
                waiting_s[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
        held_s = 0.0
        for group in cgroup_folders(self._proc, self._cgroup, "cpu", pid=str(pid)):
            held_s = max(held_s, _held_s(group / "cpu.stat"))
        busy_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return _Times(time.monotonic(), busy_s, waiting_s, held_s, int(fields[16]))

    def state(self, state: RankState) -> RankState:
        """Return a rank's state with figures of its process."""
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
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time"):
                return int(value) / (1e6 if name == "throttled_usec" else 1e9)
    return 0.0


#: Relative error of a window in which another process used a device, whose share is not known: as
#: of half of it.
DEVICE_ERROR = math.log(2)
#: Nothing is slowed down by more than this share of the cores.
MOST = 0.95


@dataclass(frozen=True)
class ForeignLoad:
    """Use of the devices by others during a window.

    Attributes:
        share: of the cores.
        device: phrase on another process on a device; empty without one.
    """

    share: float = 0.0
    device: str = ""

    @property
    def on_cores(self) -> bool:
        """Whether others use so much of the cores that it matters."""
        return self.share > CONTENTION_SHARE

    @property
    def notes(self) -> tuple[str, ...]:
        """Phrases on the use of the devices by others; empty if too little to matter."""
        cores = f"other processes used {self.share:.0%} of the cores meanwhile"
        return (*([cores] if self.on_cores else []), *filter(None, [self.device]))

    @property
    def error(self) -> float:
        """Relative standard error that it adds to step time and power."""
        cores = -math.log(1 - min(self.share, MOST)) if self.on_cores else 0.0
        return math.hypot(cores, DEVICE_ERROR if self.device else 0.0)

    def widened(self, measured: Measurement) -> Measurement:
        """Return the measurement with the load, and with the errors that it adds."""
        measured = replace(measured, foreign_share=self.share, foreign_device=bool(self.device))
        if not (error := self.error):
            return measured

        def wider(se: float, value: float) -> float:
            return math.hypot(0.0 if math.isnan(se) else se, error * value)

        return replace(
            measured,
            step_time_se_s=wider(measured.step_time_se_s, measured.step_time_s),
            power_se_W=wider(measured.power_se_W, measured.power_W),
        )
