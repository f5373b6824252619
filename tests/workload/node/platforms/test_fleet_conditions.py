"""Conditions of fleets on the twin: each is right, and one that is not is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.workload.node.platforms.fleet_checks import preload_touches
from tests.workload.node.platforms.fleet_conditions import A100, CONDITIONS, Condition, wrong
from tuner.workload.node.platforms import nvidia

pytestmark = pytest.mark.needs("cc")


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda each: f"{each.number} {each.title}")
def test_each_condition_is_right_and_doctor_agrees(condition: Condition) -> None:
    assert wrong(condition) == ("", False)


def test_a_node_that_is_refused_for_another_reason_is_wrong() -> None:
    found, contradicts = wrong(Condition(0, "MIG", (replace(A100, mig=-1),), refused="no driver"))
    assert "has MIG on" in found
    assert not contradicts  # doctor says the same


def test_doctor_that_misses_a_refusal_contradicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.workload.node.facts._unusable", lambda *_: iter(()))
    found, contradicts = wrong(Condition(0, "MIG", (replace(A100, mig=-1),), refused="MIG"))
    assert contradicts
    assert "doctor misses []" in found


def test_a_refusal_that_is_missing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "why_unusable", lambda gpu: "")
    gpus = (replace(A100, recovery_action=1),)
    assert wrong(Condition(31, "a reset pending", gpus, refused="waits for a reset"))[0]


TORCH = """
from types import SimpleNamespace as N
_C, cuda, version, __version__ = N(), N(is_initialized=lambda: False), N(cuda={cuda!r}), "2.13.0"
"""


@pytest.mark.parametrize(("cuda", "touches"), [("13.0", 1), (None, None)])
def test_only_a_cuda_build_tells_if_the_preload_starts_the_driver(
    tmp_path: Path, cuda: str | None, touches: int | None
) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format(cuda=cuda))
    (tmp_path / "deepspeed.py").write_text("import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n")
    assert preload_touches(tmp_path) == touches
