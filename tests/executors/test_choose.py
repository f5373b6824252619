"""Where probes run by default: one after the other on one node, on Ray elsewhere."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.cluster.joining import RayUnavailable
from tuner.executors import choose
from tuner.executors.choose import how_started, needs_ray, open_executor
from tuner.executors.local import InlineExecutor
from tuner.search_spaces import load_cluster, load_job
from tuner.search_spaces.errors import InputError
from tuner.workload.node import facts
from tuner.workload.node.facts import NodeFacts
from tuner.workload.node.runner import LocalRunner

SLOW = "The current node timed out during startup. This could happen because of load."
CORES, GPUS = load_cluster("cpu-2"), replace(load_cluster("h100-32"), nodes=1)


def too_slow(**options: Any) -> None:
    raise Exception(SLOW)


@pytest.fixture
def not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalRunner, "prepare", lambda runner: None)


@pytest.fixture(params=["is not installed", "cannot be started: The current node timed out"])
def unavailable(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, not_prepared: None
) -> str:
    if "installed" in request.param:
        monkeypatch.setitem(sys.modules, "ray", None)
    else:
        monkeypatch.setattr(pytest.importorskip("ray"), "init", too_slow)
    return str(request.param)


@pytest.mark.usefixtures("not_prepared")
def test_on_one_node_no_ray_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    notes: list[str] = []
    made = open_executor(None, load_job("tiny-gpt"), CORES, run_dir=tmp_path, announce=notes.append)
    made.close()
    assert isinstance(made, InlineExecutor)
    assert not [note for note in notes if "Ray" in note]


def test_without_a_ray_probes_of_several_nodes_run_inline(unavailable: str, tmp_path: Path) -> None:
    notes: list[str] = []
    job, cluster = load_job("tiny-gpt"), replace(CORES, nodes=2)
    made = open_executor(None, job, cluster, run_dir=tmp_path, announce=notes.append)
    made.close()
    assert isinstance(made, InlineExecutor)
    assert next(note for note in notes if unavailable in note).endswith(
        "so probes run inline, one at a time."
    )


@pytest.mark.parametrize(("name", "address"), [("ray", None), (None, "auto")])
def test_a_ray_that_was_asked_for_is_an_error_where_there_is_none(
    name: str | None, address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayUnavailable, match=r"\[ray\].?, or run with"):
        open_executor(
            name,
            load_job("tiny-gpt"),
            CORES,
            run_dir=tmp_path,
            announce=lambda note: None,
            address=address,
        )


def here(monkeypatch: pytest.MonkeyPatch, devices: int, *, gpus: bool = True) -> None:
    machine = replace(GPUS if gpus else CORES, devices_per_node=devices)
    monkeypatch.setattr(choose, "detect_cluster", lambda: machine)


@pytest.mark.parametrize(
    ("each", "machine", "expected"), [(8, 8, False), (4, 8, True), (5, 8, True), (8, 4, False)]
)
def test_parts_of_a_node_of_gpus_are_probed_beside_each_other(
    each: int, machine: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(monkeypatch, machine)
    assert needs_ray(replace(GPUS, devices_per_node=each), None) == expected


def test_some_cores_of_a_machine_are_probed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here(monkeypatch, 64, gpus=False)
    assert not needs_ray(CORES, None)
    assert not needs_ray(replace(GPUS, devices_per_node=4), None)  # of a machine of no GPUs
    here(monkeypatch, 8)
    assert not needs_ray(CORES, None)


def test_a_machine_whose_gpus_do_not_answer_needs_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise InputError("the GPUs of this machine cannot be asked")

    monkeypatch.setattr(choose, "detect_cluster", broken)
    assert not needs_ray(GPUS, None)


@pytest.mark.parametrize("joined", [True, False])
def test_a_program_that_has_joined_a_ray_stays_there(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = SimpleNamespace(is_initialized=lambda: joined)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert needs_ray(CORES, None) == joined


def test_a_cluster_needs_ray() -> None:
    assert needs_ray(replace(CORES, nodes=2), None)
    assert needs_ray(CORES, "auto")


def test_the_start_of_probes_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert "one probe at a time" in how_started(None, CORES, None)
    assert "one probe at a time" in how_started("inline", replace(CORES, nodes=2), None)
    assert "of its own" in how_started("ray", CORES, None)
    assert "of its own" in how_started(None, replace(CORES, nodes=2), None)
    assert how_started(None, CORES, "auto") == "Ray, by joining auto"
    assert "predictions" in how_started("simulated", CORES, None)


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
        open_executor(
            None, load_job("tiny-gpt"), CORES, run_dir=tmp_path, announce=lambda note: None
        )
    assert seen == [""]  # what its GPUs do is no reason against its cores
