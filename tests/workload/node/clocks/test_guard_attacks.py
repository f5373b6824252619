"""Attacks on the clock guard of root: none leaves clocks or limits that its caller chose.

The guard runs on a twin GPU, started as `sudo` or a unit would start it, and is attacked with what
its caller has: messages, the socket, its terminal, and what a process inherits.
"""

from __future__ import annotations

import contextlib
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.guards import installed_guard
from tests.twin import TwinNode
from tests.workload.node.clocks.governor_faults import unit
from tests.workload.node.clocks.guard_caller import (
    Caller,
    foreign_node,
    left_wrong,
    stands,
    started,
)
from tuner.workload.node.clocks import guard as guard_module
from tuner.workload.node.clocks.root_guard import PROGRAM
from tuner.workload.node.platforms.base import missing_clocks

pytestmark = [pytest.mark.slow, pytest.mark.needs("cc")]

#: Signals that a terminal, a timer or a limit of the caller's can bring.
SIGNALS = ("INT", "QUIT", "HUP", "TSTP", "TTIN", "TTOU", "PIPE", "ALRM", "VTALRM")
SIGNALS += ("PROF", "USR1", "USR2", "XCPU", "XFSZ", "IO", "RTMIN")


@pytest.fixture
def node(tmp_path: Path) -> TwinNode:
    """A node whose GPU only root may set."""
    return foreign_node(tmp_path, "node")


def test_a_caller_cannot_leave_what_it_says_stood_before(node: TwinNode, tmp_path: Path) -> None:
    with unit(node, tmp_path) as path:
        caller = Caller.of(path)
        caller.set("PowerManagementLimit", 150_000, stood=[150_000])
        caller.set("GpuLockedClocks", 300, 600, stood=[300, 600])
        caller.socket.close()
        assert left_wrong(node) == ""


def test_a_second_search_neither_sets_nor_keeps_the_gpu_of_the_first(
    node: TwinNode, tmp_path: Path
) -> None:
    with unit(node, tmp_path) as path:
        first, second = Caller.of(path), Caller.of(path)
        first.set("PowerManagementLimit", 300_000)
        first.set("GpuLockedClocks", 900, 900)
        second.set("PowerManagementLimit", 200_000)
        second.set("GpuLockedClocks", 600, 600)
        assert stands(node) == ((900, 900), None, 300.0)
        first.socket.close()
        left_wrong(node)
        second.socket.close()
        assert left_wrong(node) == ""


def test_no_signal_of_the_caller_ends_or_stops_it(node: TwinNode) -> None:
    with started(node) as (caller, guard):
        caller.set("PowerManagementLimit", 200_000)
        for name in SIGNALS:
            guard.send_signal(getattr(signal, f"SIG{name}"))
            time.sleep(0.05)
            assert caller.set("PowerManagementLimit", 150_000) == "", name  # it serves still
        guard.send_signal(signal.SIGTERM)  # as a unit is stopped
        assert left_wrong(node) == ""


def _typed(node: TwinNode, keys: bytes) -> str:
    """Type keys at the terminal in which a guard is started; return what is left wrong."""
    ready, tell = os.pipe()
    pid, terminal = pty.fork()
    if pid == 0:
        for name in ("INT", "QUIT", "TSTP", "HUP"):
            signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
        restored = {getattr(signal, f"SIG{name}") for name in ("INT", "QUIT", "TSTP", "HUP")}

        def usual() -> None:
            for number in restored:
                signal.signal(number, signal.SIG_DFL)

        with started(node, preexec_fn=usual) as (caller, _):
            caller.set("PowerManagementLimit", 150_000)
            os.write(tell, b"x")
            time.sleep(1.0)  # the keys come now
        os._exit(0)
    os.close(tell)
    with os.fdopen(ready, "rb") as file:
        file.read(1)
    os.write(terminal, keys)
    time.sleep(1.2)  # a guard that the keys have ended or stopped restores nothing
    wrong = left_wrong(node)
    os.close(terminal)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return wrong


@pytest.mark.parametrize("keys", [b"\x1c", b"\x1a", b"\x03"], ids=["Ctrl-\\", "Ctrl-Z", "Ctrl-C"])
def test_no_key_at_the_callers_terminal_ends_or_stops_it(node: TwinNode, keys: bytes) -> None:
    assert _typed(node, keys) == ""


def _busy(caller: Caller, seconds: float) -> None:
    """Let the guard read long messages."""
    end_s = time.monotonic() + seconds
    with contextlib.suppress(OSError, ValueError):
        while time.monotonic() < end_s and caller.query(verb="x", a="y" * 3900):
            pass


def test_an_inherited_limit_of_cpu_time_does_not_end_it(node: TwinNode) -> None:
    def one_second() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))

    with started(node, preexec_fn=one_second) as (caller, _):
        caller.set("PowerManagementLimit", 150_000)
        _busy(caller, 5.0)
        caller.socket.close()
        assert left_wrong(node) == ""


