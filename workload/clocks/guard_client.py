"""The agent's end of the guard: one of its own that restores, or one of root's that sets, too.

An agent that has a way to set clocks starts a guard of its own, with its own rights (`Guard`; its
process is this file, too). It sends it the earlier settings over a pipe before the first change,
and ends it with "done". If the pipe closes without "done", or the agent ends, even by SIGKILL, the
guard restores them. Where only root may set clocks, the setters go to the guard of root
(`RootGuardNvml`, `tuner.workload.clocks.guard`), of a unit or started by `sudo -n`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.workload.clocks import guard
from tuner.workload.clocks.guard import Earlier
from tuner.workload.node.rights import without_secrets

#: Where an administrator installs the guard, and where its unit listens.
PROGRAM = "/usr/local/sbin/joulefront-guard"
#: Environment variable that names another place of the unit's socket.
SOCKET = "JOULEFRONT_GUARD_SOCKET"
DEFAULT_SOCKET = "/run/joulefront-guard.sock"
#: The longest that a command of a declared knob may take, seconds.
COMMAND_S = 30.0
#: The longest that the guard may take for an answer, seconds: three tries of four settings.
ANSWER_S = 20.0
#: The longest that is waited for its end, seconds.
END_S = 5.0


class GuardError(Exception):
    """Failure of the guard to run; nothing may be changed without it."""


@dataclass(frozen=True)
class EarlierFile:
    """Earlier content of one of the kernel's files that holds a setting."""

    path: str
    text: str


@dataclass(frozen=True)
class EarlierCommand:
    """Command that sets a declared knob to its earlier value."""

    words: tuple[str, ...]
    cwd: str

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run the command to its end; OSError or subprocess.TimeoutExpired if that fails."""
        return subprocess.run(
            self.words,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            env=without_secrets(os.environ),
        )


def put_back_commands(earlier: Sequence[EarlierCommand]) -> list[str]:
    """Run commands that set earlier values; return a sentence for each failure."""
    problems = []
    for command in earlier:
        try:
            done = command.run()
            why = done.stderr.strip() or f"exit code {done.returncode}"
            failed = done.returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            why, failed = str(error), True
        if failed:
            problems.append(f"{' '.join(command.words)!r} did not put a knob back: {why}")
    return problems


def put_back_files(earlier: Sequence[EarlierFile]) -> list[str]:
    """Write the earlier contents where they differ; return a sentence for each failure."""
    problems = []
    for file in earlier:
        for attempt in range(guard.TRIES):
            try:
                if Path(file.path).read_text().strip() != file.text:
                    Path(file.path).write_text(file.text)
                break
            except OSError as error:
                if attempt == guard.TRIES - 1:
                    problems.append(f"{file.path} was not put back to {file.text}: {error}")
                else:
                    time.sleep(guard.WAIT_S)
    return problems


class Guard:
    """The guard of one governor: started before the first change, replaced if it was killed.

    `nvml` says where its process finds NVML: a module, or "module:object", where an object that
    can be called is called for it; "" if only files are to be restored; None for no guard.
    """

    def __init__(self, nvml: str | None = "pynvml") -> None:
        self._nvml = nvml
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The guard's process id; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def _say(self, message: dict[str, Any] | None, expected: str) -> None:
        """Send a message and wait for its answer: a pipe takes one for a dead reader, too."""
        if self._process is None:
            # -P: this file's folder must not shadow the standard library's modules.
            command = [sys.executable, "-P", str(Path(__file__).resolve())]
            self._process = subprocess.Popen(
                [*command, "--nvml", str(self._nvml), "--agent", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # stderr is the agent's: it shows what is not put back
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if message is not None:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise GuardError(f"the guard process is gone: {error}") from error
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        answer = self._process.stdout.readline().strip() if ready else "no answer in time"
        if answer != expected:
            raise GuardError(f"the guard process does not run: {answer or 'it ended'}")

    def expect(
        self,
        earlier: Sequence[Earlier],
        files: Sequence[EarlierFile] = (),
        commands: Sequence[EarlierCommand] = (),
    ) -> None:
        """Send the settings to restore before changing any; after GuardError none may be."""
        words = {
            "earlier": [asdict(old) for old in earlier],
            "files": [asdict(file) for file in files],
            "commands": [asdict(command) for command in commands],
        }
        running = self._process is not None
        if self._nvml is None:
            return
        try:
            if not running:
                self._say(None, "ready")
            self._say(words, "knows")
        except GuardError:
            self.take_over()
            if not running:
                raise
            self.expect(earlier, files, commands)  # it was killed: a new one gets the same

    def done(self) -> None:
        """End the guard without changes: all settings are as they were."""
        if self._process is not None:
            with contextlib.suppress(GuardError):
                self._say({"done": True}, "")
        self.take_over()

    def take_over(self) -> None:
        """Close the pipe, so that the guard restores the settings and ends."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(OSError, ValueError):
            assert process.stdin is not None
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        assert process.stdout is not None
        process.stdout.close()


class Elsewhere:
    """Substitute for the pynvml module: queries are NVML's, setters are those of a subclass."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        return self._refuse if name.startswith(("nvmlDeviceSet", "nvmlDeviceReset")) else value

    def _refuse(self, *_: object) -> None:
        raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)

    def why_not(self) -> str:
        """Return the reason why this cannot be used here; empty if it may be tried."""
        return ""


def connected(path: str, timeout_s: float) -> socket.socket:
    """Connect to a Unix socket of root or this user; OSError if nobody or another listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", who)[1]
        if uid not in (0, os.geteuid()):
            raise PermissionError(f"UID {uid} listens at {path}, who is neither root nor this user")
    except BaseException:
        connection.close()
        raise
    return connection


