"""Packages with torch's CUDA build, installed into cached folders beside this environment.

This environment may have a build for CPUs. pip resolves with its own settings; `===` leaves out
builds with a local version, such as 2.13.0+cpu. That torch is then a build with CUDA is checked.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import ROOT
from tests.support.commands import finished

#: The CUDA build with its libraries takes 4.5 GB, and as much again while it is downloaded.
NEEDED_BYTES = 12 * 10**9
NEWEST = ("torch", "deepspeed", "transformers", "triton")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1")


class NotInstalled(Exception):
    """The reason why a CUDA build cannot be had here, as one sentence."""


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "joulefront" / "cuda-build"


def pinned(*, limit_s: float = 600.0) -> Path:
    """Return a folder with the CUDA build of the torch that constraints.txt names.

    Raises:
        NotInstalled: it is not there, and cannot be installed.
    """
    text = (ROOT / "constraints.txt").read_text()
    version = re.findall(r"^torch==([\w.]+)$", text, re.M)[0]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as others:
        others.write(re.sub(r"^torch==.*$", "", text, flags=re.M))
        others.flush()
        wanted = ["-c", others.name, f"torch==={version}"]
        return _folder(f"pinned-torch-{version}", wanted, limit_s)


def newest(*, limit_s: float = 900.0) -> Path:
    """Return a folder with the newest torch, DeepSpeed, transformers and triton.

    A torch demands one version of triton; a newer one replaces it.

    Raises:
        NotInstalled: they are not there, and cannot be installed.
    """
    versions = {name: _newest(name) for name in NEWEST}
    wanted = [f"{name}==={version}" for name, version in versions.items() if name != "triton"]
    name = "newest-" + "-".join(versions.values())
    return _folder(name, wanted, limit_s, then=[f"triton==={versions['triton']}"])


def _newest(name: str) -> str:
    done = finished([*_PIP, "index", "versions", name], timeout=120)
    if not (found := re.search(rf"^{name} \(([\w.]+)", done.stdout, re.M)):
        raise NotInstalled(f"pip does not find {name} ({_error(done.stderr)})")
    return found[1]


def _folder(name: str, wanted: Sequence[str], limit_s: float, then: Sequence[str] = ()) -> Path:
    """Return the cached folder of this name, after installing if there is a time limit for it."""
    cache = _cache()
    python = f"py{sys.version_info[0]}{sys.version_info[1]}"
    place = cache / f"{name}-{python}"
    if place.is_dir():
        return place
    if not limit_s:
        raise NotInstalled(f"no CUDA build of torch is installed in {place}")
    cache.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(cache).free) < NEEDED_BYTES:
        raise NotInstalled(
            f"{cache} has {free / 1e9:.0f} GB free, and a CUDA build of torch needs "
            f"{NEEDED_BYTES / 1e9:.0f} GB while it is installed"
        )
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():  # by the process that was waited for
            return place
        with tempfile.TemporaryDirectory(dir=cache) as half:
            made = Path(half) / "made"
            _install(made, wanted, limit_s)
            if then:
                _install(made, ["--upgrade", "--no-deps", *then], limit_s)
            if not re.search(r"^cuda\b.*= '", (made / "torch/version.py").read_text(), re.M):
                raise NotInstalled("pip's index offers no build of torch with CUDA")
            for older in cache.glob(f"{name.partition('-')[0]}-*-{python}"):
                shutil.rmtree(older)
            made.rename(place)
    return place


def _install(folder: Path, wanted: Sequence[str], limit_s: float) -> None:
    options = ["--no-compile", "--no-warn-conflicts", "--no-build-isolation", "--target", folder]
    try:
        done = finished([*_PIP, "install", "--quiet", *options, *wanted], timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"pip did not install {wanted[-1]} within {limit_s:.0f} s") from error
    if done.returncode:
        raise NotInstalled(f"pip cannot install {wanted[-1]}: {_error(done.stderr)}")


def _error(text: str) -> str:
    """Return pip's last error line, shortened."""
    return next((line for line in reversed(text.splitlines()) if "ERROR" in line), "")[:200]
