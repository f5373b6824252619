"""Where DeepSpeed's ops are compiled, and that compiling them starts no CUDA."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.scripts.installed import (
    build_kind,
    cannot_build,
    cannot_compile,
    extensions_dir,
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
