"""Where DeepSpeed's ops are compiled, and that compiling them starts no CUDA."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
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
from tuner.workload.scripts.installed import (
    TorchBuild,
    build_kind,
    cannot_build,
    cannot_compile,
    extensions_dir,
    installed_torch,
    remove_stale_locks,
)

#: What DeepSpeed's builders for CUDA ask before they compile (`builder.py`, jit_mode).
ASKS = """
import os, torch
touched = []
torch.cuda.device_count = lambda: touched.append("count") or 2
torch.cuda.get_device_capability = lambda index: touched.append(index) or (9, 0)
from deepspeed.ops.op_builder import AsyncIOBuilder
builder = AsyncIOBuilder()
builder.jit_mode = True
builder.compute_capability_args()
print(touched)
os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"
touched.clear()
builder.compute_capability_args()
print(touched)
"""


@pytest.mark.slow
def test_a_builder_for_cuda_asks_torch_only_if_it_is_not_told() -> None:
    """Asking torch for the GPUs' capability starts CUDA in the fork server."""
    done = subprocess.run(
        [sys.executable, "-c", ASKS],
        env={"PATH": "/usr/bin", "DS_ACCELERATOR": "cuda"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-2:] == ["['count', 0, 1]", "[]"]


@pytest.mark.needs("cc")
def test_the_architectures_are_those_of_the_visible_gpus(
    twin_node: Callable[..., TwinNode],
) -> None:
    """NVML tells what a builder must not ask torch for."""
    twin_node(TwinGpu(), TwinGpu())
    assert Nvidia({}).capabilities() == "8.0"


def test_nvme_offload_on_gpus_needs_cudas_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without nvcc the study would end at its first probe."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "nvcc" else f"/usr/bin/{name}")
    assert cannot_build("async_io") == ""
    assert "nvcc is not on PATH" in cannot_build("async_io", gpus=True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.19.8+local")
    assert cannot_build("cpu_adam", gpus=True) == ""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.16.4")
    assert "cpu_adam is compiled by CUDA's compiler" in cannot_build("cpu_adam", gpus=True)
    assert cannot_build("cpu_adam") == ""
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    assert cannot_build("async_io", gpus=True) == ""


def test_ops_are_compiled_by_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the PATH, or beside the interpreter, where the ranks look for it, too."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    found = {"c++": "/usr/bin/c++"}
    monkeypatch.setattr("shutil.which", lambda name: found.get(name))
    assert "is compiled by ninja: pip install ninja" in cannot_build("cpu_adam")
    found["ninja"] = "/usr/bin/ninja"
    assert cannot_build("cpu_adam") == ""
    found[str(tmp_path / "bin" / "ninja")] = found.pop("ninja")
    assert cannot_build("cpu_adam") == ""


def test_nodes_of_a_shared_home_compile_in_folders_of_their_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops are compiled with -march=native, for one kind of processor and one torch."""
    kinds = []
    for number, flags in enumerate(("avx2", "avx2 avx512f")):
        file = tmp_path / f"cpuinfo{number}"
        file.write_text(f"model name\t: EPYC\nflags\t\t: {flags}\n")
        kinds.append(build_kind(str(file)))
    assert len(set(kinds)) == 2
    again = tmp_path / "again"
    again.write_text("model name\t: EPYC\nflags\t\t: avx2\nmodel name\t: EPYC\nflags\t\t: avx2\n")
    assert build_kind(str(again)) == kinds[0]
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert Path(extensions_dir()).name == build_kind()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/mine")
    assert extensions_dir() == "/mine"


def test_torch_compile_needs_a_compiler_and_pythons_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert cannot_compile() == "torch.compile needs Python's headers (python3-dev)"
    (tmp_path / "Python.h").touch()
    assert cannot_compile() == ""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert cannot_compile() == "torch.compile needs a C++ compiler (c++ or g++)"


def test_a_lock_that_a_killed_build_left_is_removed_before_ranks_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(extensions_dir())

    def locks() -> set[str]:
        for name, age_s in (("killed", 2000.0), ("building", 20.0)):
            lock = folder / name / "lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
            os.utime(lock, (time.time() - age_s,) * 2)
        remove_stale_locks()
        return {path.parent.name for path in folder.glob("*/lock")}

    assert locks() == {"building"}
    with (folder / "joulefront.lock").open("w") as guard:  # another search builds
        fcntl.flock(guard, fcntl.LOCK_EX)
        assert locks() == {"killed", "building"}
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))  # the user's own
    assert locks() == {"killed", "building"}


Make = Callable[..., TwinNode]
CU130 = TorchBuild("2.13.0+cu130", "13.0", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120")


@pytest.mark.needs("cc")
def test_a_build_is_read_from_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError")
    told = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    (tmp_path / "torch/version.py").write_text(told)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert installed_torch() == TorchBuild("2.13.0+cu130", "13.0")


@pytest.mark.needs("cc")
def test_a_build_that_fits_is_fine(twin_node: Make) -> None:
    twin_node(TwinGpu(compute=(9, 0)), cuda_driver=13000)
    assert Nvidia({}).why_not_torch(CU130) == ""


@pytest.mark.needs("cc")
@pytest.mark.parametrize(
    ("capability", "runs"),
    [((8, 0), True), ((8, 9), True), ((7, 0), False), ((12, 1), True), ((13, 0), True)],
)
def test_code_runs_on_later_minor_versions_and_intermediate_code_on_all_later(
    capability: tuple[int, int], runs: bool
) -> None:
    assert CU130.runs_on(capability) is runs
    assert replace(CU130, architectures="").runs_on(capability)  # unknown is no reason


@pytest.mark.needs("cc")
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


@pytest.mark.needs("cc")
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
