"""Builds of torch that cannot use a node's GPUs, on a twin node."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.node.runner import LocalRunner
from tuner.workload.scripts.installed import TorchBuild, installed_torch

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
CU130 = TorchBuild("2.13.0+cu130", "13.0", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120")


def test_a_build_is_read_from_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError")
    told = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    (tmp_path / "torch/version.py").write_text(told)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert installed_torch() == TorchBuild("2.13.0+cu130", "13.0")


def test_a_build_that_fits_is_fine(twin_node: Make) -> None:
    twin_node(TwinGpu(compute=(9, 0)), cuda_driver=13000)
    assert Nvidia({}).why_not_torch(CU130) == ""


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((8, 0), True), ((8, 9), True), ((7, 0), False), ((12, 1), True), ((13, 0), True)],
)
def test_code_runs_on_later_minor_versions_and_intermediate_code_on_all_later(
    capability: tuple[int, int], runs: bool
) -> None:
    assert CU130.runs_on(capability) is runs
    assert replace(CU130, architectures="").runs_on(capability)  # unknown is no reason


@pytest.mark.parametrize(
    ("build", "gpu", "driver", "says"),
    [
        (TorchBuild("2.13.0+cpu", ""), TwinGpu(), 13000, "built without CUDA"),
        (CU130, TwinGpu(), 12040, r"supports CUDA 12\.4; update the driver"),
        (CU130, TwinGpu(name="Tesla V100", compute=(7, 0)), 13000, "no code for Tesla V100"),
    ],
)
def test_a_build_that_does_not_fit_is_one_sentence(
    twin_node: Make, build: TorchBuild, gpu: TwinGpu, driver: int, says: str
) -> None:
    twin_node(gpu, cuda_driver=driver)
    assert re.search(says, Nvidia({}).why_not_torch(build))


@pytest.mark.extra("tuner.workload.program.built_in_job")
def test_nothing_is_probed_with_it(
    twin_node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin_node(TwinGpu())
    runner = LocalRunner(load_job(), load_cluster("h100-32"), run_dir=tmp_path / "run")
    try:
        runner.node.server.torch = TorchBuild("2.13.0+cpu", "")
        monkeypatch.setattr(runner.node.server, "start", lambda: None)
        monkeypatch.setattr(Nvidia, "accelerator", "cuda")  # on a twin, cores stand in for GPUs
        with pytest.raises(InputError, match=r"nothing can be trained.*without CUDA"):
            runner.prepare()
    finally:
        runner.close()
