"""Compiled code: its folders, the ops that compile here, and torch's own build."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

#: The imports of every DeepSpeed program, made once, in the fork server.
PRELOAD = ("torch", "deepspeed")
#: No build takes longer, seconds; a lock that is older was left by a killed build.
BUILD_LIMIT_S = STALE_LOCK_S = 900.0

#: From this release of DeepSpeed on `CPUAdamBuilder` is no builder for CUDA, which asks for CUDA's
#: compiler on a machine with GPUs. (`AsyncIOBuilder` still is one.)
CPU_ADAM_WITHOUT_CUDA = (0, 19, 8)


def extensions_dir() -> str:
    """Return the folder of DeepSpeed's compiled ops: TORCH_EXTENSIONS_DIR, or one of our own."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return chosen
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(cache) / "joulefront" / "torch_extensions" / build_kind())


def remove_stale_locks() -> None:
    """Remove the locks that killed builds left in joulefront's own folder of compiled ops.

    A script that builds an op would wait for such a lock without end.
    """
    folder = Path(extensions_dir())
    if os.environ.get("TORCH_EXTENSIONS_DIR") or not folder.is_dir():
        return
    with contextlib.suppress(OSError), (folder / "joulefront.lock").open("a") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for lock in folder.glob("*/lock"):
            if time.time() - lock.stat().st_mtime > STALE_LOCK_S:
                lock.unlink()


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version ("2.13.0+cu130"); empty without any."""
    found = re.match(r"[0-9.]*[0-9]", version)
    return tuple(int(part) for part in found.group(0).split(".")) if found else ()


def _release(package: str) -> tuple[int, ...]:
    return release_of(installed_version(package) or "")


@functools.cache
def build_kind(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return a name of the platform of a compiled op: this kind of processor, and this torch.

    Ops are compiled with -march=native, and nodes may share a home folder.
    """
    versions = []
    with contextlib.suppress(OSError):
        text = Path(cpuinfo).read_text()
        for name in ("model name", "flags", "Features", "CPU part"):
            found = re.search(rf"^{name}\s*: (.*)$", text, flags=re.MULTILINE)
            versions.append(found.group(1) if found else "")
    digest = hashlib.sha256("|".join(versions).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}-torch-{installed_version('torch') or 'unknown'}"


def cannot_build(op: str, *, gpus: bool = False) -> str:
    """Return the reason why a DeepSpeed op ("cpu_adam") cannot be built here; empty if it can."""
    if any(Path(extensions_dir(), op).glob(f"{op}*.so")):
        return ""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) or shutil.which("g++"):
        # pip puts ninja beside the interpreter, where ranks find it.
        beside = str(Path(sys.executable).parent / "ninja")
        if not (shutil.which("ninja") or shutil.which(beside)):
            return f"DeepSpeed's {op} is compiled by ninja: pip install ninja"
        if op == "async_io" and not Path("/usr/include/libaio.h").exists():
            return "DeepSpeed's async_io needs libaio and its headers (libaio-dev)"
        by_cuda = op == "async_io" or _release("deepspeed") < CPU_ADAM_WITHOUT_CUDA
        if gpus and by_cuda and not (os.environ.get("CUDA_HOME") or shutil.which("nvcc")):
            return f"DeepSpeed's {op} is compiled by CUDA's compiler, and nvcc is not on PATH"
        return ""
    return f"DeepSpeed's {op} must be compiled, and there is no C++ compiler ({compiler} or g++)"


def cannot_compile() -> str:
    """Return the reason why torch.compile cannot run here; empty if it can."""
    wanted = os.environ.get("CXX", "c++")
    if not any(map(shutil.which, (wanted, "g++", "clang++"))):
        return f"torch.compile needs a C++ compiler ({wanted} or g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "torch.compile needs Python's headers (python3-dev)"
    return ""


@dataclass(frozen=True)
class TorchBuild:
    """Facts of a torch: releases of CUDA and of HIP (one of them empty), codes as "sm_80 sm_90".

    By them a platform finds out before the first probe if it can use its devices: the venv of a
    machine may hold torch for CPUs, one whose CUDA is newer than the driver, or one without code
    for the card. Each would end every rank of every probe with a different error.
    """

    version: str
    cuda: str
    architectures: str = ""
    hip: str = ""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return True if it has code for this compute capability.

        Binaries (sm_XY) run on later minor versions of their major one, intermediate code
        (compute_XY) on everything later (CUDA programming guide, "Application Compatibility").
        """
        found = re.findall(r"\b(sm|compute)_(\d+)(\d)\b", self.architectures)
        codes = [(kind, (int(major), int(minor))) for kind, major, minor in found]
        return not codes or any(
            code <= capability and (kind == "compute" or code[0] == capability[0])
            for kind, code in codes
        )


def installed_torch() -> TorchBuild | None:
    """Return the facts of the installed torch, read from its files; None if there is none."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        found = {
            name: re.search(rf"^{name}\b[^=]*= '([^']*)'", text, flags=re.MULTILINE)
            for name in ("__version__", "cuda", "hip")
        }
        version, cuda, hip = (match.group(1) if match else "" for match in found.values())
        return TorchBuild(version, cuda, hip=hip)
    return None
