"""Imports the heavy frameworks once, before anything touches a device, and forks ranks from there.

A node agent starts it by path (`fork_server.py FD`) and speaks JSON lines over the socket:
"prepare" imports modules and loads DeepSpeed ops, "spawn" forks the ranks of a probe, and the end
of a rank is told as it happens. What a rank then runs is the package `hook` beside this file, by
path too: nothing else of joulefront is imported, here or in a rank. The closing socket says that
the agent is gone; then nothing of the server is left.
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")
hook: Any = runpy.run_path(os.path.join(HOOK, "__main__.py"))["load"]()


def _die_with_parent() -> None:
    """Linux: be killed when the parent ends, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _become_rank(spec: dict[str, Any], group: int) -> NoReturn:
    """In the forked child: leave everything of the server behind."""
    os.setpgid(0, group)
    _die_with_parent()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(spec["env"])
    os.chdir(spec["cwd"])
    if spec.get("cpus"):
        os.sched_setaffinity(0, spec["cpus"])
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, the kernel ends a rank rather than the agent
    except OSError:
        pass
    if spec.get("fresh"):
        os.execve(
            sys.executable,
            [sys.executable, "-P", os.path.join(HOOK, "__main__.py"), "rank", json.dumps(spec)],
            dict(spec["env"]),
        )
    hook.run_rank(spec)
    raise AssertionError("a rank does not return")


def _prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Import modules and load DeepSpeed ops, so that ranks forked later find them done."""
    began = time.monotonic()
    for name in request.get("imports", ()):
        importlib.import_module(name)
    for name in request.get("optional", ()):
        # In another release of the framework it may be elsewhere; the rank then imports it itself.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in request.get("ops", ()):
        _load_op(name)
    torch = sys.modules.get("torch")
    used = torch is not None and torch.cuda.is_initialized()
    return {"prepared_s": time.monotonic() - began, "device_touched": bool(used)}


def _load_op(name: str) -> None:
    """Build and load one DeepSpeed op, alone on this machine.

    A process killed while it builds leaves a lock behind that every later build waits on for ever.
    Under our own lock no other build of ours is alive, so a lock that is found is such a relic.
    """
    from deepspeed.ops import op_builder

    folder = os.environ["TORCH_EXTENSIONS_DIR"]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "joulefront.lock"), "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for parent, _, files in os.walk(folder):
            if "lock" in files:
                os.unlink(os.path.join(parent, "lock"))
        builder = getattr(op_builder, name)()
        builder.load(verbose=False)
    # DeepSpeed's CPU Adam asks what processor this is each time it is made, which takes a second of
    # two processes' time. The answer does not change: forked ranks inherit it.
    with contextlib.suppress(ImportError):
        cpuinfo = importlib.import_module("cpuinfo")
        known = cpuinfo.get_cpu_info()
        cpuinfo.get_cpu_info = lambda: dict(known)  # type: ignore[attr-defined]


class ForkServer:
    """Serves one agent over one socket until the socket closes; then nothing of it is left."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self._groups: dict[int, list[int]] = {}  # process group -> living pids

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> None:
        # Not tied to the parent by PR_SET_PDEATHSIG: that watches the *thread* that started us,
        # which may be a short-lived one. The closing socket says that the agent is gone.
        with contextlib.suppress(OSError, AttributeError):
            # What ranks leave behind becomes this process's child, so that the agent finds it.
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
        try:
            while True:
                watched: list[Any] = [self._connection, wake_read]
                ready, _, _ = select.select(watched, [], [])
                if wake_read in ready:
                    os.read(wake_read, 4096)
                    self._reap()
                if self._connection in ready:
                    chunk = self._connection.recv(65536)
                    if not chunk:
                        return
                    self._buffer += chunk
                    while b"\n" in self._buffer:
                        line, self._buffer = self._buffer.split(b"\n", 1)
                        self._handle(json.loads(line))
        finally:
            for group in self._groups:
                _kill_group(group)
            _kill_children()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send({"exit": pid, "code": os.waitstatus_to_exitcode(status)})

    def _handle(self, request: dict[str, Any]) -> None:
        try:
            if request["op"] == "prepare":
                self._send(_prepare(request))
            elif request["op"] == "spawn":
                self._send({"spawned": self._spawn(request["ranks"])})
        except Exception as error:
            self._send(
                {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            )

    def _spawn(self, specs: list[dict[str, Any]]) -> dict[str, Any]:
        group, pids = 0, []
        for spec in specs:
            pid = os.fork()
            if pid == 0:
                try:
                    _become_rank(spec, group)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(70)
            group = group or pid
            with contextlib.suppress(OSError):  # the child did it first, or is gone
                os.setpgid(pid, group)
            pids.append(pid)
        self._groups[group] = pids
        return {"group": group, "pids": pids}


def _kill_children() -> None:
    """SIGKILL what is still below this process, in whatever group it is."""
    for _ in range(20):
        left = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
                left += [int(word) for word in file.read().split()]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, 0 if left else os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
