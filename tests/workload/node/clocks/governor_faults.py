"""Faults injected into the governor: clocks that stay wrong after its death.

Agents in processes of their own set clocks, memory clocks and power limits on a twin GPU node,
through the unmodified pynvml, or clocks and power caps of the cores of a made-up sysfs, one setting
after the other, and are ended at a random moment: by
SIGKILL, SIGTERM or SIGINT to the whole process group (with the driver that started them), by
SIGKILL to the agent alone while a child holds its pipe, by an exception, by `_exit`. On a GPU node
where only root may set clocks, agents ask the guard of root, as a unit starts it. In other cases
a setter fails half-way, a restore fails at first, or the guard is killed. Afterwards every device
must have its earlier settings within half a minute, but for a power limit that another process has
set meanwhile: that stays. Target: none left wrong.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.guards import installed_guard
from tests.support.sysfs import make_sysfs, settings_of
from tests.twin import TwinGpu, TwinNode
from tuner.workload.node.clocks.root_guard import GUARD_SOCKET as SOCKET

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
LIMIT_S = 30.0
ROOT = Path(__file__).resolve().parents[4]

#: What an agent sets, and how its devices are made to fail: GPUs of a twin node, ...
GPUS = """
import os, random, signal, sys, time
import pynvml
from tests.twin import TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.clocks.base import GovernorError, SetByOthers
from tuner.workload.node.clocks.governor import NvmlGovernor
node = TwinNode.of_environment()
governor = NvmlGovernor(environ={})
guard_pid = lambda: governor._guard.pid
choices = {
    "clock_MHz": (0.7, [600, 900, (750, 1305), 1410]),
    "memory_clock_MHz": (0.4, [405, 1593]),
    "power_limit_W": (0.4, [150, 250, (200, 300)]),
}
half_way = {"clock_MHz": (600, 900)}
def another_sets():
    node.set(0, limit_W=float(sys.argv[4]))
def fail_setter():
    node.fail("nvmlDeviceSetGpuLockedClocks", pynvml.NVML_ERROR_UNKNOWN, first=2, times=1)
def fail_restore():
    node.fail("nvmlDeviceResetGpuLockedClocks", pynvml.NVML_ERROR_UNKNOWN, times=2)
"""
#: ... the same through the guard of root, ...
BY_ROOT = GPUS.replace("environ={}", "environ={SOCKET: os.environ[SOCKET]}").replace(
    "governor._guard.pid", "guards_of(os.getpid())[0]"
)
BY_ROOT = f"from tests.support.guards import guards_of\nSOCKET = {SOCKET!r}\n{BY_ROOT}"
#: The power limit of the cores' package that another process sets.
CAP = "class/powercap/intel-rapl:0/constraint_0_power_limit_uw"
#: ... or the cores of a made-up sysfs.
CORES = f"""
CAP = {CAP!r}
"""
CORES += """
import os, random, signal, sys, time
from pathlib import Path
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.clocks.base import GovernorError, SetByOthers
from tuner.workload.node.clocks.cpu import CpuGovernor
governor = CpuGovernor(sys.argv[3], cpus=range(4))
guard_pid = lambda: governor._guard.pid
choices = {
    "clock_MHz": (0.7, [900, 1800, 2500, 3600]),
    "power_limit_W": (0.5, [14, 20, 27]),
}
half_way = {"clock_MHz": 1500}
write = Path.write_text
def another_sets():
    write(Path(sys.argv[3], CAP), f"{sys.argv[4]}000000")
def fail(first, times):
    calls = iter(range(10**9))
    def flaky(path, text):
        if first <= next(calls) < first + times:
            raise OSError(5, "Input/output error", str(path))
        return write(path, text)
    Path.write_text = flaky
def fail_setter():
    fail(3, 1)
def fail_restore():
    fail(0, 2)
"""
AGENT = """
fault, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
def some():
    live = {}
    while not live:
        for name, (chance, values) in choices.items():
            if draw.random() < chance:
                live[name] = draw.choice(values)
    return Settings(live)
def change():
    try:
        governor.apply(some())
    except SetByOthers:  # it is above what another process has set
        pass
idle = False
governor.apply(some())
if fault == "kill_agent_leaky" and os.fork() == 0:
    time.sleep(120)
    os._exit(0)
if len(sys.argv) > 4:
    governor.apply(Settings(power_limit_W=choices["power_limit_W"][1][0]))
    another_sets()
    idle = seed % 2 == 0  # so that nothing is looked at before the end
print(guard_pid(), flush=True)
count = draw.randrange(1, 12)
for number in range(10**9):
    if fault in ("exception", "exit", "clean", "guard_killed") and number == count:
        break
    if fault == "setter_fails" and number == count:
        fail_setter()
        try:
            governor.apply(Settings(half_way))
        except GovernorError:
            governor.close()
            sys.exit(0)
        sys.exit(9)
    if fault == "restore_fails_first" and number == count:
        fail_restore()
        governor.close()
        sys.exit(0)
    if not idle:
        change()
    time.sleep(draw.random() * 0.01)
