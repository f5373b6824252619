"""The tests' environment and needs, studies that they share, and the shared fork servers."""

from __future__ import annotations

import sys

# Where an image sets PYTHONDONTWRITEBYTECODE, each process that a test starts would compile the
# packages again, and each worker of pytest all of the tests.
sys.dont_write_bytecode = False

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import environment
from tests.programs import PROGRAMS

# Before NumPy and torch are imported, which read theirs when they are.
HOME = environment.begin(PROGRAMS)

from benchmarks.source import Module, production
from tests import cpu_limit, needs
from tests.cpu_limit import pytest_runtest_call  # noqa: F401
from tests.needs import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_itemcollected,
    pytest_runtest_setup,
    pytest_terminal_summary,
    require,
)
from tests.support.studies import LONG_JOB, FormulaRunner, run_optimize
from tests.support.windows import shorten
from tests.twin import TwinGpu, TwinNode
from tests.twin.replay import replayed_node
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.result import Result
from tuner.search.planner import PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.plugins import shipped_module
from tuner.search_spaces.space import Candidates
from tuner.study.events import Progress
from tuner.workload.node.rank_server import RankServer
from tuner.workload.records.probe import WindowPolicy


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> None:
    """Take SIGINT again where a shell's background job ignores it, as its children would, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Skip fsync: no test takes the machine's power, and a search calls it a hundred times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which fails on a closed file, too
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of limits and needs."""
    cpu_limit.pytest_addoption(parser)
    needs.add_option(parser)


def pytest_unconfigure() -> None:
    """Remove the tests' home."""
    environment.end(HOME)


@pytest.fixture(scope="session", autouse=True)
def _models_are_counted_here() -> Iterator[None]:
    """Count models in this process: a process for each would import torch anew.

    As below, what is patched may be a part of an extra, which a checkout may leave out
    (`benchmarks.extras`).
    """
    built_model: Any = shipped_module("tuner.search_spaces.built_model")
    with pytest.MonkeyPatch.context() as patch:
        if built_model is not None:
            path = "tuner.search_spaces.library_count.run_program"
            patch.setattr(path, lambda line: built_model.answer(json.loads(line)))
        yield


@pytest.fixture(scope="session")
def production_modules() -> list[Module]:
    """Return the modules of the import package, each of which is parsed once a session."""
    return production()


class NextCandidate(ProbePlanner):
    """Planner that takes the first candidate that is left.

    Args:
        first: configurations before any other.
        options: of the planner whose place it takes.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        seed: int | None = None,
        first: Sequence[Configuration] = (),
        **options: object,
    ) -> None:
        super().__init__(candidates, seed=seed)
        found = [row for each in first if (row := candidates.find(each)) is not None]
        self._order = (*found, *range(len(candidates.configurations)))

    def plan(self, state: PlanningState) -> ProbePlan | None:
        closed = self._closed(self._observe(state))
        left = next((row for row in self._order if not closed[row]), None)
        return None if left is None else self._plan_of([left], "the next candidate")


@pytest.fixture
def next_candidates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches take the next candidate, where a test is of what happens around a search.

    A test with the mark `searches` keeps the planner that users have.
    """
    if not request.node.get_closest_marker("searches"):
        monkeypatch.setattr("tuner.study.session.CandidatePlanner", NextCandidate)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the page of each report empty, where a test does not look at it."""
    if shipped_module("tuner.display.report") is not None:
        monkeypatch.setattr("tuner.display.report.render_report", lambda *_, **__: "")


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let probes of this process be short, where a test is not of what they measure."""
    before = WindowPolicy.__init__.__defaults__
    monkeypatch.setattr(WindowPolicy.__init__, "__defaults__", before)  # as it is afterwards
    shorten()


@pytest.fixture
def launchers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launchers' parsers answer in this process, which imports torch once."""
    if shipped_module("tuner.workload.scripts.launchers") is not None:
        from tests.support.launchers import answer_here

        monkeypatch.setattr("tuner.workload.scripts.launchers._reply", answer_here)


@dataclass
class FinishedStudy:
    """A finished study of eight probes, named "study", that all tests share: read it, or copy it.

    Attributes:
        result: as `optimize` returned it.
        events: of its progress, in order.
    """

    result: Result
    events: list[Progress] = field(default_factory=list)

    def copy_into(self, runs_dir: Path) -> Path:
        """Copy the run's folder into an empty one; the copy can be asked again or spoiled."""
        return Path(shutil.copytree(self.result.run_dir, runs_dir / "study"))


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> FinishedStudy:
    events: list[Progress] = []
    result = run_optimize(
        LONG_JOB,
        cluster="cpu-2",
        executor=SimulatedExecutor(FormulaRunner()),
        runs_dir=tmp_path_factory.mktemp("finished"),
        name="study",
        report=False,
        max_probes=8,
        on_progress=events.append,
    )
    return FinishedStudy(result, events)


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[list[RankServer]]:
    """Keep the fork servers of `one_fork_server` as long as the session."""
    servers: list[RankServer] = []
    yield servers
    for server in servers:
        RankServer.close(server)


@pytest.fixture(scope="module")
def one_fork_server(fork_servers: list[RankServer]) -> Iterator[None]:
    """Let runners that would start equal fork servers share one, with the ops that it has loaded.

    A fork server imports torch and DeepSpeed, which takes longer than most probes of a test.
    """

    def setting(server: RankServer) -> tuple[object, ...]:
        env = {k: v for k, v in server.env.items() if k != "PYTEST_CURRENT_TEST"}
        return server._python, server._needs, server._optional, env

    def shared(**options: Any) -> RankServer:
        server = RankServer(**options)
        for other in fork_servers:
            if setting(other) == setting(server):
                return other
        server.close = lambda: None if server.alive else RankServer.close(server)  # type: ignore
        fork_servers.append(server)
        return server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tuner.workload.node.runner.RankServer", shared)
        yield


@pytest.fixture
def twin_node(tmp_path: Path) -> Iterator[Callable[..., TwinNode]]:
    """Return a function that makes a twin GPU node and puts this process on it.

    With `replay`, the file of a recording, the node answers as the recorded one did; with
    `children`, processes that the test starts are on the node, too. Without a C compiler the test
    is skipped.
    """
    require("cc")
    with contextlib.ExitStack() as stack:

        def make(
            *gpus: TwinGpu, replay: Path | None = None, children: bool = False, **options: Any
        ) -> TwinNode:
            path = tmp_path / f"twin-node{len(list(tmp_path.glob('twin-node*')))}"
            if replay is not None:
                node = replayed_node(path, replay, **options)
            else:
                node = TwinNode(path, gpus or (TwinGpu(),), **options)
            stack.callback(node.close)
            stack.enter_context(node.joined(children=children))
            return node

        yield make
