"""Starts, watches and kills the rank processes of a probe.

One `RankServer` lives as long as its agent. It holds the fork server (`workload.fork_server`),
which has imported the frameworks once, and asks it for a `RankGroup` a probe: all ranks in one
process group, each tied to the fork server's life, so that the death of the agent, SIGKILL
included, ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from search_spaces.errors import InputError

__all__ = [
    "PRELOAD",
    "Event",
    "RankGroup",
    "RankServer",
    "RankSpec",
    "Ranks",
    "ServerError",
    "cannot_build",
    "control_socket",
    "extensions_dir",
]

#: What every DeepSpeed program imports; paid once, in the fork server.
PRELOAD = ("torch", "deepspeed")
#: What `deepspeed.initialize` and the first step would import, 2 s of them, found by listing
#: sys.modules after a first step. Names differ between releases: what is missing is skipped.
PRELOAD_OPTIONAL = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
)


class ServerError(RuntimeError):
    """The fork server could not start, import or build.

    Attributes:
        detail: what it printed, or its traceback.
    """

    def __init__(self, sentence: str, detail: str = "") -> None:
        super().__init__(sentence)
        self.detail = detail


def extensions_dir() -> str:
    """Where DeepSpeed's compiled ops are kept.

    The user's TORCH_EXTENSIONS_DIR where it is set; otherwise a folder of our own, so that a lock
    found in it under our own file lock is surely a relic of a killed build.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return chosen
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(cache) / "joulefront" / "torch_extensions")


def cannot_build(op: str) -> str:
    """Why a DeepSpeed op ("cpu_adam") cannot be had here, as a phrase; empty where it can.

    It can where it was compiled before, or where there is a C++ compiler to do it; reading and
    writing a drive beside the computation ("async_io") needs libaio beside.
    """
    if any(Path(extensions_dir(), op).glob(f"{op}*.so")):
        return ""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) or shutil.which("g++"):
        lacks = op == "async_io" and not Path("/usr/include/libaio.h").exists()
        return "DeepSpeed's async_io needs libaio and its headers (libaio-dev)" if lacks else ""
    return f"DeepSpeed's {op} must be compiled, and there is no C++ compiler ({compiler} or g++)"


