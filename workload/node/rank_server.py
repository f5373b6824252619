"""The agent's end of the fork server, which starts and kills the ranks of probes.

One `RankServer` lives as long as its agent, and gets a `RankGroup` for each probe: all ranks in one
process group, each tied to the fork server's life, so that the death of the agent, SIGKILL
included, ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import TemporaryFolder, refuse_sudo, without_secrets
from tuner.workload.node.host import CpuContention, granted_cores
from tuner.workload.node.platforms import platforms
from tuner.workload.node.platforms.base import Platform
from tuner.workload.node.rank_group import CommandGroup, NoReply, RankGroup, ServerError
from tuner.workload.scripts.installed import (
    BUILD_LIMIT_S,
    PRELOAD,
    TorchBuild,
    extensions_dir,
    remove_stale_locks,
)

#: What the fork server is told whenever it imports: drivers' libraries that imports may open.
PREPARE = {
    "op": "prepare",
    "libraries": [library for each in platforms().values() for library in each.libraries],
}

#: The imports of `deepspeed.initialize` and the first step, 2 s of them, found by listing
#: sys.modules after a first step. Names differ between releases: a missing one is skipped.
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
    "setuptools",  # by torch.utils.cpp_extension, 0.13 s of a core in each rank
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.comm.mori",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
)


#: Of torch, what only a compiled model and DeepSpeed's programs import: a third of its time.
_OF_COMPILERS = "torch._inductor"


#: The fork server has this long to end its ranks, seconds; it gives up a second earlier itself.
KILL_LIMIT_S = 8.0
#: It has this long to end itself with all that it started when the socket closes, seconds.
END_LIMIT_S = 5.0
#: It reads a request within this time, seconds.
SEND_LIMIT_S = 60.0
#: Length of one look at the cores, seconds, and how many must have been idle to import beside a
#: command: ticks of the kernel's clock are 10 ms.
LOOK_S, IDLE_CORES = 0.2, 0.8
#: Times that a session is searched for processes that were started meanwhile.
SEARCHES = 20


@dataclass(frozen=True)
class RankSpec:
    """One rank to start; cores and memory nodes that are empty stay as they are."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: str
    cwd: str
    address: str
    cpus: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()
    policy: int = 0  # of the memory nodes (set_mempolicy(2))
    new_interpreter: bool = False  # in a new interpreter instead of forking one that has imported
    command: bool = False  # argv is a whole command, in whose environment the hook waits
    options: Mapping[str, Any] = field(default_factory=dict)  # of the hook (`Start.options`)


