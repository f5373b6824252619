"""Ranks on a twin node: they draw and are slowed as the law says, and no other process is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import pynvml
import pytest

from tuner.testing.twin import TwinGpu, TwinNode

pytestmark = pytest.mark.twin
Make = Callable[..., TwinNode]

GPU = TwinGpu(pace=4.0, clock_free_share=0.2, leak_per_K=0.0)
#: Computes for so many seconds of CPU time, between two lines that say when.
COMPUTE = """
import os, sys, time
def compute(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
compute(0.02)  # the timer has fired: this process has its GPU
cpu_s, wall_s = time.process_time(), time.monotonic()
compute(float(sys.argv[1]))
print((time.monotonic() - wall_s) / (time.process_time() - cpu_s))
"""


def rank(
    node: TwinNode, seconds: float, env: Mapping[str, str], code: str = COMPUTE
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(seconds)],
        env=os.environ | node.environment() | env,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("clock_MHz", [1410, 705])
def test_work_takes_the_time_and_the_energy_of_the_law(twin_node: Make, clock_MHz: int) -> None:
    node = twin_node(GPU, virtual_time=False)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceSetGpuLockedClocks(handle, clock_MHz, clock_MHz)
    began_s, before_J = time.monotonic(), node.energy_J()
    process = rank(node, 0.2, {"LOCAL_RANK": "0"})
    while process.poll() is None:
        time.sleep(0.05)
        node.power_W()  # the state is brought up to date while the rank can be asked
    lasted_s, energy_J = time.monotonic() - began_s, node.energy_J() - before_J
    assert process.stdout is not None
    law_s = node.device_s(clock_MHz)
    assert law_s == pytest.approx(4.0 * (0.2 + 0.8 * 1410 / clock_MHz))
    # A tick of 4 ms is not held back yet; neighbours on the cores may make it longer.
    assert 0.95 * law_s < float(process.stdout.read()) < 2 * law_s
    assert node.work_s() > 0.2
    dynamic_W = node.law_W(clock_MHz, 1.0) - node.law_W(clock_MHz, 0.0)
    busy_J = dynamic_W * law_s * node.work_s()
    assert energy_J == pytest.approx(60.0 * lasted_s + busy_J, rel=0.01)


def test_a_rank_works_on_its_entry_of_the_visible_gpus(twin_node: Make) -> None:
    node = twin_node(GPU, GPU, TwinGpu(uuid="GPU-named", pace=1.0), virtual_time=False)
    visible = {"CUDA_VISIBLE_DEVICES": "1,GPU-named"}
    processes = [rank(node, 0.3, {"LOCAL_RANK": str(i)} | visible) for i in range(2)]
    seen: list[set[int]] = [set(), set(), set()]
    listed: set[int] = set()
    pynvml.nvmlInit()
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        for gpu in range(3):
            seen[gpu] |= set(node.ranks(gpu))
            handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
            listed |= {p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    assert seen == [set(), {processes[0].pid}, {processes[1].pid}]
    assert listed == seen[1] | seen[2]
    assert node.work_s(0) == 0
    assert node.ranks(1) == node.ranks(2) == []


def test_a_forked_child_becomes_a_rank_and_its_own_helpers_do_not(twin_node: Make) -> None:
    node = twin_node(GPU, virtual_time=False)
    code = f"""
import os, subprocess, sys
if pid := os.fork():
    os.waitpid(pid, 0)
else:
    os.environ["LOCAL_RANK"] = "0"
    text = {COMPUTE!r}
    exec(text)
    text = text.partition("print")[0]
    timers = "print(open('/proc/self/timers').read().count('ClockID'))"
    exec(timers)
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", text + timers, "0.05"])
"""
    process = rank(node, 0.2, {}, code)
    slowed, own, helpers = process.communicate(timeout=60)[0].split()
    assert float(slowed) > 0.95 * 4.0
    assert (own, helpers) == ("1", "0")  # timers that hold it back


def test_the_start_of_a_rank_is_no_work_of_its_device(twin_node: Make) -> None:
    node = twin_node(replace(GPU, host_s=0.3), virtual_time=False)
    process = rank(node, 0.1, {"LOCAL_RANK": "0"})
    process.communicate(timeout=60)
    assert node.work_s() == 0.0


def test_without_a_pace_nothing_is_slowed(twin_node: Make) -> None:
    node = twin_node(TwinGpu(load=0.5), virtual_time=False)
    process = rank(node, 0.1, {"LOCAL_RANK": "0"})
    process.communicate(timeout=60)
    assert (node.work_s(), node.ranks()) == (0.0, [])
