"""Faults that strike while a launch is up and the driver is asked what else to visit in it.

By then the driver knows windows of a probe that has not ended, and further trials may stand in the
study whose settings the launch never hears of. The studies are those of `tests.faults.driver`
on a cluster whose clocks can be set, where the search does go on; the rank that dies while its
launch waits is a real one, metered and clocked through a twin node's NVML.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tuner
from tests.faults.driver import KILLED, continued, killed_at, optimize, verdict
from tests.faults.harness import (
    Fault,
    Outcome,
    fork,
    in_child,
    joined,
    living,
    outcome_of,
    run_of,
    wait_gone,
)
from tests.faults.probe import keep_server, recorded, server_mark, study
from tests.faults.storage import postgresql
from tests.twin import TwinGpu, TwinNode
from tests.waiting import wait_until
from tuner.study.loop import SearchLoop
from tuner.workload.records.trace import read_trace

#: Where the search goes on in its launches: the model's GPUs take any of these clocks.
CLUSTER = "h200-8"
SPACE = """what = "of the fault tests"
[knobs]
data_parallel = [1, 2]
micro_batch = [1, 2, 4]
clock_MHz = [600, 900, 1200, 1500, 1800]
"""
#: Enough that the first launches, which no model chooses, are behind.
PROBES = 8
#: What real ranks on twin GPUs are searched over.
CLOCKS = (900, 1200, 1410)
CLOCK_SPACE = """what = "of the fault tests"
[knobs]
data_parallel = [1, 2]
micro_batch = [1, 2, 4]
clock_MHz = [900, 1200, 1410]
"""


def _session(folder: Path, **options: Any) -> int:
    """One session of a study that goes on in its launches."""
    space = folder / "space.toml"
    space.write_text(SPACE)
    options = {"probes": PROBES, **options}
    return optimize(folder, cluster=CLUSTER, space=str(space), **options)


def struck_when_asked(strike: Callable[[str], object], *, decided: bool = False) -> Any:
    """Return a `SearchLoop._next_settings` that calls `strike` once while a launch waits.

    Args:
        strike: causes the fault; takes the probe's name, and says False where it lets that one
            pass.
        decided: only where it is to go on: the driver knows with what, the launch does not.
    """
    plain, struck = SearchLoop._next_settings, [False]

    def asked(self: SearchLoop, request: Any, measurements: Any) -> Any:
        more = plain(self, request, measurements) if decided else ()
        if not struck[0] and (more or not decided):
            struck[0] = strike(request.probe_id) is not False
        return more if decided else plain(self, request, measurements)

    return asked


def _arm(strike: Callable[[str], object]) -> None:
    SearchLoop._next_settings = struck_when_asked(strike)  # type: ignore[method-assign]


def _kept(folder: Path, outcome: Outcome) -> Outcome:
    """Add that the probe that was asked about is in the trace with what it measured."""
    held = [
        record
        for record in read_trace(run_of(folder).trace).records
        if record.failure is not None and record.failure.kind == "cancelled"
    ]
    if len(held) != 1 or not held[0].measurements:
        lost = f"what the probe had measured was not kept: {held}"
        return replace(outcome, wrong=(*outcome.wrong, lost))
    return outcome


def _killed(arm: Callable[[], None], folder: Path) -> Outcome:
    def first() -> int:
        arm()
        return _session(folder)

    again = partial(_session, folder)
    return _kept(folder, continued(folder, first, again=again, expected=KILLED, probes=None))


def _dies(probe: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupted(folder: Path) -> Outcome:
    def waits(probe: str) -> None:
        (folder / "asked").touch()
        time.sleep(120)

    def first() -> int:
        _arm(waits)
        return _session(folder)

    out = folder / "first.out"
    pid = fork(first, out)
    wait_until((folder / "asked").exists, said=out)
    time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    child = joined(pid, out, limit_s=60)
    resumed = in_child(partial(_session, folder), folder)
    return _kept(folder, verdict(folder, child, resumed, expected=130, probes=None))


def _storage_away(folder: Path) -> Outcome:
    """PostgreSQL stops when the launch asks; the launch goes on, and its record is in the trace.

    The session ends when it cannot add the trials, which the next one adds.
    """
    with postgresql() as server:
        session = partial(_session, folder, storage=server.url)

        def first() -> int:
            _arm(lambda probe: server.stop())
            return session()

        back = {"mend": server.start, "storage": server.url}
        return continued(folder, first, again=session, expected=2, probes=None, **back)


def _rank_killed(folder: Path) -> Outcome:
    """Two twin GPUs, real ranks: one of them dies while all wait at a boundary, clocks locked."""
    from tests.faults.device import on_twin_node

    with on_twin_node(folder, [TwinGpu(), TwinGpu()]) as node:
        return _rank_killed_on(node, folder)


def _rank_killed_on(node: TwinNode, folder: Path) -> Outcome:
    from tests.faults.device import clocked, stands

    before = stands(node)
    struck: list[str] = []

    def kill_a_rank(probe: str) -> bool:
        if stands(node) == before:  # a launch at the GPUs' own clocks leaves nothing to put back
            return False
        mark, server = server_mark()
        struck.append(probe)
        rank = max(pid for pid in living(mark) if pid != server)
        os.kill(rank, signal.SIGKILL)
        while rank in living(mark):  # it is dead before the driver's answer arrives
            time.sleep(0.01)
        return True

    asked = struck_when_asked(kill_a_rank, decided=True)
    with patch.object(SearchLoop, "_next_settings", asked), keep_server():
        study(folder, clocked(folder, CLOCKS), space=CLOCK_SPACE, probes=PROBES)
    if not struck:
        return Outcome(wrong=("no launch with a clock was gone on with",))
    (name,) = struck
    records = recorded(folder)
    failure, kept = records[name].failure, records[name].measurements
    others = [r.failure for other, r in records.items() if other != name and not r.ok]
    # The ranks' steps are timed for real, so that the search may find before its last probe that
    # nothing left is worth measuring: how many probes it makes is the machine's affair.
    ended = str(tuner.load_result("study", runs_dir=folder / "runs").stopped)
    return outcome_of(
        folder,
        (failure is not None and failure.kind == "crash", f"it is a {failure}"),
        (failure is not None and "signal 9" in failure.message, f"it is a {failure}"),
        (len(kept) >= 1, "what it had measured was not kept"),
        (ended.startswith("The search ended: "), f"the study did not continue: {ended}"),
        (len(records) <= PROBES, f"{len(records)} probes were made"),
        (not others, f"others failed: {others}"),
        said=failure.message if failure else "",
        clocks_wrong=sum(a != b for a, b in zip(before, stands(node), strict=True)),
        processes_left=wait_gone(*server_mark()),
    )


FAULTS: tuple[Fault, ...] = (
    Fault(
        "driver killed while asked what else to visit",
        partial(_killed, partial(_arm, _dies)),
    ),
    Fault(
        "driver killed before it plans further settings",
        partial(_killed, killed_at(SearchLoop, "_plan_continuation", "before", at=0)),
    ),
    Fault(
        "driver killed after it planned further settings",
        partial(_killed, killed_at(SearchLoop, "_plan_continuation", "after", at=0)),
    ),
    Fault("Ctrl-C while asked what else to visit", _interrupted),
    Fault("rank killed while its launch waits to go on", _rank_killed, fast=False),
    Fault(
        "PostgreSQL goes away while asked what else to visit",
        _storage_away,
        fast=False,
    ),
)