if fault == "exception":
    raise RuntimeError("the agent fell over")
if fault == "exit":
    os._exit(3)
if fault == "guard_killed":
    os.kill(guard_pid(), signal.SIGKILL)
    governor.apply(Settings(half_way))  # a new guard is made before anything is touched
    os.kill(os.getpid(), signal.SIGKILL)
governor.close()
"""
#: The driver: it starts the agent in its own process group, as a job's launcher does. What a shell
#: runs in the background ignores interrupts, and the agent would inherit that.
DRIVER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
agent = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(agent.pid, flush=True)
sys.exit(agent.wait() and 1)
"""


def stands(node: TwinNode) -> list[tuple[object, ...]]:
    """What every GPU stands at: lock, memory lock, limit."""
    return [
        (node.locked_MHz(gpu), node.memory_locked_MHz(gpu), node.limit_W(gpu)) for gpu in range(2)
    ]


@contextlib.contextmanager
def unit(node: TwinNode, folder: Path, *users: str) -> Iterator[Path]:
    """Start a guard of root for each connection, as systemd does, and return the socket's path."""
    path, program = folder / "guard.sock", installed_guard(node)
    environ = os.environ | node.environment() | {"JOULEFRONT_TWIN_ROOT": "1"}
    started: list[subprocess.Popen[bytes]] = []

    def accept() -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                with listener.accept()[0] as asker:
                    words = [sys.executable, "-IS", program, *users]
                    started.append(subprocess.Popen(words, stdin=asker, env=environ))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen()
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield path
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    for process in started:
        process.wait(LIMIT_S)


def _twin(path: Path, **options: Any) -> tuple[TwinNode, dict[str, str]]:
    gpus = [TwinGpu(limit_W=limit, memory_MHz=(405, 1593)) for limit in (350.0, 375.0)]
    node = TwinNode(path, gpus, virtual_time=False, **options)
    environ = os.environ | node.environment() | {"PYTHONPATH": str(ROOT)}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    return node, environ


def try_fault(fault: str, seed: int, folder: Path, *, others_W: int = 0) -> str:
    """Try one fault on GPUs; return what was left wrong, or "".

    Args:
        others_W: power limit of the first device that another process sets meanwhile; 0: none.
    """
    node, environ = _twin(folder / f"{fault}-{seed}-{others_W}")
    return _try(fault, seed, [GPUS + AGENT, "-"], environ, lambda: stands(node), others_W)


def try_root_fault(fault: str, seed: int, folder: Path, *, others_W: int = 0) -> str:
    """Try one fault on GPUs that only the guard of root may set, as `try_fault` does."""
    node, environ = _twin(folder / f"{fault}-{seed}-{others_W}-root", root=False)
    with tempfile.TemporaryDirectory() as place, unit(node, Path(place)) as path:
        environ[SOCKET] = str(path)
        return _try(fault, seed, [BY_ROOT + AGENT, "-"], environ, lambda: stands(node), others_W)


def try_cpu_fault(fault: str, seed: int, folder: Path, *, others_W: int = 0) -> str:
    """Try one fault on processors, as `try_fault` does."""
    root = make_sysfs(folder / f"{fault}-{seed}-{others_W}-cores")
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [CORES + AGENT, str(root)]
    return _try(fault, seed, words, environ, lambda: settings_of(root), others_W)


def _try(
    fault: str,
    seed: int,
    words: Sequence[str],
    environ: Mapping[str, str],
    stood: Callable[[], Any],
    others_W: int,
) -> str:
    """Start an agent, end it by the fault, and compare what stands with what stood before.

    Args:
        words: the agent's program, and the folder of its cores.
    """
    draw = random.Random(seed)
    before = stood()
    if others_W and isinstance(before, dict):
        before = before | {CAP: f"{others_W}000000"}
    elif others_W:
        before = [(None, None, float(others_W)), *before[1:]]
    program, root = words
    words = [program, fault, str(seed), root, *[str(others_W)] * bool(others_W)]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "-c", *words],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    agent = int(driver.stdout.readline())
    guarded = bool(driver.stdout.readline())  # the guard's pid: the first setting was made
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
    code = driver.wait()
    end_s = time.monotonic() + LIMIT_S
    while stood() != before and time.monotonic() < end_s:
        time.sleep(0.02)
    # The guard may still be at work: what stands must stay so.
    time.sleep(0.1)
    left = stood()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)  # a leaky child is all that can be left
    driver.stdout.close()
    if not guarded:
        return "the fault came before anything was set: it tried nothing"
    if fault in ("clean", "setter_fails", "restore_fails_first") and code != 0:
        return "the agent did not survive its fault"
    return "" if left == before else f"left {left}, before {before}"