class RankServer:
    """The agent's end of the fork server; InputError if sudo started this process for a user.

    Modules `needs`, without which nothing can be trained, and `optional` are imported before the
    first fork, if they are of `packages` (None for all): a server that only starts commands needs
    none. `platform` is of the devices that ops are compiled for. `fork_unsafe` is the reason why
    ranks must start in new interpreters; empty if they are forked. `env` is what ranks start from.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        needs: Sequence[str] = PRELOAD,
        optional: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        platform: Platform | None = None,
        packages: Collection[str] | None = None,
    ) -> None:
        self._python, self._platform = python, platform or Platform()
        self._needs: tuple[str, ...] = ()
        self._optional: tuple[str, ...] = ()
        self._imported: tuple[str, ...] | None = None  # by the process that runs
        self.add_imports(needs, optional, packages)
        refuse_sudo()
        self.env = {**without_secrets(os.environ), **(env or {})}
        # Compiling an op needs ninja, which pip puts beside the interpreter.
        self.env["PATH"] = os.pathsep.join(
            [str(Path(python).parent), self.env.get("PATH", os.defpath)]
        )
        # A forked rank inherits the pools its parent had; keep the parent without any.
        self.env |= {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": extensions_dir()}
        # nvmlDeviceGetCount instead of cudaGetDeviceCount: the latter would start the CUDA driver
        # in the parent, after which no forked child can use it.
        self.env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._requests = 0
        self._begun: tuple[str, ...] | None = None  # what is being imported meanwhile
        self._ops: set[str] = set()
        self._exits: list[tuple[int, int]] = []
        self._error_log: Any = None
        self.ready_s = 0.0
        self.fork_unsafe = ""
        self.torch: TorchBuild | None = None

    def add_imports(
        self, needs: Sequence[str], optional: Sequence[str], packages: Collection[str] | None
    ) -> None:
        """Have `start` import further modules, as the arguments of the class name them."""
        every = (*self._optional, *PRELOAD, *PRELOAD_OPTIONAL, *optional)
        kept = {*self._optional}
        found = [name for name in every if name in kept or _is_of(packages, name)]
        self._optional = tuple(dict.fromkeys(found))
        needed = (name for name in needs if _is_of(packages, name))
        self._needs = tuple(dict.fromkeys((*self._needs, *needed)))

    def succeed(self, other: RankServer) -> None:
        """Have `start` import what another server was to import, too, and end that one."""
        self._needs = tuple(dict.fromkeys((*self._needs, *other._needs)))
        self._optional = tuple(dict.fromkeys((*self._optional, *other._optional)))
        other.close()

    @property
    def imported(self) -> tuple[str, ...]:
        """The packages that are imported before the first fork."""
        return tuple(dict.fromkeys(map(_package, self._modules)))

    @property
    def to_import(self) -> tuple[str, ...]:
        """Those of them that `start` has yet to import; of one that it has, the module."""
        done = self._imported if self.alive and self._imported is not None else ()
        left = (name for name in self._modules if name not in done)
        have = {*map(_package, done)}
        names = (name if _package(name) in have else _package(name) for name in left)
        return tuple(dict.fromkeys(names))

    @property
    def _modules(self) -> tuple[str, ...]:
        return (*self._needs, *self._optional)

    @property
    def pid(self) -> int:
        """The fork server's process, the ancestor of all ranks and their processes; 0: none."""
        return self._process.pid if self._process is not None else 0

    @property
    def _on_cpu(self) -> bool:
        return self.env.get("DS_ACCELERATOR") == "cpu"

    @property
    def alive(self) -> bool:
        """True while the fork server runs."""
        if self._process is None or self._process.returncode is not None:
            return False
        # Not reaped here: until `close`, the server's pid must keep naming its session (`kill`).
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, ended) is None

    def begin(self) -> None:
        """Start, and have it import, without waiting: `start` waits for it."""
        self.close()
        remove_stale_locks()
        self._launch()
        self._send(self._imports())
        self._begun = self._modules

    def start(self) -> None:
        """Start unless it runs, and import; InputError without torch or DeepSpeed."""
        began = time.monotonic()
        if not self.alive:
            self.close()
            remove_stale_locks()
            self._launch()
        if self._begun is not None:
            self._await_imports(self._begun)
        elif self._imported == self._modules:
            return
        if self._imported != self._modules:
            self._send(self._imports())
            self._await_imports(self._modules)
        self.ready_s = time.monotonic() - began

    def _imports(self) -> dict[str, Any]:
        return {
            **PREPARE,
            "imports": list(self._needs),
            "optional": list(self._optional),
            "devices": not self._on_cpu,
        }

    def _await_imports(self, modules: tuple[str, ...]) -> None:
        self._begun = None
        try:
            reply = self._reply("prepare", timeout_s=300)
        except ServerError as error:
            if error.kind == "ModuleNotFoundError":
                raise InputError(
                    f"{self._python} cannot train ({error.message}); install joulefront[train] "
                    "there"
                ) from error
            raise
        self.fork_unsafe = reply["fork_unsafe"]
        self.torch = TorchBuild(**reply["torch"]) if reply["torch"] else None
        self._imported = modules

    def _launch(self) -> None:
        program = Path(__file__).with_name("fork_server.py")
        ours, theirs = socket.socketpair()
        self._error_log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        try:
            self._process = subprocess.Popen(
                # -P: its own folder must not shadow the user's or the standard modules.
                [self._python, "-P", str(program), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=self.env,
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
        self._imported = self._begun = None

    def missing_ops(self, ops: Sequence[str]) -> list[str]:
        """Return those of these DeepSpeed ops that are not loaded."""
        return [name for name in ops if name not in self._ops]

    def load_ops(self, ops: Sequence[str]) -> float:
        """Build and load DeepSpeed ops; return the seconds, or raise ServerError."""
        self.start()
        if not (missing := self.missing_ops(ops)):
            return 0.0
        own = not os.environ.get("TORCH_EXTENSIONS_DIR")
        architectures = "" if self._on_cpu else self._platform.capabilities()
        request = {
            "ops": missing,
            "own_folder": own,
            "architectures": architectures,
            "devices": not self._on_cpu,
        }
        reply = self._request_reply({**PREPARE, **request}, timeout_s=BUILD_LIMIT_S)
        self._ops.update(missing)
        self.fork_unsafe = reply["fork_unsafe"]
        return float(reply["prepared_s"])

    def bind(self, rule: str, ranks: int, gpu_nodes: Sequence[int]) -> list[dict[str, Any]]:
        """Return cores and memory of each rank; ServerError if torch or DeepSpeed refuses."""
        self.start()
        request = {"op": "bind", "rule": rule, "ranks": ranks, "gpu_nodes": list(gpu_nodes)}
        return list(self._request_reply(request, timeout_s=60)["bound"])

    def spawn(self, specs: Sequence[RankSpec], listener: socket.socket) -> RankGroup:
        """Start the ranks of one probe in a process group of their own."""
        self.start()
        reply = self._request_reply(
            {"op": "spawn", "ranks": [vars(spec) for spec in specs]}, timeout_s=60
        )
        first = int(specs[0].env["RANK"])  # other nodes hold the ranks before it
        group = RankGroup(self, reply["pids"], listener, first_rank=first)
        group.notice_exits()
        return group

    def spawn_command(self, spec: RankSpec, listener: socket.socket, ranks: int) -> CommandGroup:
        """Start a command as it stands, in a group of its own; `ranks` is 0 if unknown."""
        self.start()
        reply = self._request_reply({"op": "spawn", "ranks": [vars(spec)]}, timeout_s=60)
        (pid,) = reply["pids"]
        group = CommandGroup(self, pid, listener, environment=spec.env, ranks=ranks)
        group.notice_exits()
        return group

    def kill(self) -> None:
        """SIGKILL the ranks and all that they started, in whatever group or session it is.

        A server that does not answer is killed itself: its ranks end with it.
        """
        if self._process is None or self._process.returncode is not None:
            return
        try:
            self._request_reply({"op": "kill"}, timeout_s=KILL_LIMIT_S)
        except ServerError:
            # A child that has not been reaped: its pid names nothing else. (`Popen.kill` reaps.)
            os.kill(self._process.pid, signal.SIGKILL)
            _kill_session(self._process.pid)

    def exits(self, timeout_s: float = 0.0) -> list[tuple[int, int]]:
        """Return pid and exit code of the ranks that ended since the last call."""
        if self._socket is not None:
            self._pump(timeout_s)
        found, self._exits = self._exits, []
        return found

    def fileno(self) -> int:
        """Return the descriptor that is readable when a rank has ended."""
        assert self._socket is not None
        return self._socket.fileno()

    def close(self) -> None:
        """End the fork server and with it all ranks. May be called twice."""
        if self._socket is not None:
            self._socket.close()  # the server kills what is left of its groups, and ends
            self._socket = None
        if self._process is not None:
            # No word interrupts an import, and no rank exists before one is over.
            limit_s = END_LIMIT_S if self._begun is None else 0.0
            deadline_s = time.monotonic() + limit_s
            while self.alive and time.monotonic() < deadline_s:
                time.sleep(0.005)
            if self._process.returncode is None:  # not reaped: its pid names its session
                os.kill(self._process.pid, signal.SIGKILL)
                _kill_session(self._process.pid)
                self._process.wait()
            self._process = None
        if self._error_log is not None:
            self._error_log.close()
            self._error_log = None

    def _pump(self, timeout_s: float) -> list[dict[str, Any]]:
        assert self._socket is not None
        replies: list[dict[str, Any]] = []
        self._socket.settimeout(max(timeout_s, 1e-6))
        try:
            chunk = self._socket.recv(65536)
        except (TimeoutError, BlockingIOError):
            return replies
        except ConnectionError:  # it was killed with words of ours unread
            chunk = b""
        if not chunk:
            raise ServerError("the fork server ended", self._log_text())
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "exit" in message:
                self._exits.append((message["exit"], message["code"]))
            else:
                replies.append(message)
        return replies

    def _request_reply(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._send(request)
        return self._reply(request["op"], timeout_s)

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._socket is not None
        self._socket.settimeout(SEND_LIMIT_S)
        self._requests += 1
        numbered = {**request, "number": self._requests}
        try:
            self._socket.sendall(json.dumps(numbered).encode() + b"\n")
        except OSError as error:
            raise ServerError("the fork server ended", self._log_text()) from error

    def _reply(self, op: str, timeout_s: float) -> dict[str, Any]:
        """Return the answer to what was sent last."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for reply in self._pump(deadline - time.monotonic()):
                if reply["number"] != self._requests:  # nobody waits for that one any more
                    continue
                if "error" in reply:
                    raise ServerError(reply["error"], reply["traceback"], kind=reply["kind"])
                return reply
        raise NoReply(f"the fork server did not answer {op!r} in {timeout_s:.0f} s")

    def _log_text(self) -> str:
        if self._error_log is None:
            return ""
        self._error_log.seek(0)
        return self._error_log.read().decode(errors="replace")[-2000:].strip()


class ImportsAhead:
    """Imports of a second server, begun once a core has been idle for a look.

    A command that is started as it stands cannot be forked, and what it imports will be imported
    once more for later ranks. Beside it that costs no time, unless other work waits for the cores.
    """

    def __init__(self, server: RankServer, *, look_s: float = LOOK_S) -> None:
        self._server, self._look_s = server, look_s
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._begin_when_idle, daemon=True)
        self._thread.start()

    def _begin_when_idle(self) -> None:
        cores = os.sched_getaffinity(0)
        if granted_cores() < 2:  # the command has the one
            return
        while True:
            everyone = CpuContention((), cores)
            if self._enough.wait(self._look_s):
                return
            if (1 - everyone.share()) * len(cores) > IDLE_CORES:
                with contextlib.suppress(ServerError, OSError):
                    self._server.begin()
                return

    def take(self) -> RankServer | None:
        """Return the server; None if no core was idle."""
        self._enough.set()
        self._thread.join()
        return self._server if self._server.alive else None

    def close(self) -> None:
        """End the server."""
        self._enough.set()
        self._thread.join()
        self._server.close()


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_of(packages: Collection[str] | None, module: str) -> bool:
    apart = _OF_COMPILERS if module.startswith(_OF_COMPILERS) else _package(module)
    return packages is None or apart in packages


def _session_of(pid: int) -> int:
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:4]
    except OSError:
        return 0
    return int(session) if state != "Z" else 0


def _kill_session(leader: int) -> None:
    """SIGKILL the remaining session of a killed process that has not been reaped.

    Each process is held by a descriptor before it is looked at again, so that its pid cannot pass
    to another in between; before Linux 5.3 there are none, and nothing is signalled.
    """
    for _ in range(SEARCHES):
        left = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        left = [pid for pid in left if pid != leader and _session_of(pid) == leader]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    if _session_of(pid) == leader:
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        time.sleep(0.01)


def control_socket() -> tuple[socket.socket, str, Callable[[], None]]:
    """Listen in a private folder; return the socket, its path, and a function that removes it."""
    folder = TemporaryFolder()
    address = str(folder.path / "agent")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(128)

    def remove() -> None:
        listener.close()
        folder.remove()

    return listener, address, remove
