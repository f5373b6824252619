"""Where probes run: on one node by default, elsewhere by what is plugged into the socket."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.entry_points import install_plugin
from tests.support.studies import request
from tuner.executors import choose
from tuner.executors.base import ExecutorKind, Opening
from tuner.executors.choose import check_executor, how_started, open_executor
from tuner.executors.local import InlineExecutor
from tuner.search_spaces import load_cluster, load_job, plugins
from tuner.search_spaces.errors import InputError
from tuner.testing.executors import ExecutorContract
from tuner.workload.node import facts
from tuner.workload.node.facts import NodeFacts
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRequest

CORES = load_cluster("cpu-2")
TWO_NODES = replace(CORES, nodes=2)
PLUGIN = """
from tests.support.studies import FormulaRunner
from tuner.executors.base import ExecutorKind, ExecutorUnavailable
from tuner.executors.simulated_time import SimulatedExecutor

class Kind(ExecutorKind):
    PROTOCOL = 1
    def is_default(self, cluster, address): return cluster.nodes == 2
    def phrase(self, cluster, address): return "a queue of the site"
    def open(self, opening): return SimulatedExecutor(FormulaRunner())

KIND = Kind()
"""


class TestShippedPlugin(ExecutorContract):
    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plug_in(tmp_path, monkeypatch, PLUGIN)

    def kind(self) -> ExecutorKind:
        kind: ExecutorKind = choose.SOCKET.plugins.found["queue"]
        return kind

    def opening(self, run_dir: Path) -> Opening:
        return opening(run_dir)

    def request(self) -> ProbeRequest:
        return request()


def plug_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, *, name: str = "queue"
) -> None:
    (made := folder / "plug-in").mkdir()
    group = "joulefront.executors"
    install_plugin(made, monkeypatch, group, name, source, attribute="KIND")


def opening(run_dir: Path, cluster: Any = CORES, said: list[str] | None = None) -> Opening:
    return Opening(load_job("tiny-gpt"), cluster, run_dir, (said or []).append)


@pytest.fixture
def not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalRunner, "prepare", lambda runner: None)


@pytest.fixture
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find no extra, as where their folders are deleted."""
    found = plugins.shipped_module
    monkeypatch.setattr(
        plugins,
        "shipped_module",
        lambda name: None if name in ("tuner.cluster", "tuner.simulated") else found(name),
    )


@pytest.mark.extra("tuner.workload.program.built_in_job")
@pytest.mark.usefixtures("not_prepared")
def test_on_one_node_no_ray_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said: list[str] = []
    made = open_executor(None, opening(tmp_path, said=said))
    made.close()
    assert isinstance(made, InlineExecutor)
    assert not [note for note in said if "Ray" in note]
    assert "one probe at a time" in how_started(None, CORES, None)
    assert "one probe at a time" in how_started("inline", TWO_NODES, None)


@pytest.mark.extra("tuner.workload.program.built_in_job")
@pytest.mark.usefixtures("core_alone", "not_prepared")
def test_without_extras_one_node_is_tuned_and_the_rest_is_named(tmp_path: Path) -> None:
    for cluster, expected in ((CORES, 0), (TWO_NODES, 1)):
        notes: list[str] = []
        asked = replace(opening(tmp_path, cluster), announce=notes.append)
        made = open_executor(None, asked)
        made.close()
        assert isinstance(made, InlineExecutor)
        assert sum("A probe on several nodes needs" in note for note in notes) == expected
    for name in ("ray", "simulated"):
        with pytest.raises(InputError, match=rf"the executor {name} needs a part of joulefront"):
            check_executor(name)
    check_executor("inline")


@pytest.mark.extra("tuner.workload.program.built_in_job", "tuner.cluster.executor")
def test_another_distribution_brings_an_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(tmp_path, monkeypatch, PLUGIN)
    assert how_started("queue", CORES, None) == "a queue of the site"
    # What is shipped is asked first.
    assert "Ray" in how_started(None, TWO_NODES, None)
    open_executor("queue", opening(tmp_path)).close()


