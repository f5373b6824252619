"""Faults of a Ray cluster that strike at random moments of a search of its agents.

Each has a Ray of its own, and the search of `tests.faults.moments`, whose agents answer by the same
law: what continues has to end with the front of a search on a cluster that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

import tuner
from tests.cluster.own_ray import OwnRay
from tests.faults import moments
from tests.faults.harness import (
    MARK,
    ROOT,
    Fault,
    Outcome,
    marked,
    outcome_of,
    run_of,
    wait_gone,
)
from tests.faults.moments import Kind, LawRunner, Missed, Search
from tests.faults.ray_cluster import runner, started
from tuner.search_spaces.configuration import Settings
from tuner.workload.records.probe import ProbeRecord, ProbeRequest
from tuner.workload.records.trace import read_trace

#: Time for a search to begin, seconds, and for its agents to end.
BEGIN_S, END_S = 120.0, 30.0
_rays: dict[Path, OwnRay] = {}


class EndsItsAgent(LawRunner):
    """Launches of one micro-batch kill the agent, as one that takes the memory of its node."""

    def run(self, request: ProbeRequest) -> ProbeRecord:
        if request.launch["micro_batch"] == FATAL:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(request)


#: The micro-batch of those launches, and the number of the others: three of the space, and today's.
FATAL, HARMLESS = 2, 4


def session(folder: Path, storage: str | None = None, model: type[LawRunner] = LawRunner) -> int:
    """One session, in a new interpreter: a process that is forked cannot use Ray."""
    ray = _rays[folder]
    work = (
        "import sys; from tests.faults.ray_moments import search; sys.exit(search(*sys.argv[1:]))"
    )
    words = [sys.executable, "-c", work, str(folder), ray.address, model.__name__]
    os.execve(sys.executable, words, {**ray.environment, **os.environ, "PYTHONPATH": str(ROOT)})


def search(folder: str, address: str, model: str) -> int:
    """One session of the search on the Ray at an address."""
    from tests.support.studies import LONG_JOB
    from tuner.cluster.executor import RayExecutor
    from tuner.executors.base import Executor
    from tuner.search_spaces.cluster import load_cluster

    def executor() -> Executor:
        return RayExecutor(
            LONG_JOB,
            load_cluster(moments.CLUSTER),
            run_dir=Path(folder, "runs", "study"),
            address=address,
            make_runner=partial(runner, model=globals()[model]),
            announce=print,
        )

    return moments.session(Path(folder), executor=executor)


@contextlib.contextmanager
def _ray(folder: Path, nodes: int = 1) -> Iterator[None]:
    with contextlib.ExitStack() as rays:

        def start() -> None:
            # Without a mark: no search leaves it.
            ray = OwnRay.started(gpus=8, PYTHONPATH=str(ROOT), **{MARK: ""})
            _rays[folder] = rays.enter_context(ray)
            for _ in range(nodes - 1):
                _rays[folder].add_node()

        start()
        _restarts[folder] = start
        yield None


_restarts: dict[Path, Callable[[], None]] = {}
_two_nodes = partial(_ray, nodes=2)


def _agents(folder: Path) -> list[psutil.Process]:
    """Return the agents that live, the one that began a probe last first."""
    found = []
    for pid in dict.fromkeys(pid for _, pid, _ in reversed(started(folder))):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def agents_left(folder: Path) -> int:
    """Count the agents that live some seconds after the search's end."""
    until_s = time.monotonic() + END_S
    while (left := len(_agents(folder))) and time.monotonic() < until_s:
        time.sleep(0.1)
    return left


def _when_begun(strike: Callable[[Search], None], undo: Callable[[Path], None]) -> moments.Strike:
    """Strike after the first probe began: before, most of the time is Ray's own start."""

    def struck(search: Search, draw: random.Random) -> Callable[[], None]:
        until_s = time.monotonic() + BEGIN_S
        waited = False
        while not _agents(search.folder) and time.monotonic() < until_s:
            waited = True
            if search.ended_within(0.02):
                break
        if search.ended_within(draw.uniform(0.0, 3.0) if waited else 0.0):
            search.end()
            raise Missed
        strike(search)
        return partial(undo, search.folder)

    return struck


def _nothing(folder: Path) -> None:
    """Undo nothing."""


def _kill_head(search: Search) -> None:
    (head,) = _rays[search.folder].processes("gcs_server")
    head.send_signal(signal.SIGKILL)


def _start_anew(folder: Path) -> None:
    """Start another Ray, as its user does; what is left of the first has no head."""
    _rays[folder].kill()
    _restarts[folder]()


def _kill_agent(search: Search) -> None:
    """Kill the agent that began a probe last, be it in that probe or after it."""
    for agent in _agents(search.folder)[:1]:
        agent.kill()


def _kill_node(search: Search) -> None:
    """Kill the node that is not the head's."""
    raylets = _rays[search.folder].processes("raylet")
    (second,) = (each for each in raylets if "--node_ip_address=127.0.0.2" in each.cmdline())
    second.kill()


def _add_node(search: Search) -> None:
    _rays[search.folder].add_node()


def _launches_end_their_agents(folder: Path) -> Outcome:
    """Every agent that has one of some launches dies: each is tried twice, the others are found."""
    with _ray(folder), marked() as mark:
        child = Search(folder, partial(session, model=EndsItsAgent)).finish()
    run = run_of(folder)
    failures: dict[Settings, list[str]] = {}
    records = read_trace(run.trace).records
    for record in records:
        if record.failure is not None:
            failures.setdefault(record.request.launch, []).append(record.failure.kind)
    measured = {record.request.launch for record in records if record.measurements}
    ended = str(tuner.load_result(run.name, runs_dir=run.path.parent).stopped)
    tried_twice = all(
        launch["micro_batch"] == FATAL and kinds == ["node", "crash"]
        for launch, kinds in failures.items()
    )
    return outcome_of(
        folder,
        (child.code == 0, f"it ended with {child.code}: {child.said[-600:]}"),
        (bool(failures), "no agent died"),
        (tried_twice, f"failures were {failures}"),
        (len(measured) == HARMLESS, f"{len(measured)} launches were measured"),
        said=ended,
        processes_left=wait_gone(mark) + agents_left(folder),
    )


_kind = partial(Kind, session=session, needs=_ray, agents_left=agents_left, fast=False)
KINDS: tuple[Kind, ...] = (
    _kind("Ray head killed", 10, _when_begun(_kill_head, _start_anew)),
    _kind("Ray node killed", 8, _when_begun(_kill_node, _nothing), needs=_two_nodes, codes=(0,)),
    _kind("Ray agent killed", 10, _when_begun(_kill_agent, _nothing), codes=(0,)),
    _kind("Ray node joins", 6, _when_begun(_add_node, _nothing), codes=(0,)),
)
FAULTS: tuple[Fault, ...] = (
    Fault(
        "Ray agents killed by their launch",
        _launches_end_their_agents,
        fast=False,
        often=False,
    ),
    *(fault for kind in KINDS for fault in kind.faults()),
)