class RootGuardNvml(Elsewhere):
    """Substitute for pynvml whose setters a guard of root makes; `lock_MHz` is the earlier lock."""

    def __init__(
        self, nvml: Any, path: str = DEFAULT_SOCKET, lock_MHz: Sequence[int] | None = None
    ) -> None:
        super().__init__(nvml)
        self._path, self._lock_MHz = path or DEFAULT_SOCKET, lock_MHz or ()
        self._stood: dict[tuple[str, str], Sequence[int]] = {}
        self._socket: socket.socket | None = None
        self._sudo: subprocess.Popen[str] | None = None

    @property
    def installed(self) -> bool:
        """True if an administrator has installed the guard: a unit's socket, or root's program."""
        with contextlib.suppress(OSError):
            return stat.S_ISSOCK(os.stat(self._path).st_mode)
        with contextlib.suppress(OSError):
            return os.stat(PROGRAM).st_uid == 0
        return False

    def why_not(self) -> str:
        """Return the reason why this guard does nothing for this process; empty if it does."""
        try:
            if not (why := str(self.ask(verb="state").get("error", ""))):
                return ""
        except OSError as error:
            why = str(error)
        self._drop()
        return self._sudo_said() or why

    def _connect(self) -> socket.socket:
        """Connect to the guard; OSError if there is none, or another user's."""
        if os.path.exists(self._path):
            return connected(self._path, ANSWER_S)
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_S)
        with theirs:
            self._sudo = subprocess.Popen(
                ["sudo", "-n", PROGRAM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                cwd="/",
                start_new_session=True,
            )
        return ours

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send one message and return the answer; a guard that was killed is replaced once."""
        fresh = self._socket is None
        try:
            self._socket = self._socket or self._connect()
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            said = b""
            while not said.endswith(b"\n"):
                piece = self._socket.recv(65536)
                if not piece:
                    raise ConnectionError("the guard ended")
                said += piece
            answer: dict[str, Any] = json.loads(said)
            return answer
        except (OSError, ValueError) as error:
            self._drop()
            if fresh:
                raise OSError(str(error)) from error
        return self.ask(**message)

    def _sudo_said(self) -> str:
        """Return what sudo and the guard that it started said, which ends without the socket."""
        sudo, self._sudo = self._sudo, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return sudo.communicate(timeout=END_S)[1].strip() if sudo is not None else ""
        return ""

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _change(self, verb: str, handle: Any, what: str, *values: int) -> None:
        nvml = self._nvml
        uuid = nvml.nvmlDeviceGetUUID(handle)
        stood = self._stood.get((uuid, what), self._lock_MHz if what == "GpuLockedClocks" else ())
        try:
            answer = self.ask(verb=verb, gpu=uuid, what=what, values=values, stood=stood)
        except OSError as error:
            raise nvml.NVMLError(nvml.NVML_ERROR_UNKNOWN) from error
        if "error" in answer:
            raise nvml.NVMLError(answer.get("nvml", nvml.NVML_ERROR_UNKNOWN))
        if verb == "set":  # for the guard after this one, if it is killed
            self._stood[uuid, what] = answer["stood"]
        else:
            self._stood.pop((uuid, what), None)

    def __getattr__(self, name: str) -> Any:
        for verb, start in (("set", "nvmlDeviceSet"), ("restore", "nvmlDeviceReset")):
            what = name.removeprefix(start)
            if what != name and what in guard.NAMES:
                return lambda handle, *values: self._change(verb, handle, what, *values)
        return super().__getattr__(name)

    def nvmlShutdown(self) -> None:
        """End the guard, which restores what still differs, and NVML."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self.ask(verb="end")
            self._drop()
        self._sudo_said()
        self._nvml.nvmlShutdown()


def _load(spec: str) -> Any:
    module, _, name = spec.partition(":")
    found = importlib.import_module(module)
    if not name:
        return found
    thing = getattr(found, name)
    return thing() if callable(thing) else thing


def main(argv: Sequence[str] | None = None) -> int:
    """Run a guard with the agent's rights. Return 0 if every setting was restored, else 1."""
    parser = argparse.ArgumentParser(description="restores the devices of a dead agent")
    parser.add_argument("--nvml", default="pynvml")
    parser.add_argument("--agent", type=int, required=True)
    chosen = parser.parse_args(argv)
    guard.ignore_signals()
    nvml = None
    try:
        if chosen.nvml:
            nvml = _load(chosen.nvml)
            nvml.nvmlInit()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    print("ready", flush=True)

    earlier: list[Earlier] = []
    files: list[EarlierFile] = []
    commands: list[EarlierCommand] = []
    for line in guard.lines_of(sys.stdin.fileno(), guard.gone(chosen.agent)):
        message = json.loads(line)
        if message.get("done"):
            return 0
        earlier = [Earlier(**old) for old in message["earlier"]]
        files = [EarlierFile(**file) for file in message["files"]]
        commands = [EarlierCommand(**command) for command in message["commands"]]
        with contextlib.suppress(OSError):  # an agent that is gone need not hear it
            print("knows", flush=True)
    back = guard.put_back(nvml, earlier)
    problems = [*back, *put_back_files(files), *put_back_commands(commands)]
    with contextlib.suppress(OSError):  # there may be no reader left
        for problem in problems:
            print(problem, file=sys.stderr, flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