@pytest.mark.extra("tuner.workload.program.built_in_job", "tuner.cluster.executor")
@pytest.mark.usefixtures("not_prepared")
@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        ("KIND = object()", "queue", "it must have PROTOCOL = 1, not None"),
        (
            PLUGIN.replace("PROTOCOL = 1", "PROTOCOL = 2"),
            "queue",
            "it must have PROTOCOL = 1, not 2",
        ),
        ("class KIND:\n    PROTOCOL = 1", "queue", "is_default() and phrase() and open()"),
        ("raise RuntimeError('no licence')", "queue", "RuntimeError: no licence"),
        (PLUGIN, "ray", "the name 'ray' is taken"),
        (PLUGIN, "inline", "the name 'inline' is taken"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named_and_one_node_works_without_it(
    source: str, name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(tmp_path, monkeypatch, source, name=name)
    said: list[str] = []
    made = open_executor(None, replace(opening(tmp_path), announce=said.append))
    made.close()
    assert isinstance(made, InlineExecutor)
    (sentence,) = (each for each in said if "is left out" in each)
    assert expected in sentence
    assert name in sentence
    if name == "queue":
        with pytest.raises(InputError, match=r"unknown executor 'queue'.*is left out"):
            check_executor("queue")


RETURNED = "return SimulatedExecutor(FormulaRunner())"


@pytest.mark.usefixtures("not_prepared")
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            RETURNED,
            "raise KeyError('x')",
            "open() failed (KeyErr",
        ),
        (
            RETURNED,
            "return 3",
            "returned a int without meter",
        ),
        ("def open(self, opening)", "def open(self)", "open() failed (TypeError"),
    ],
)
def test_a_plug_in_that_fails_where_it_is_asked_for_is_an_error_in_one_sentence(
    before: str, after: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(tmp_path, monkeypatch, PLUGIN.replace(before, after))
    with pytest.raises(InputError) as raised:
        open_executor("queue", opening(tmp_path))
    assert expected in str(raised.value)
    assert "'queue'" in str(raised.value)


@pytest.mark.extra("tuner.workload.program.built_in_job")
@pytest.mark.usefixtures("not_prepared")
@pytest.mark.parametrize(
    "after", ["raise OSError('gone')", "return open_nothing()", "raise SystemError()"]
)
def test_a_plug_in_that_fails_when_it_is_asked_by_default_is_passed_over(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(tmp_path, monkeypatch, PLUGIN.replace("return cluster.nodes == 2", after))
    said: list[str] = []
    made = open_executor(None, replace(opening(tmp_path), announce=said.append))
    made.close()
    assert isinstance(made, InlineExecutor)
    assert any("'queue' cannot be used: is_default() failed" in each for each in said)


@pytest.mark.extra("tuner.simulated.runner")
def test_predictions_start_nothing() -> None:
    assert "predictions" in how_started("simulated", CORES, None)
    assert choose.predicts("simulated")
    assert not choose.predicts(None)
    assert not choose.predicts("inline")
    assert not choose.predicts("ray")


def test_an_unknown_executor_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"'rya'.*inline, ray, simulated"):
        check_executor("rya")


@pytest.mark.usefixtures("not_prepared")
def test_a_node_that_others_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def used(*, environ: dict[str, str]) -> NodeFacts:
        seen.append(environ.get("CUDA_VISIBLE_DEVICES", "all"))
        found = inspect(environ=environ)
        return replace(found, busy=("GPU 0 is used by process 7",))

    inspect = facts.inspect_node
    monkeypatch.setattr(facts, "inspect_node", used)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(InputError, match="is not used: GPU 0 is used by process 7"):
        open_executor(None, opening(tmp_path))
    assert seen == [""]  # what its GPUs do is no reason against its cores
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
