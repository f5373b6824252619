"""When probes run on Ray, and what happens where there is none."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tuner.cluster
from tuner.cluster import KIND
from tuner.executors.base import ExecutorUnavailable, Opening
from tuner.executors.choose import how_started, open_executor
from tuner.executors.local import InlineExecutor
from tuner.search_spaces import load_cluster, load_job
from tuner.search_spaces.errors import InputError
from tuner.workload.node.runner import LocalRunner

SLOW = "The current node timed out during startup. This could happen because of load."
CORES, GPUS = load_cluster("cpu-2"), replace(load_cluster("h100-32"), nodes=1)


def too_slow(**options: Any) -> None:
    raise Exception(SLOW)


@pytest.fixture(params=["is not installed", "cannot be started: The current node timed out"])
def unavailable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(LocalRunner, "prepare", lambda runner: None)
    if "installed" in request.param:
        monkeypatch.setitem(sys.modules, "ray", None)
    else:
        monkeypatch.setattr(pytest.importorskip("ray"), "init", too_slow)
    return str(request.param)


def test_without_a_ray_probes_of_several_nodes_run_inline(unavailable: str, tmp_path: Path) -> None:
    notes: list[str] = []
    asked = Opening(load_job("tiny-gpt"), replace(CORES, nodes=2), tmp_path, notes.append)
    made = open_executor(None, asked)
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
    asked = Opening(load_job("tiny-gpt"), CORES, tmp_path, lambda note: None, address)
    with pytest.raises(ExecutorUnavailable, match=r"\[ray\].?, or run with"):
        open_executor(name, asked)


def here(monkeypatch: pytest.MonkeyPatch, devices: int, *, gpus: bool = True) -> None:
    machine = replace(GPUS if gpus else CORES, devices_per_node=devices)
    monkeypatch.setattr(tuner.cluster, "detect_cluster", lambda: machine)


@pytest.mark.parametrize(
    ("each", "machine", "expected"), [(8, 8, False), (4, 8, True), (5, 8, True), (8, 4, False)]
)
def test_parts_of_a_node_of_gpus_are_probed_beside_each_other(
    each: int, machine: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(monkeypatch, machine)
    assert KIND.is_default(replace(GPUS, devices_per_node=each), None) == expected


def test_some_cores_of_a_machine_are_probed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here(monkeypatch, 64, gpus=False)
    assert not KIND.is_default(CORES, None)
    assert not KIND.is_default(replace(GPUS, devices_per_node=4), None)  # of a machine of no GPUs
    here(monkeypatch, 8)
    assert not KIND.is_default(CORES, None)


def test_a_machine_whose_gpus_do_not_answer_needs_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise InputError("the GPUs of this machine cannot be asked")

    monkeypatch.setattr(tuner.cluster, "detect_cluster", broken)
    assert not KIND.is_default(GPUS, None)


@pytest.mark.parametrize("joined", [True, False])
def test_a_program_that_has_joined_a_ray_stays_there(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = SimpleNamespace(is_initialized=lambda: joined)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert KIND.is_default(CORES, None) == joined


def test_a_cluster_runs_on_ray() -> None:
    assert KIND.is_default(replace(CORES, nodes=2), None)
    assert KIND.is_default(CORES, "auto")


def test_the_start_of_probes_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert "of its own" in how_started("ray", CORES, None)
    assert "of its own" in how_started(None, replace(CORES, nodes=2), None)
    assert how_started(None, CORES, "auto") == "Ray, by joining auto"
