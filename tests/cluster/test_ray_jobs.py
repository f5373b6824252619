"""`ray job submit`: a command of joulefront sent to a Ray cluster with a token, from outside."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.cluster.alone import run_alone, short_folder
from tests.support.commands import write_program

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = """
"$RAY" start --head --num-cpus 1 --node-ip-address 127.0.0.1 --temp-dir "$FOLDER" \\
    > "$FOLDER/start" ||
    cat "$FOLDER/start"
cd /
export RAY_ADDRESS=http://127.0.0.1:8265
timeout 120 "$RAY" job submit -- "$PYTHON" -m tuner.cli.main doctor --ray auto
echo "ENDED $?"
timeout 120 "$RAY" job submit -- "$PYTHON" -m tuner.cli.main doctor --ray "ray://127.0.0.1:10001"
echo "ENDED $?"
RAY_AUTH_TOKEN=wrong timeout 60 "$RAY" job submit -- true
echo "ENDED $?"
"""


@pytest.fixture
def answer(tmp_path: Path) -> str:
    if importlib.util.find_spec("aiohttp_cors") is None:
        pytest.skip("needs joulefront[ray], which is ray[default]")
    ray = write_program(
        tmp_path / "ray-program",
        f'#!/bin/sh\nexec "{sys.executable}" -m ray.scripts.scripts "$@"\n',
    )
    with short_folder() as folder:
        done = run_alone(
            SCRIPT,
            folder,
            timeout_s=360,
            RAY=str(ray),
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN="0" * 64,
            RAY_worker_niceness="0",
        )
    return done.stdout + done.stderr


def test_a_job_inspects_the_cluster_that_it_was_sent_to(answer: str) -> None:
    doctor, refused, stranger, _ = re.split(r"^ENDED", answer, flags=re.M)
    assert "node        " in doctor, answer[-4000:]
    assert "(127.0.0.1)" in doctor
    # A command that is refused fails as a job, and its sentence reaches the terminal.
    assert "is not an address of a Ray cluster" in refused
    # Without the right token nothing runs.
    assert stranger.startswith(" 1\n")
    codes = re.findall(r"^ENDED (\d+)$", answer, re.M)
    assert codes[1] == "1"
    assert codes[2] != "0"
