"""Stragglers named: real ranks on this machine, of which one is slowed for a while, or none.

The parts before and after have no straggler. The truth of the one between is its step time against
theirs: a rank that is slowed by too little to cost `LEAST` of the step is no case. Both are judged
by themselves, from the marks that the hook sends while the ranks train.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure
from tuner.online.agent import watched
from tuner.online.marks import Mark, Marks
from tuner.workload.hook.watch import ADDRESS
from tuner.workload.measure.stragglers import Arrivals, HostWatch, RankState, stragglers
from tuner.workload.node.rank_server import control_socket

#: Slowdown of the step from which a slowed rank is to be named.
LEAST = 0.05
#: Length of the slowed part, and of those around it together, seconds.
PART_S = 14.0
#: (ranks, what slows the last one; cause that is to be named), in the order of the runs.
CASES: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (2, "sleep 0.1", ("idle",)),
    (2, "nice 10 2", ("priority", "cores")),
    (2, "quota 0.4", ("quota",)),
    (2, "none", ()),
    (4, "sleep 0.15", ("idle", "unknown")),
    (4, "quota 0.15", ("quota",)),
    (4, "nice 19 2", ("priority", "cores")),
    (4, "none", ()),
    (2, "stall 0.3", ()),
    (4, "stall 0.3", ()),
    (2, "sleep 0.3", ("idle",)),
    (2, "quota 0.25", ("quota",)),
)
#: Where `slow_rank.py` makes control groups.
GROUPS = "/sys/fs/cgroup/cpu"
SCRIPT = Path(__file__).with_name("slow_rank.py")


@dataclass(frozen=True)
class Part:
    """A part of a run.

    Attributes:
        slowed: rank that was slowed; None: none was.
        slowdown: of the step against the parts without a straggler.
        named: ranks that were named, with the cause.
    """

    slowed: int | None
    slowdown: float
    named: dict[int, str]


def run(ranks: int, words: Sequence[str], part_s: float = PART_S) -> tuple[Part, Part]:
    """Train once; return the part without a slowed rank, and that with it.

    Raises:
        RuntimeError: the training failed.
    """
    launch = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT), f"{part_s}"]
    command, assigned = watched([*launch, *words], Path.cwd())
    command[0] = str(Path(sys.executable).with_name("torchrun"))
    listener, address, remove = control_socket()
    environ = {**os.environ, **assigned, ADDRESS: address, "OMP_NUM_THREADS": "1"}
    taken: list[Mark] = []
    hosts = HostWatch(), HostWatch()
    with closing(Marks(listener)) as marks:
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        looked_s = 0.0
        while process.poll() is None:
            taken += [mark for mark in marks.wait(0.2) if mark.step > 5]
            now_s = time.monotonic()
            if taken and now_s - looked_s > 1:
                looked_s, since_s = now_s, now_s - taken[0].time_s
                # A second at the edge belongs to neither.
                if since_s < part_s / 2 - 1 or part_s / 2 + 1 < since_s < 1.5 * part_s:
                    hosts[int(since_s > part_s / 2)].read(marks.pids)
    remove()
    for pid in marks.pids.values():
        with contextlib.suppress(OSError):
            Path(GROUPS, f"joulefront-{pid}").rmdir()
    told = [line.split()[1:] for line in process.communicate()[0].splitlines() if "parts" in line]
    if not told:
        raise RuntimeError(f"{' '.join(command)} failed")
    if process.returncode:  # gloo aborts now and then as it is taken down: all was measured by then
        print(f"{' '.join(words)}: ended with {process.returncode} after its last step", flush=True)
    values = [float(word) for word in told[0]]
    parts = [values[at : at + 3] for at in (0, 3, 6)]
    usual_s = (parts[0][2] - parts[0][1] + parts[2][2] - parts[2][1]) / (parts[0][0] + parts[2][0])
    slowdown = (parts[1][2] - parts[1][1]) / parts[1][0] / usual_s - 1
    named = []
    for number, host in enumerate(hosts):
        inside = [part[1:] for at, part in enumerate(parts) if (at == 1) == (number == 1)]
        states = {rank: host.state(RankState(rank)) for rank in range(ranks)}
        found = stragglers(_arrivals(taken, inside), states)
        named.append({each.state.rank: each.cause for each in found})
    slowed = None if words[0] in ("none", "stall") else ranks - 1
    return Part(None, 0.0, named[0]), Part(slowed, slowdown, named[1])


def _arrivals(marks: Sequence[Mark], spans: Sequence[Sequence[float]]) -> Arrivals:
    """Return the arrivals within some spans, each (beginning, end)."""
    arrivals = Arrivals()
    for mark in marks:
        if mark.ready and any(begun_s < mark.time_s < ended_s for begun_s, ended_s in spans):
            arrivals.add(mark.rank, mark.step, mark.time_s)
    return arrivals


def straggler_figures(runs: int) -> list[Figure]:
    """Run the cases in turn; return precision and recall, and the share of right causes."""
    right = wrong = missed = causes = 0
    for number in range(runs):
        ranks, words, expected = CASES[number % len(CASES)]
        for part in run(ranks, words.split()):
            print(f"{ranks} ranks, {words}: {part}", flush=True)
            due = part.slowed if part.slowdown >= LEAST else None
            wrong += sum(rank != part.slowed for rank in part.named)
            if due is not None:
                right += due in part.named
                missed += due not in part.named
                causes += part.named.get(due) in expected
    return [
        Figure("straggler_precision", right / (right + wrong) if right + wrong else 1.0, "share"),
        Figure("straggler_recall", right / (right + missed) if right + missed else 1.0, "share"),
        Figure("straggler_causes_right", causes / right if right else 1.0, "share"),
        Figure("straggler_runs", runs, "count"),
    ]
