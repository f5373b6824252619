"""A shell in namespaces of its own, whose processes end with it and whose ports are its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.needs import require
from tests.support.commands import finished

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for Ray's sockets in it."""
    with tempfile.TemporaryDirectory(prefix="jf-", dir="/tmp", ignore_cleanup_errors=True) as made:
        yield Path(made)


def run_alone(
    script: str, folder: Path, *, timeout_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of bash, which finds its loopback up, $PYTHON, and the folder as $FOLDER."""
    require("namespaces")
    # A proxy of this machine cannot be reached from inside.
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = finished(
        [*ALONE, "bash", "-c", f"ip link set lo up\n{script}"],
        env={
            **kept,
            "PYTHON": sys.executable,
            "FOLDER": str(folder),
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            **variables,
        },
        timeout=timeout_s,
    )
    if "unshare failed" in done.stderr:
        pytest.skip(f"namespaces may not be made here: {done.stderr}")
    return done
