"""Where probes run by default: on Ray, or inline where this machine can start none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tuner.executors.choose import open_executor
from tuner.executors.local import InlineExecutor
from tuner.executors.ray_cluster import RayUnavailable
from tuner.search_spaces import load_cluster, load_job
from tuner.workload.node.runner import LocalRunner

SLOW = "The current node timed out during startup. This could happen because of load."


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


def test_without_a_ray_probes_run_inline(unavailable: str, tmp_path: Path) -> None:
    notes: list[str] = []
    job, cluster = load_job("tiny-gpt"), load_cluster("cpu-2")
    made = open_executor(None, job, cluster, run_dir=tmp_path, announce=notes.append)
    made.close()
    assert isinstance(made, InlineExecutor)
    assert unavailable in notes[-1]
    assert notes[-1].endswith("so probes run inline, one at a time.")


@pytest.mark.parametrize(("name", "address"), [("ray", None), (None, "auto")])
def test_a_ray_that_was_asked_for_is_an_error_where_there_is_none(
    name: str | None, address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    job, cluster = load_job("tiny-gpt"), load_cluster("cpu-2")
    with pytest.raises(RayUnavailable, match=r"install joulefront\[ray\], or run with"):
        open_executor(
            name, job, cluster, run_dir=tmp_path, announce=lambda note: None, address=address
        )
