"""Faults injected into the governor: clocks that stay wrong after its death.

Agents in processes of their own set clocks, memory clocks and power limits on a twin GPU node,
through the unmodified pynvml, one setting after the other, and are ended at a random moment: by
SIGKILL, SIGTERM or SIGINT to the whole process group (with the driver that started them), by
SIGKILL to the agent alone while a child holds its pipe, by an exception, by `_exit`. In other cases
a setter fails half-way, a restore fails at first, or the guard is killed. Afterwards every GPU must
have its earlier settings within ten seconds. Target: none left wrong.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from tuner.testing.twin import TwinGpu, TwinNode

FAULTS = (
    "kill_group",
    "terminate_group",
    "interrupt_group",
    "kill_agent_leaky",
    "exception",
    "exit",
    "setter_fails",
    "restore_fails_first",
    "guard_killed",
    "clean",
)
LIMIT_S = 10.0

AGENT = """
import os, random, signal, sys, time
import pynvml
from tuner.testing.twin import TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.workload.clocks.governor import GovernorError, NvmlGovernor
fault, seed = sys.argv[1], int(sys.argv[2])
node = TwinNode.of_environment()
governor = NvmlGovernor(environ={})
draw = random.Random(seed)
def some():
    live = {}
    while not live:
        if draw.random() < 0.7:
            live["clock_MHz"] = draw.choice([600, 900, (750, 1305), 1410])
        if draw.random() < 0.4:
            live["memory_clock_MHz"] = draw.choice([405, 1593])
        if draw.random() < 0.4:
            live["power_limit_W"] = draw.choice([150, 250, (200, 300)])
    return Settings(live)
governor.apply(some())
if fault == "kill_agent_leaky" and os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print(governor._guard.pid, flush=True)
count = draw.randrange(1, 12)
for number in range(10**9):
    if fault in ("exception", "exit", "clean", "guard_killed") and number == count:
        break
    if fault == "setter_fails" and number == count:
        node.fail("nvmlDeviceSetGpuLockedClocks", pynvml.NVML_ERROR_UNKNOWN, first=2, times=1)
        try:
            governor.apply(Settings(clock_MHz=(600, 900)))
        except GovernorError:
            governor.close()
            sys.exit(0)
        sys.exit(9)
    if fault == "restore_fails_first" and number == count:
        node.fail("nvmlDeviceResetGpuLockedClocks", pynvml.NVML_ERROR_UNKNOWN, times=2)
        governor.close()
        sys.exit(0)
    governor.apply(some())
    time.sleep(draw.random() * 0.01)
if fault == "exception":
    raise RuntimeError("the agent fell over")
if fault == "exit":
    os._exit(3)
if fault == "guard_killed":
    os.kill(governor._guard.pid, signal.SIGKILL)
    governor.apply(some())  # a new guard is made before anything is touched
    os.kill(os.getpid(), signal.SIGKILL)
governor.close()
"""
#: The driver: it starts the agent in its own process group, as a job's launcher does.
DRIVER = """
import subprocess, sys
agent = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(agent.pid, flush=True)
sys.exit(agent.wait() and 1)
"""


def stands(node: TwinNode) -> list[tuple[object, ...]]:
    """What every GPU stands at: lock, memory lock, limit."""
    return [
        (node.locked_MHz(gpu), node.memory_locked_MHz(gpu), node.limit_W(gpu)) for gpu in range(2)
    ]


def try_fault(fault: str, seed: int, folder: Path) -> str:
    """Try one fault; what was left wrong, or empty."""
    draw = random.Random(seed)
    gpus = [TwinGpu(limit_W=limit, memory_MHz=(405, 1593)) for limit in (350.0, 375.0)]
    node = TwinNode(folder / f"{fault}-{seed}", gpus, virtual_time=False)
    before = stands(node)
    environ = os.environ | node.environment() | {"PYTHONPATH": str(ROOT)}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "-c", AGENT, fault, str(seed)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    agent = int(driver.stdout.readline())
    driver.stdout.readline()  # the guard's pid: the first setting stands
    touched = stands(node) != before
    signals: dict[str, signal.Signals] = {
        "kill_group": signal.SIGKILL,
        "terminate_group": signal.SIGTERM,
        "interrupt_group": signal.SIGINT,
    }
    if fault in signals:
        time.sleep(draw.random() * 0.15)
        os.killpg(driver.pid, signals[fault])
    elif fault == "kill_agent_leaky":
        time.sleep(draw.random() * 0.15)
        os.kill(agent, signal.SIGKILL)
    driver.wait()
    end_s = time.monotonic() + LIMIT_S
    while stands(node) != before and time.monotonic() < end_s:
        time.sleep(0.02)
    # The guard may still be at work: what stands must stay so.
    time.sleep(0.1)
    left = stands(node)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)  # a leaky child is all that can be left
    driver.stdout.close()
    if not touched and fault != "clean" and not node.log:
        return "the fault came before anything was set: it tried nothing"
    return "" if left == before else f"left {left}, before {before}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("faults tried on the governor, and clocks left wrong")
    parser.add_argument("--rounds", type=int, default=10, help="of each fault")
    options = parser.parse_args(argv)
    tried = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for fault in FAULTS:
            bad = 0
            for seed in range(options.rounds):
                said = try_fault(fault, seed, Path(folder))
                tried += 1
                bad += bool(said)
                if said:
                    print(f"{fault} {seed}: {said}", flush=True)
            wrong += bad
            print(f"{fault:22} {options.rounds} tried, {bad} left wrong", flush=True)
    publish(
        [Figure("faults_tried", tried, "count"), Figure("clocks_left_wrong", wrong, "count")],
        options.json,
    )


if __name__ == "__main__":
    main()
