"""Meters of a measured command: GPUs of a twin node, and meters that fail."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from tests.receipt.conftest import UserFolder
from tests.support.commands import finished
from tests.twin import TwinGpu, TwinNode
from tests.waiting import wait_until
from tuner.receipt.measure import open_node_meter, receipt_file
from tuner.search_spaces.errors import InputError

FAILS = """
import time
from tuner.workload.node.meters import MeterError, Reading
from tuner.workload.records.probe import PowerSample
from tuner.workload.records.probe import MeterInfo

class Fails:
    info = MeterInfo("fails", "node", "a meter that fails after its third reading")
    resolution_s, reads = 0.1, 0

    def read(self):
        self.reads += 1
        if self.reads > 3:
            raise MeterError("the wattmeter is unplugged")
        return Reading(time.monotonic(), 50.0 * self.reads)

    def boundary(self, *, opens):
        return self.read()

    def sample(self):
        return PowerSample(time.monotonic(), 50.0)

    def close(self):
        pass
"""


@pytest.mark.needs("cc")
def test_gpus_are_charged_exactly_and_each_has_its_share(
    user: UserFolder, twin_node: Callable[..., TwinNode]
) -> None:
    gpu = TwinGpu(sensor_period_s=0.0)
    node = twin_node(gpu, gpu, children=True, virtual_time=False, cores=8)
    node.set(0, load=1.0)
    process = user.start("sleep", "3", env=user.environment | node.environment())
    process.communicate(timeout=60)
    receipt = user.read()
    busy_W, idle_W = node.power_W(0), node.power_W(1)
    assert receipt["meter"]["scope"] == "gpu"
    assert receipt["meter"]["figures"] == "twin"
    assert receipt["mean_power_W"] == pytest.approx(busy_W + idle_W, rel=0.05)
    busy, idle = receipt["devices"]
    assert (busy["name"], idle["name"]) == ("GPU 0", "GPU 1")
    assert busy["mean_W"] == pytest.approx(busy_W, rel=0.05)
    assert busy["mean_W"] + idle["mean_W"] == pytest.approx(receipt["mean_power_W"])
    assert (busy["idle"], idle["idle"]) == (0.0, 1.0)
    assert receipt["idle_share"] == 0.5
    assert receipt["throttled_share"] is not None


@pytest.mark.needs("cc")
def test_gpus_of_different_kinds_are_metered_together(twin_node: Callable[..., TwinNode]) -> None:
    twin_node(TwinGpu(name="NVIDIA A100-SXM4-80GB"), TwinGpu(name="NVIDIA L4"), virtual_time=False)
    meter = open_node_meter()
    meter.close()
    assert "2 twin GPUs" in meter.info.source


@pytest.mark.needs("cc")
def test_gpus_that_cannot_be_asked_are_one_sentence(twin_node: Callable[..., TwinNode]) -> None:
    twin_node(virtual_time=False).fail("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(InputError, match="GPUs"):
        open_node_meter()


@pytest.mark.parametrize("kind", ["a pipe", "20,000 files"])
def test_what_a_program_leaves_to_be_counted_takes_no_time_or_energy(
    user: UserFolder, kind: str
) -> None:
    left = {
        "a pipe": "os.mkfifo(f'{folder}/1-1.0')",
        "20,000 files": (
            "now, facts = time.monotonic(), dict(rank=0, world=1, pid=1, parent=1, words=['x'])\n"
            "for n in range(20000):\n"
            "    data = struct.pack('=5d', 5, now, now, 1, 1) + json.dumps(facts).encode()\n"
            "    open(f'{folder}/{n}', 'wb').write(data)"
        ),
    }
    lines = ["import json, os, struct, time", "folder = os.environ['JOULEFRONT_ATTACH']"]
    lines += [left[kind], "print(time.clock_gettime(time.CLOCK_MONOTONIC))"]
    (user.path / "leaves.py").write_text("\n".join(lines))
    done = user.measure(sys.executable, "leaves.py")
    ended_s = float(done.out) - done.receipt["began_monotonic_s"]
    assert done.code == 0
    assert done.receipt["time_s"] < ended_s + 1.5
    assert done.receipt["steps"] <= 5 * 4096


def test_a_meter_that_fails_leaves_the_command_alone(user: UserFolder) -> None:
    (user.path / "own.py").write_text(FAILS)
    failed = "until grep -q unplug[g]ed energy.json; do kill -USR1 $PPID; sleep 0.1; done"
    began_s = time.monotonic()
    line = f"trap : USR1; {failed}; sleep 1"
    done = user.measure("bash", "-c", line, options=("--meter", "own:Fails"))
    took_s = time.monotonic() - began_s
    assert done.code == 0
    assert done.note("the wattmeter is unplugged")
    assert done.receipt["energy_J"] == 100.0
    assert done.receipt["time_s"] < took_s - 1.0


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(InputError, match="name a file with --out FILE"):
        receipt_file(None, tmp_path / "runs", ["true"])


def test_an_out_that_cannot_be_written_starts_nothing(user: UserFolder) -> None:
    words = [sys.executable, "-m", "tuner.cli", "run", "--out", "nowhere/energy.json", "--"]
    done = finished([*words, "touch", "started"], cwd=user.path, env=user.environment)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert not (user.path / "started").exists()


def test_one_of_several_tasks_says_so(user: UserFolder) -> None:
    done = user.measure("true", env={"SLURM_STEP_TASKS_PER_NODE": "4(x2)"})
    assert done.note("one of 4 that a launcher started on this node")


@pytest.mark.slow
def test_a_thousand_trainings_take_little_of_a_core(user: UserFolder) -> None:
    (user.path / "many.py").write_text(
        "import os, time, torch\noptimizer = torch.Optimizer()\noptimizer.step()\n"
        "for _ in range(1000):\n"
        "    if os.fork() == 0:\n        optimizer.step(); os._exit(0)\n    os.wait()\n"
        "open('stepped', 'w').write('1')\n"
        "while not os.path.exists('finish'): time.sleep(0.1)\n"
    )
    process = user.start(sys.executable, "many.py")
    wait_until((user.path / "stepped").exists, 200)
    seconds, before_s = 4.0, cpu_s(process.pid)
    time.sleep(seconds)
    took_s = cpu_s(process.pid) - before_s
    (user.path / "finish").touch()
    _, err = process.communicate(timeout=200)
    receipt = user.read()
    assert len(receipt["trainings"]) == 1001
    assert json.dumps(receipt).count('"steps": 1,') == 1001
    assert err.count("\n") < 40
    # A write of the receipt is not part of what looking may take.
    assert took_s < 0.25 * seconds


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, without its children."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
