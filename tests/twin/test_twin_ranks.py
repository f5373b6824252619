"""Ranks on a twin node: their steps take the time and the energy of the laws."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from tests.twin import TwinGpu, TwinNode
from tests.twin.specimens import CORE_GPU
from tuner.workload.node.meters.nvml import NvmlMeter

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]

GPU = TwinGpu(step_s=0.1, micro_batch_s=0.02, sample_s=0.03, clock_free_share=0.2)
#: Trains as a program with the hook does: opens its configuration and counts its steps.
PROGRAM = """
import os, sys
from tuner.workload.hook import state
from tuner.workload.hook.link import Link
link = Link(sys.argv[1], 0)
if sys.argv[2]:
    open(sys.argv[2]).read()
while True:
    link.mark("forward")
    link.step_done()
"""


class Rank:
    """A rank, and its agent's end of the link."""

    def __init__(
        self,
        node: TwinNode,
        env: Mapping[str, str],
        *,
        config: str = "",
        program: str = PROGRAM,
    ) -> None:
        path = f"{node.path}-{env.get('LOCAL_RANK', '')}.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, path, config],
            env=os.environ | node.environment() | env,
        )
        listener.settimeout(60)
        self._link = listener.accept()[0]
        listener.close()
        self._lines = self._link.makefile("r")
        self.pid = int(self._lines.readline().split()[2])  # hello RANK PID
        self.first_s = self._until_boundary()[-1]

    def _until_boundary(self) -> list[float]:
        """Return when the steps ended, the last one at the boundary."""
        ends = list[float]()
        while line := self._lines.readline():
            kind, _, time_s = line.split()[:3]
            if kind in ("step", "at"):
                ends.append(float(time_s))
            if kind == "at":
                return ends
        raise AssertionError("the rank has ended")

    def run(self, steps: int) -> list[float]:
        """Run until this number of steps is done; return the end of each."""
        self._link.sendall(f"run {steps}\n".encode())
        return self._until_boundary()

    def close(self) -> None:
        self._lines.close()
        self._link.close()  # at which the hook ends its process
        self.process.wait(timeout=60)


@pytest.fixture
def start() -> Iterator[Callable[..., Rank]]:
    """Return a function that starts a rank."""
    ranks: list[Rank] = []

    def begin(*args: object, **options: object) -> Rank:
        ranks.append(Rank(*args, **options))  # type: ignore[arg-type]
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("clock_MHz", [1410, 705])
def test_steps_take_the_time_and_the_energy_of_the_laws(
    twin_node: Make, start: Callable[..., Rank], clock_MHz: int
) -> None:
    node = twin_node(GPU)  # virtual time: however long the process computes
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceSetGpuLockedClocks(handle, clock_MHz, clock_MHz)
    rank = start(node, {"LOCAL_RANK": "0"})
    node.sleep(3.0)  # a boundary: the device has nothing to do
    assert node.power_W() == node.law_W(clock_MHz, 0.0)
    began_s, before_J, work_s = node.clock(), node.energy_J(), node.work_s()
    ends = rank.run(9)
    law_s = 0.15 * node.device_s(clock_MHz)  # a step and a micro-batch of one sample
    assert node.device_s(clock_MHz) == pytest.approx(0.2 + 0.8 * 1410 / clock_MHz)
    assert ends == pytest.approx([began_s + n * law_s for n in range(1, 9)], abs=1e-6)
    assert node.work_s() - work_s == pytest.approx(8 * 0.15)
    busy_J = node.law_W(clock_MHz, 1.0) * 8 * law_s
    idle_J = node.law_W(clock_MHz, 0.0) * (node.clock() - ends[-1])
    assert node.energy_J() - before_J == pytest.approx(busy_J + idle_J, rel=1e-6)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle)[0].pid == rank.process.pid


@pytest.mark.parametrize("clock_MHz", [1410, 910])
def test_a_metered_window_is_that_of_the_laws(
    twin_node: Make, start: Callable[..., Rank], clock_MHz: int
) -> None:
    node = twin_node(replace(CORE_GPU, switch_s=0.0), call_s=1e-5)
    rank = start(node, {"LOCAL_RANK": "0"})
    meter = NvmlMeter(clock=node.clock, sleep=node.sleep, environ={})
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceSetGpuLockedClocks(handle, clock_MHz, clock_MHz)
    rank.run(5)
    opened = meter.boundary(opens=True)
    ends = rank.run(25)
    closed = meter.boundary(opens=False)
    meter.close()
    work_s = 20 * (CORE_GPU.step_s + CORE_GPU.micro_batch_s + CORE_GPU.sample_s)
    busy_s = work_s * node.device_s(clock_MHz)
    assert ends[-1] - opened.time_s == pytest.approx(busy_s, abs=1e-4)
    law_J = node.law_W(clock_MHz, 1.0) * busy_s
    assert closed.energy_J - opened.energy_J == pytest.approx(law_J, rel=5e-4)


def test_work_follows_micro_batches_their_size_and_the_ranks_of_a_replica(
    twin_node: Make, start: Callable[..., Rank], tmp_path: Path
) -> None:
    node = twin_node(GPU)
    config = tmp_path / "config.json"
    config.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "global_batch": 8}'
    )
    env = {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}  # of one replica, as 8 = 2 x 4
    rank = start(node, env, config=str(config))
    began_s = node.clock()
    assert rank.run(2)[0] - began_s == pytest.approx(0.1 + 4 * (0.02 + 0.03 * 2 / 2), abs=1e-6)


def test_a_rank_works_on_its_entry_of_the_visible_gpus(
    twin_node: Make, start: Callable[..., Rank]
) -> None:
    node = twin_node(GPU, GPU, TwinGpu(uuid="GPU-named", step_s=0.1), virtual_time=False)
    visible = {"CUDA_VISIBLE_DEVICES": "1,GPU-named"}
    ranks = [start(node, {"LOCAL_RANK": str(i)} | visible) for i in range(2)]
    assert [node.ranks(gpu) for gpu in range(3)] == [[], [ranks[0].pid], [ranks[1].pid]]
    for rank in ranks:
        rank.run(2)
    assert [node.work_s(gpu) > 0 for gpu in range(3)] == [False, True, True]


def test_a_forked_child_is_the_rank_and_its_helpers_are_none(
    twin_node: Make, start: Callable[..., Rank]
) -> None:
    node = twin_node(GPU)
    code = f"""
import os, subprocess
if pid := os.fork():
    os.waitpid(pid, 0)
else:
    os.environ["LOCAL_RANK"] = "0"
    subprocess.run(["true"])
    exec({PROGRAM!r})
"""
    rank = start(node, {}, program=code)
    assert node.ranks() == [rank.pid]
    assert rank.pid != rank.process.pid


def test_a_killed_rank_leaves_no_work(twin_node: Make, start: Callable[..., Rank]) -> None:
    node = twin_node(GPU, virtual_time=False)
    rank = start(node, {"LOCAL_RANK": "0"})
    rank._link.sendall(b"run 1000\n")
    rank._lines.readline()
    os.kill(rank.process.pid, signal.SIGKILL)
    rank.process.wait()
    assert node.ranks() == []
    work_s = node.work_s()
    time.sleep(0.05)
    assert node.work_s() == work_s