@dataclass(frozen=True)
class RankSpec:
    """One rank to start.

    Attributes:
        argv: the program and its arguments.
        env: the whole environment.
        log: file that takes stdout and stderr.
        cwd: working folder.
        cpus: cores it may use; empty leaves them as they are.
        address: the agent's Unix socket.
        fresh: start a new interpreter instead of forking one that has imported.
        options: what the hook does beside counting steps: `workload.script.Start.options`.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: str
    cwd: str
    address: str
    cpus: tuple[int, ...] = ()
    fresh: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "argv": list(self.argv),
            "env": dict(self.env),
            "cpus": list(self.cpus),
            "options": dict(self.options),
        }


@dataclass(frozen=True)
class Event:
    """What a rank said, or what became of it.

    Attributes:
        kind: "hello", "step", "at", "phase", "facts", "peak", "fail", "end" from the rank itself,
            or "exit" when its process ended.
        rank: which one.
        step: steps done (for "step" and "at").
        time_s: CLOCK_MONOTONIC at the rank.
        detail: parsed JSON of "facts", "peak" and "fail", {"code": n} of "exit", {"name": ...} of
            "phase".
    """

    kind: str
    rank: int
    step: int = 0
    time_s: float = 0.0
    detail: Mapping[str, Any] | None = None


class RankServer:
    """The agent's end of the fork server.

    Args:
        python: the interpreter that runs training.
        needs: modules without which nothing can be trained, imported before the first fork.
        optional: modules to import before the first fork, where they exist, beside the usual.
        env: environment in which they are imported (DS_ACCELERATOR is read at import).
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        needs: Sequence[str] = PRELOAD,
        optional: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._python, self._needs = python, tuple(needs)
        self._optional = (*PRELOAD, *PRELOAD_OPTIONAL, *optional)
        self._env = {**os.environ, **(env or {})}
        # Compiling an op needs ninja, which pip puts beside the interpreter.
        self._env["PATH"] = os.pathsep.join(
            [str(Path(python).parent), self._env.get("PATH", os.defpath)]
        )
        # A forked rank inherits the pools its parent had; keep the parent without any.
        self._env |= {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": extensions_dir()}
        # nvmlDeviceGetCount instead of cudaGetDeviceCount: the latter would start the CUDA driver
        # in the parent, after which no forked child can use it.
        self._env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._ops: set[str] = set()
        self._exits: deque[tuple[int, int]] = deque()
        self._error_log: Any = None
        self.ready_s = 0.0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def env(self) -> dict[str, str]:
        """The environment that ranks start from."""
        return dict(self._env)

    def start(self) -> None:
        """Start the fork server and import; does nothing when it already runs.

        Raises:
            InputError: the interpreter lacks torch or DeepSpeed.
            ServerError: it could not for another reason.
        """
        if self.alive:
            return
        self.close()
        began = time.monotonic()
        ours, theirs = socket.socketpair()
        self._error_log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        program = str(Path(__file__).with_name("fork_server.py"))
        try:
            self._process = subprocess.Popen(
                # -P: its own folder must not shadow the user's or the standard modules.
                [self._python, "-P", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=self._error_log,
                stderr=self._error_log,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"cannot start {self._python}: {error}") from error
        finally:
            theirs.close()
        self._socket, self._buffer, self._ops = ours, b"", set()
        try:
            self._ask(
                {"op": "prepare", "imports": list(self._needs), "optional": list(self._optional)},
                timeout_s=300,
            )
        except ServerError as error:
            if str(error).startswith("ModuleNotFoundError"):
                missing = str(error).partition(": ")[2]
                raise InputError(
                    f"{self._python} cannot train ({missing}); install joulefront[train] there"
                ) from error
            raise
        self.ready_s = time.monotonic() - began

    def load_ops(self, ops: Sequence[str]) -> float:
        """Build (once a machine) and load DeepSpeed ops by builder name; seconds it took.

        Raises:
            ServerError: the build failed, e.g. for want of a compiler.
        """
        self.start()
        missing = [name for name in ops if name not in self._ops]
        if not missing:
            return 0.0
        answer = self._ask({"op": "prepare", "ops": missing}, timeout_s=900)
        self._ops.update(missing)
        return float(answer["prepared_s"])

    def spawn(self, specs: Sequence[RankSpec], listener: socket.socket) -> RankGroup:
        """Start the ranks of one probe in a process group of their own."""
        self.start()
        answer = self._ask({"op": "spawn", "ranks": [s.to_json() for s in specs]}, timeout_s=60)
        spawned = answer["spawned"]
        first = int(specs[0].env["RANK"])  # other nodes hold the ranks before it
        return RankGroup(self, spawned["group"], spawned["pids"], listener, first_rank=first)

    def kill(self, group: int) -> None:
        """SIGKILL a whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)

    def kill_strays(self, ranks: Iterable[int]) -> None:
        """SIGKILL every descendant of the fork server that is none of `ranks`.

        The server is their reaper (PR_SET_CHILD_SUBREAPER), so that a process stays its descendant
        when it leaves its group or its parent ends.
        """
        if self._process is None or self._process.poll() is not None:
            return
        for _ in range(20):  # one that forks while it is being looked for is found the next time
            strays = set(_descendants(self._process.pid)) - set(ranks)
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not strays:
                return
            time.sleep(0.01)

    def exits(self, timeout_s: float = 0.0) -> list[tuple[int, int]]:
        """(pid, exit code) of ranks that ended since the last call."""
        if self._socket is not None:
            self._pump(timeout_s)
        found = list(self._exits)
        self._exits.clear()
        return found

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()  # the server kills what is left of its groups, and ends
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._error_log is not None:
            self._error_log.close()
            self._error_log = None

    def _pump(self, timeout_s: float) -> list[dict[str, Any]]:
        """Read what the server said: exits are kept, answers are returned."""
        assert self._socket is not None
        answers: list[dict[str, Any]] = []
        self._socket.settimeout(max(timeout_s, 0.0) or 1e-6)
        try:
            chunk = self._socket.recv(65536)
        except (TimeoutError, BlockingIOError):
            return answers
        if not chunk:
            raise ServerError("the fork server ended", self._said())
        self._buffer += chunk
        while b"\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\n", 1)
            message = json.loads(line)
            if "exit" in message:
                self._exits.append((message["exit"], message["code"]))
            else:
                answers.append(message)
        return answers

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._socket is not None
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise ServerError("the fork server ended", self._said()) from error
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for answer in self._pump(deadline - time.monotonic()):
                if "error" in answer:
                    raise ServerError(answer["error"], answer.get("traceback", ""))
                return answer
        raise ServerError(f"the fork server did not answer {request['op']!r} in {timeout_s:.0f} s")

    def _said(self) -> str:
        if self._error_log is None:
            return ""
        self._error_log.seek(0)
        return self._error_log.read().decode(errors="replace")[-2000:].strip()


def _descendants(pid: int) -> list[int]:
    """Every living process below `pid`, zombies left out."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
                found += [*([child] if state != "Z" else []), *_descendants(child)]
    return found


class Ranks(Protocol):
    """The ranks of one probe, wherever they stand.

    Attributes:
        size: how many there are.
        pids: those on this node.
        patience_s: how long a cause may take to be heard once a rank has told an effect.
    """

    size: int
    pids: tuple[int, ...]
    patience_s: float

    def next_event(self, timeout_s: float) -> Event | None: ...

    def send(self, line: str) -> None: ...

    def kill(self) -> None: ...


class RankGroup:
    """The living ranks of one probe: their events, and the only way to tell them to go on."""

    patience_s = 1.0

    def __init__(
        self,
        server: RankServer,
        group: int,
        pids: Sequence[int],
        listener: socket.socket,
        *,
        first_rank: int = 0,
    ) -> None:
        self.group, self.size, self.pids = group, len(pids), tuple(pids)
        self._server, self._listener = server, listener
        self._rank_of = {pid: rank for rank, pid in enumerate(pids, first_rank)}
        self._running = set(pids)
        self._links: dict[int, socket.socket] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._pending: deque[Event] = deque()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(server, selectors.EVENT_READ, self._exited)

    def next_event(self, timeout_s: float) -> Event | None:
        """The next thing a rank said, or None after `timeout_s` seconds of silence."""
        deadline = time.monotonic() + timeout_s
        while not self._pending:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            for key, _ in self._selector.select(left):
                # Handling an exit reads its rank's link to the end, which may be next in this list.
                if key.fileobj in self._selector.get_map():
                    handle: Callable[[Any], None] = key.data
                    handle(key.fileobj)
        return self._pending.popleft()

    def hear(self, source: Any, events: Callable[[], Iterable[Event]]) -> None:
        """Take what ranks of other nodes say: `events` is asked when `source` is readable."""
        self._selector.register(
            source, selectors.EVENT_READ, lambda readable: self._pending.extend(events())
        )

    def send(self, line: str) -> None:
        """Say the same to all ranks: "run N" or "quit". A rank that is gone is no error here."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # its exit arrives as an event
                link.sendall(line.encode() + b"\n")

    def kill(self) -> None:
        """End every process of the group, and wait until the ranks are gone.

        What a rank forked into a group of its own is ended too: it is a descendant of the server.
        """
        self._server.kill_strays(self._running)
        self._server.kill(self.group)
        deadline = time.monotonic() + 5.0
        while self._running and time.monotonic() < deadline:
            try:
                self._exited(self._server, timeout_s=0.2)
            except ServerError:
                break
        self._server.kill_strays(())
        for link in self._links.values():
            link.close()
        self._selector.close()

    @property
    def running(self) -> int:
        return len(self._running)

    def _accept(self, listener: socket.socket) -> None:
        link, _ = listener.accept()
        self._buffers[link] = b""
        self._selector.register(link, selectors.EVENT_READ, self._heard)

    def _heard(self, link: socket.socket) -> None:
        try:
            chunk = link.recv(65536)
        except OSError:
            chunk = b""
        if not chunk:
            self._selector.unregister(link)
            return
        buffer = self._buffers[link] + chunk
        *lines, self._buffers[link] = buffer.split(b"\n")
        for line in lines:
            # A program may write on the line itself; what is none of ours says nothing.
            with contextlib.suppress(ValueError, KeyError, RecursionError):
                event = self._parse(link, line.decode(errors="replace"))
                if event is not None:
                    self._pending.append(event)

    def _parse(self, link: socket.socket, line: str) -> Event | None:
        kind, _, rest = line.partition(" ")
        if kind == "hello":
            rank, pid = (int(word) for word in rest.split())
            self._links[rank], self._ranks[link] = link, rank
            self._rank_of[pid] = rank
            return Event("hello", rank)
        rank = self._ranks.get(link, -1)
        if kind in ("step", "at"):
            step, at = rest.split()
            return Event(kind, rank, int(step), float(at))
        if kind in ("facts", "peak", "fail"):
            detail = json.loads(rest)
            if kind == "fail" and detail["kind"] not in ("out_of_memory", "refused", "crash"):
                return None
            return Event(kind, rank, detail=detail)
        if kind == "phase":
            name, _, at = rest.rpartition(" ")
            return Event(kind, rank, time_s=float(at), detail={"name": name})
        return Event("end", rank) if kind == "end" else None

    def _exited(self, server: RankServer, timeout_s: float = 0.0) -> None:
        for pid, code in server.exits(timeout_s):
            if pid in self._running:
                self._running.discard(pid)
                # What the rank said last is still in its socket: hear it before its end is told.
                rank = self._rank_of[pid]
                link = self._links.get(rank)
                if link is not None:
                    link.setblocking(False)
                    with contextlib.suppress(OSError, RuntimeError):
                        while link in self._selector.get_map() and self._readable(link):
                            self._heard(link)
                self._pending.append(Event("exit", rank, detail={"code": code}))

    @staticmethod
    def _readable(link: socket.socket) -> bool:
        with selectors.DefaultSelector() as probe:
            probe.register(link, selectors.EVENT_READ)
            return bool(probe.select(0))


def control_socket() -> tuple[socket.socket, str, Callable[[], None]]:
    """A listening Unix socket in a private folder: (socket, its path, how to remove it)."""
    folder = tempfile.mkdtemp(prefix="joulefront-")
    address = str(Path(folder) / "agent")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(128)

    def remove() -> None:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)

    return listener, address, remove
