"""The one file of ours inside a training process: standard library only, a script and a module.

It stands between the node agent and the training program. As a *fork server* (`hook.py serve FD`)
it imports the heavy frameworks once, before anything touches a device, and forks each rank from
there, so that only the first probe pays for them. Inside a *rank* it counts whole optimizer steps,
tells the agent of each, and halts at the boundaries the agent names: it finishes the device's work,
says "boundary", and goes on when told. The training program itself need know nothing of it.

The program may use it all the same: `import joulefront_hook` gives this module, and `phase(name)`
marks the part of a step that begins.

Wire (a line of text each way, over a Unix socket):
    rank to agent   hello RANK PID · step N T · at N T · phase NAME T · peak JSON · fail JSON · end
    agent to rank   run N (go on until N steps are done) · quit
T is CLOCK_MONOTONIC, which all processes of a node share.
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

# Ordinary exceptions that mean "no memory left", by name: torch cannot be imported here.
_OOM_TYPES = {"OutOfMemoryError", "MemoryError"}
_PEER_WORDS = ("gloo", "nccl", "closed by peer", "connection reset", "broken pipe")
_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")


# ---------------------------------------------------------------- inside a rank


class Link:
    """A rank's line to its agent, and the count of its optimizer steps."""

    def __init__(self, address: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        self._buffer = b""
        self.steps = 0
        # The first step is free: only after it is there anything to wait for.
        self._until = 1
        self.starting = True
        self.send(f"hello {rank} {os.getpid()}")

    def send(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def _receive(self) -> str:
        while b"\n" not in self._buffer:
            chunk = self._socket.recv(4096)
            if not chunk:
                os._exit(3)  # the agent is gone; so is the reason to train
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def step_done(self) -> None:
        """One optimizer step is done on this rank; waits here if the agent named this boundary."""
        self.steps += 1
        self.starting = False
        if self.steps < self._until:
            self.send(f"step {self.steps} {time.monotonic():.7f}")
            return
        _finish_device_work()
        self.send(f"at {self.steps} {time.monotonic():.7f}")
        words = self._receive().split()
        if words[0] == "quit":
            self.leave()
        self._until = int(words[1])

    def leave(self) -> None:
        """Say what was used and end at once: interpreters with live collectives may abort."""
        self.send("peak " + json.dumps(_peaks()))
        self.send("end")
        _exit(0)

    def fail(self, error: BaseException) -> None:
        kind = "crash"
        text = str(error)
        names = {cls.__name__ for cls in type(error).__mro__}
        if names & _OOM_TYPES or any(word in text.lower() for word in _OOM_WORDS):
            kind = "out_of_memory"
        elif self.starting and _raised_by_framework(error):
            kind = "refused"
        message = f"{type(error).__name__}: {text.strip().splitlines()[0] if text.strip() else ''}"
        # A rank whose peer died fails in a collective: an effect, not the cause.
        effect = any(word in text.lower() for word in _PEER_WORDS)
        self.send("fail " + json.dumps({"kind": kind, "message": message[:2000], "effect": effect}))


def _raised_by_framework(error: BaseException) -> bool:
    """True where DeepSpeed itself refused, rather than the program having failed."""
    if type(error).__name__ not in (
        "AssertionError",
        "ValueError",
        "NotImplementedError",
        "DeepSpeedConfigError",
        "ValidationError",
    ):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return any(f"{os.sep}deepspeed{os.sep}" in frame.filename for frame in frames)


_link: Link | None = None


def phase(name: str) -> None:
    """Mark that a part of the step (data, forward, backward, optimizer, ...) begins now."""
    if _link is not None:
        _link.send(f"phase {name} {time.monotonic():.7f}")


def _finish_device_work() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peaks() -> dict[str, int]:
    """Peak memory of this rank, bytes: on the device where there is one, and on the host."""
    peaks = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peaks["device_bytes"] = torch.cuda.max_memory_reserved()
    return peaks


def _exit(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _patch_deepspeed(deepspeed: Any) -> None:
    """Count optimizer steps where DeepSpeed takes them: at accumulation boundaries only."""
    engine = deepspeed.DeepSpeedEngine
    if getattr(engine, "_joulefront", False):
        return
    engine._joulefront = True
    plain_step = engine.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        boundary = self.is_gradient_accumulation_boundary()
        result = plain_step(self, *args, **kwargs)
        if boundary and _link is not None:
            _link.step_done()
        return result

    engine.step = step
    from deepspeed.runtime.pipe.engine import PipelineEngine

    plain_train_batch = PipelineEngine.train_batch

    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain_train_batch(self, *args, **kwargs)
        if _link is not None:
            _link.step_done()
        return result

    PipelineEngine.train_batch = train_batch


def _run_rank(spec: dict[str, Any]) -> NoReturn:
    """Become a rank: environment, link, then the training program as `__main__`."""
    global _link
    sys.modules["joulefront_hook"] = sys.modules[__name__]
    _link = Link(spec["address"], int(spec["env"]["RANK"]))
    try:
        torch = sys.modules.get("torch")
        if torch is not None and "OMP_NUM_THREADS" in spec["env"]:
            # A forked rank read OMP_NUM_THREADS before it was set for it.
            torch.set_num_threads(int(spec["env"]["OMP_NUM_THREADS"]))
        import deepspeed

        _patch_deepspeed(deepspeed)
        script = spec["argv"][0]
        sys.argv = list(spec["argv"])
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")
        _link.send("end")
    except SystemExit as stop:
        _link.send("end")
        _exit(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except BaseException as error:
        traceback.print_exc()
        _link.fail(error)
        _exit(1)
    _exit(0)


# ---------------------------------------------------------------- the fork server


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
            [sys.executable, "-P", os.path.abspath(__file__), "rank", json.dumps(spec)],
            dict(spec["env"]),
        )
    _run_rank(spec)


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
            elif request["op"] == "kill":
                _kill_group(request["group"])
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


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["serve"]:
        ForkServer(socket.socket(fileno=int(arguments[1]))).serve()
    elif arguments[:1] == ["rank"]:
        _run_rank(json.loads(arguments[1]))
    else:
        print("hook.py serve FD | rank SPEC", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
