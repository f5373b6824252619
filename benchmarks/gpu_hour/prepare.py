"""`prepare`: collects the wheels that a borrowed machine without a network lacks.

The machine has torch, transformers and what they need. DeepSpeed and four small packages are
enough: `tuner dev probe` needs neither Ray nor Optuna. About 5 MB.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.figures import ROOT
from tests.support.commands import finished
from tuner.search_spaces.errors import InputError

PACKAGES = ("hjson", "pydantic", "pydantic-core", "annotated-types", "typing-inspection")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def prepare(folder: Path, python: str) -> list[Path]:
    """Collect the wheels of the pinned versions and return them.

    Args:
        folder: gets the wheels.
        python: the machine's version of Python, such as "3.12".

    Raises:
        InputError: pip cannot get one of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    shared = ["--no-deps", "-c", str(ROOT / "constraints.txt")]
    # DeepSpeed has no wheel; its own is pure Python where no op is built, and needs torch to build.
    build = [*pip, "wheel", *shared, "--no-build-isolation", "-w", str(folder), "deepspeed"]
    _run(build, DS_BUILD_OPS="0")
    tags = ["--python-version", python, "--implementation", "cp"]
    tags += [word for platform in PLATFORMS for word in ("--platform", platform)]
    _run([*pip, "download", *shared, "--only-binary=:all:", *tags, "-d", str(folder), *PACKAGES])
    return sorted(folder.glob("*.whl"))


def _run(words: list[str], **environment: str) -> None:
    done = finished(words, env=os.environ | environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise InputError(f"pip cannot collect the wheels: {last}; run this where pip works")
