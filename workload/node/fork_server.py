"""Fork server: imports the frameworks once, before a device is used, and forks the ranks.

A node agent starts it by path (`fork_server.py FD`) and speaks JSON lines over the socket:
"prepare" imports modules and loads DeepSpeed ops, "spawn" forks the ranks of a probe, "kill" ends
them with all that they started, and the end of a rank is reported when it happens. What a rank then
runs is the package `hook` beside this file, by path too: nothing else of joulefront is imported.
When the socket closes, nothing of the server is left.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

HOOK = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hook")
#: Processes that outlive SIGKILL for longer, in a driver's call, are left to the kernel, seconds.
KILL_LIMIT_S = 4.0
#: A forked child that has not answered by then waits for a lock that a thread held at the fork.
CHILD_LIMIT_S = 10.0
#: A command has this long to end what it started (containers, a Ray cluster), seconds.
TERM_LIMIT_S = 3.0
#: The agent waits as long for a build.
STALE_LOCK_S = 900.0
#: `AgentGone` is raised again after this time, where a destructor has swallowed it, seconds.
AGAIN_S = 0.5
hook: Any = runpy.run_path(os.path.join(HOOK, "__main__.py"))["load"]()


#: Modules, and their functions, that open a driver's library anew in a rank: imports had opened it.
_reopened: list[tuple[str, str]] = []


class AgentGone(BaseException):
    """The agent's end of the socket is closed; not an Exception, which imports may swallow."""


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _become_rank(spec: dict[str, Any], group: int) -> NoReturn:
    # bash as the leader of a session makes the terminal at its input that session's, and the kernel
    # hangs up what it leaves in the background: so ranks lead groups, and SIGHUP is ignored.
    os.setpgid(0, group)
    _die_with_parent()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGIO, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    if spec.get("command"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    # The agent has removed what had this name; O_NOFOLLOW: a link put there since is not followed.
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 1024)
    terminal = _terminal()
    os.dup2(terminal, 0)
    os.close(terminal)
    os.environ.clear()
    os.environ.update(spec["env"])
    os.chdir(spec["cwd"])
    if spec.get("cpus"):
        os.sched_setaffinity(0, spec["cpus"])
    if spec.get("memory"):
        _set_memory_policy(spec["policy"], spec["memory"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel ends a rank rather than the agent
    if spec.get("command"):
        os.execvpe(spec["argv"][0], spec["argv"], dict(spec["env"]))
    if spec.get("new_interpreter"):
        os.execve(
            sys.executable,
            [sys.executable, "-P", os.path.join(HOOK, "__main__.py"), "rank", _visible(spec)],
            dict(spec["env"]),
        )
    _open_again()
    hook.run_rank(spec)
    raise AssertionError("a rank does not return")


def _terminal() -> int:
    """Return a terminal without a user: its input ends at once, as that of /dev/null does.

    Programs ask their input for the width of a line (`stty size`), and `docker run -it` wants one.
    It lasts as long as this process, and what this process becomes.
    """
    try:
        holder, terminal = os.openpty()
    except OSError:  # no /dev/pts, or too many of them
        return os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(holder, True)
    mode = termios.tcgetattr(terminal)
    mode[3] &= ~(termios.ICANON | termios.ECHO)
    mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0  # a read returns what is there: nothing
    termios.tcsetattr(terminal, termios.TCSANOW, mode)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    return terminal


def _set_memory_policy(policy: int, nodes: list[int]) -> None:
    call = {"x86_64": 238, "aarch64": 237}.get(os.uname().machine)
    if call is None:
        return
    mask = (ctypes.c_ulong * 16)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    if ctypes.CDLL(None, use_errno=True).syscall(call, policy, mask, 1025):
        raise OSError(ctypes.get_errno(), f"set_mempolicy on memory nodes {nodes}")


def _visible(spec: dict[str, Any]) -> str:
    # Without the environment, which may hold secrets: every user sees a command line (`ps`).
    return json.dumps({name: value for name, value in spec.items() if name != "env"})


def _prepare(request: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    for name in request.get("imports", ()):
        importlib.import_module(name)
    for name in request.get("optional", ()):
        # In another release of the framework it may be elsewhere, or fail for want of what a rank
        # does not need (DeepSpeed 0.16: MissingCUDAException without nvcc); a rank that does need
        # it imports it itself.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if request.get("architectures"):
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", request["architectures"])
    for name in request.get("ops", ()):
        _load_op(name, own_folder=request["own_folder"])
    for library in request["libraries"]:
        _release(*library)
    # A collection in a rank would walk, and so copy, every object of the frameworks that it shares
    # with this process; ZeRO-3 asks for one at each start.
    gc.collect()
    gc.freeze()
    # In this order: what asking torch does to later forks is seen by the guard.
    build = _torch_build()
    unsafe = _why_fork_is_unsafe() if request["devices"] else _why_fork_hangs()
    return {"prepared_s": time.monotonic() - began, "fork_unsafe": unsafe, "torch": build}


def _torch_build() -> dict[str, str] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    # Asked in a child: after this call torch refuses CUDA in every child forked later.
    query = getattr(torch._C, "_cuda_getArchFlags", None)
    flags = _in_child(query) if query is not None else None
    return {
        "version": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "hip": str(getattr(torch.version, "hip", None) or ""),
        "architectures": flags or "",
    }


def _in_child(function: Callable[[], Any]) -> Any:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        if not select.select([pipe], [], [], CHILD_LIMIT_S)[0]:
            os.kill(pid, signal.SIGKILL)
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else None


def _why_fork_is_unsafe() -> str:
    """Return the reason why ranks cannot be forked from this process; empty if they can.

    A child forked after the CUDA driver was started cannot use CUDA. torch reports only what it
    started itself, so the driver is asked: before cuInit, cuDeviceGetCount returns
    CUDA_ERROR_NOT_INITIALIZED, 3 (CUDA driver API), and starts nothing. Some functions of torch
    start nothing either, and yet have it refuse CUDA in later children: one of those is asked.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import initialised CUDA in torch"
    refused = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
    if refused is not None and _in_child(refused) is not False:
        return "torch refuses CUDA in processes that are forked after the imports, or they hang"
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != 3:
            return "an import started the CUDA driver"
    return ""


def _why_fork_hangs() -> str:
    """Return the reason why ranks that use no device cannot be forked; empty if they can.

    torch built for CUDA refuses CUDA in children once a framework has asked it for a device, also
    where there is none: ranks on cores do not use it.
    """
    alive = _in_child(lambda: True)
    return "" if alive else "a process that is forked after the imports hangs"


def _release(library: str, close: str, module: str, reopen: str) -> None:
    # As often as imports have opened it: a forked child inherits none of its state.
    with contextlib.suppress(OSError, AttributeError):
        loaded = ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
        for _ in range(64):
            if getattr(loaded, close)():
                break
            if (module, reopen) not in _reopened:
                _reopened.append((module, reopen))


def _open_again() -> None:
    for module, reopen in _reopened:
        with contextlib.suppress(Exception):  # the program that asks the library is told why
            getattr(sys.modules[module], reopen)()


def _load_op(name: str, *, own_folder: bool) -> None:
    """Build and load one DeepSpeed op, alone on this machine.

    A process killed while it builds leaves a lock behind that every later build waits for without
    end. In joulefront's own folder and under its own lock no other build is alive, so a lock that
    is found there is removed. In a folder of the user's it may be of another program's build.
    """
    from deepspeed.ops import op_builder

    folder = os.environ["TORCH_EXTENSIONS_DIR"]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "joulefront.lock"), "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for parent, _, files in os.walk(folder):
            lock = os.path.join(parent, "lock")
            if "lock" in files and own_folder:
                os.unlink(lock)
            elif "lock" in files and time.time() - os.stat(lock).st_mtime > STALE_LOCK_S:
                raise RuntimeError(
                    f"{lock} is more than {STALE_LOCK_S / 60:.0f} minutes old, so the build that "
                    "made it was probably killed; remove it if no other program builds there"
                )
        _cache_processor_info()
        builder = getattr(op_builder, name)()
        builder.load(verbose=False)


def _cache_processor_info() -> None:
    # Keep py-cpuinfo's answer, which takes a second, for this process and its forks.
    with contextlib.suppress(ImportError):
        cpuinfo = importlib.import_module("cpuinfo")
        if not hasattr(cpuinfo, "joulefront_info"):
            info = cpuinfo.joulefront_info = cpuinfo.get_cpu_info()  # type: ignore[attr-defined]
            cpuinfo.get_cpu_info = lambda: dict(info)  # type: ignore[attr-defined]


class ForkServer:
    """Server of one agent over one socket until the socket closes; then nothing of it is left."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self._commands: set[int] = set()  # that run, each the leader of a group

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> None:
        """Answer the agent's requests until the socket closes."""
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
            self._listen_for_the_end()
            self._reply(wake_read)
        except AgentGone:
            pass
        finally:
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            self._kill_all()

    def _reply(self, wake_read: int) -> None:
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
                *lines, self._buffer = (self._buffer + chunk).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))

    def _listen_for_the_end(self) -> None:
        # An import or a build takes minutes, in which nothing is read: the kernel's signal of a
        # change at the socket (fcntl(2), O_ASYNC) interrupts it when the agent is gone.
        for number in (signal.SIGIO, signal.SIGALRM):
            signal.signal(number, self._raise_if_gone)
        fd = self._connection.fileno()
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        self._raise_if_gone()

    def _raise_if_gone(self, *_: Any) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        if poll.poll(0):
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
            raise AgentGone

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._commands.discard(pid)
            with contextlib.suppress(OSError):  # the agent may be gone
                self._send({"exit": pid, "code": os.waitstatus_to_exitcode(status)})

    def _kill_all(self) -> None:
        """SIGKILL everything below this process, in whatever process group or session it is.

        Only children are signalled: until it is reaped, a child's pid is nobody else's. Children of
        a killed process become this one's (PR_SET_CHILD_SUBREAPER) and are next.
        """
        self._end_commands()
        deadline_s = time.monotonic() + KILL_LIMIT_S
        while (left := _children()) and time.monotonic() < deadline_s:
            for pid in left:
                with contextlib.suppress(PermissionError):  # a program with the setuid bit
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
            self._reap()

    def _end_commands(self) -> None:
        # What a command started elsewhere (a container) ends with it, if it is asked to end.
        for pid in self._commands:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + TERM_LIMIT_S
        while self._commands and _children() and time.monotonic() < deadline_s:
            time.sleep(0.01)
            self._reap()
        self._commands.clear()

    def _handle(self, request: dict[str, Any]) -> None:
        try:
            reply = self._reply_to(request)
        except Exception as error:
            kind, text = type(error).__name__, traceback.format_exc()
            reply = {"error": str(error), "kind": kind, "traceback": text}
        self._send({**reply, "number": request["number"]})

    def _reply_to(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "bind":
            path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vendor_binding.py")
            rule, ranks, nodes = request["rule"], request["ranks"], request["gpu_nodes"]
            return {"bound": runpy.run_path(path)["bind"](rule, ranks, nodes)}
        if request["op"] == "spawn":
            return {"pids": self._spawn(request["ranks"])}
        if request["op"] == "kill":
            self._kill_all()
            return {"killed": not _children()}
        return _prepare(request)

    def _spawn(self, specs: list[dict[str, Any]]) -> list[int]:
        group, pids = 0, list[int]()
        for spec in specs:
            pid = os.fork()
            if pid == 0:
                try:
                    _become_rank(spec, group)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(70)
            pids.append(pid)
            if spec.get("command"):
                self._commands.add(pid)
            group = group or pid
            with contextlib.suppress(OSError):  # the child did it first, or is gone
                os.setpgid(pid, group)
        return pids


def _children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += [int(word) for word in file.read().split()]
    return found


if __name__ == "__main__":
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
