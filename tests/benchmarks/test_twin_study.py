"""Commands and a whole study on a twin node: found, set, measured, marked, and near the truth."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.twin.front import run_study
from tests.support.commands import finished

pytestmark = pytest.mark.needs("cc")


def test_a_command_runs_on_a_twin_node_and_its_exit_code_is_returned() -> None:
    code = (
        "import pynvml, sys; pynvml.nvmlInit();"
        "handle = pynvml.nvmlDeviceGetHandleByIndex(2);"
        "print(pynvml.nvmlDeviceGetCount(), pynvml.nvmlDeviceGetName(handle)); sys.exit(5)"
    )
    command = [sys.executable, "-m", "tests.twin", "--gpus", "3", "--"]
    done = finished([*command, sys.executable, "-c", code])
    assert (done.returncode, done.stdout) == (5, "3 joulefront twin\n")
    assert subprocess.run(command, capture_output=True).returncode == 2


@pytest.mark.long
@pytest.mark.real
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_a_study_under_ray_finds_the_twins_front() -> None:
    found = run_study(max_probes=16, limit_s=1100)  # as benchmarks.twin
    told = found.told
    assert told["devices"] == 2  # by Ray's own NVML calls
    assert told["locked_after"] == [None, None]
    assert told["clocks_set"] > 3
    assert told["marks"] == ["twin"]
    assert told["meters"] == ["NVML total-energy counter of 2 twin GPUs"]
    assert "(twin)" in told["answer"]
    assert told["report"].count(">twin</span>") > 5
    assert all(point["meter"]["twin"] for point in told["json"]["points"])
    assert told["action"] in ("train", "keep")
    assert found.hypervolume > 0.9
    assert np.median(abs(found.window_errors)) < 0.002
    assert np.median(abs(found.errors)) < 0.01
    assert json.dumps(told["json"])