def test_an_inherited_timer_does_not_end_it(node: TwinNode) -> None:
    def two_seconds() -> None:
        signal.setitimer(signal.ITIMER_REAL, 2.0)

    with started(node, preexec_fn=two_seconds) as (caller, _):
        caller.set("PowerManagementLimit", 150_000)
        time.sleep(2.5)
        caller.socket.close()
        assert left_wrong(node) == ""


#: A caller in a process of its own, so that it can die: it makes the socket, and its child, which
#: keeps it, fills it and never reads.
_ORPHAN = """
import fcntl, json, os, socket, subprocess, sys, time
program, way = sys.argv[1:]
ours, theirs = socket.socketpair()
guard = subprocess.Popen([sys.executable, "-IS", program], stdin=theirs)
message = dict(verb="set", gpu="GPU-twin", what="PowerManagementLimit", values=[150000])
ours.sendall(json.dumps(message).encode() + b"\\n")
ours.recv(4096)
if os.fork() == 0:
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        if way == "deaf":  # whatever the guard does with the socket, its calls wait
            fcntl.fcntl(theirs, fcntl.F_SETFL, 0)
        try:
            ours.send(b'{"verb": "x"}\\n' * 50, socket.MSG_DONTWAIT)
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            break
        if way == "flood":
            try:
                ours.recv(65536, socket.MSG_DONTWAIT)
            except OSError:
                pass
    os._exit(0)
time.sleep(1.0)
os._exit(0)
"""


@pytest.mark.parametrize("way", ["deaf", "flood"])
def test_a_child_of_a_dead_caller_does_not_hold_it(node: TwinNode, way: str) -> None:
    """The child reads no answer, or goes on sending."""
    words = [sys.executable, "-c", _ORPHAN, str(installed_guard(node)), way]
    environ = os.environ | node.environment() | {"JOULEFRONT_TWIN_ROOT": "1"}
    subprocess.run(words, env=environ, check=True, stderr=subprocess.DEVNULL)
    assert left_wrong(node) == ""


def _control_groups() -> Path | None:
    """Return the root of the control groups (version 2); None if this process may make none."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(Path(place, "cgroup.procs"), os.W_OK):
            return Path(place)
    return None


def test_a_frozen_control_group_of_its_caller_does_not_stop_it(node: TwinNode) -> None:
    root = _control_groups()
    if root is None:
        pytest.skip("no control group can be made")
    group = root / f"joulefront-attack-{os.getpid()}"
    program = installed_guard(node)
    text = program.read_text(encoding="utf-8")
    program.write_text(text.replace("/sys/fs/cgroup", str(root)), encoding="utf-8")
    group.mkdir()
    try:

        def join() -> None:
            (group / "cgroup.procs").write_text("0", encoding="utf-8")

        with started(node, program=program, preexec_fn=join) as (caller, _):
            caller.set("PowerManagementLimit", 150_000)
            (group / "cgroup.freeze").write_text("1", encoding="utf-8")
            caller.socket.close()
            wrong = left_wrong(node)
            (group / "cgroup.freeze").write_text("0", encoding="utf-8")
    finally:
        group.rmdir()
    assert wrong == ""


#: Directives by which a unit of root's is confined, of systemd.exec.
CONFINED = ("NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=yes", "PrivateNetwork=yes")
CONFINED += ("RestrictAddressFamilies=AF_UNIX", "CapabilityBoundingSet=CAP_SYS_ADMIN")


def installed(folder: Path, tamper: bool) -> bool:
    """Run the line with which an administrator installs the guard; return True if it is there.

    `tamper` puts another program in the place of the guard after the line was printed.
    """
    real = Path(guard_module.__file__).resolve()
    source, program = folder / "guard.py", folder / "sbin" / "joulefront-guard"
    program.parent.mkdir(parents=True)
    lines = missing_clocks({}).lines
    (line,) = (line for line in lines if line.startswith("guard:"))
    line = line.removeprefix("guard:").partition("; then")[0]
    line = line.replace(PROGRAM, str(program)).replace(str(real), str(source))
    source.write_bytes(real.read_bytes())
    if tamper:
        source.write_text("#!/bin/sh\necho the program of the user\n", encoding="utf-8")
    line = line.replace("-o root", f"-o {os.getuid()}")
    subprocess.run(line, shell=True, check=False, capture_output=True)
    return program.exists()


@pytest.mark.parametrize("tamper", [False, True])
def test_a_guard_that_was_changed_after_doctors_line_is_not_installed(
    tmp_path: Path, tamper: bool
) -> None:
    assert installed(tmp_path, tamper) != tamper


def test_the_guards_unit_is_confined() -> None:
    (line,) = (one for one in missing_clocks({}).lines if one.startswith("unit:"))
    assert [directive for directive in CONFINED if directive not in line] == []
