"""The agent's guards. Its own is a process with the agent's rights that restores what was changed.

The agent sends it the earlier settings over a pipe before the first change, and ends it with
"done". If the pipe closes without "done", or the agent ends, even by SIGKILL, the guard restores
them. Its process is this file, too. Where only root may set clocks, a guard of root's sets and
restores them (`tuner.workload.clocks.guard`), to which `RootGuardNvml` speaks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tuner.workload.clocks import guard
from tuner.workload.clocks.guard import Earlier

#: The longest that the guard may take for an answer, seconds.
ANSWER_S = 20.0
#: The longest that is waited for its end, seconds.
END_S = 5.0
#: Where the unit of root's guard listens: as the variable says, or here.
GUARD_SOCKET, DEFAULT_SOCKET = "JOULEFRONT_GUARD_SOCKET", "/run/joulefront-guard.sock"
#: The longest that its answer may take, seconds: three tries of four settings.
GUARD_S = 20.0


class GuardError(Exception):
    """Failure of the guard to run; nothing may be changed without it."""


@dataclass(frozen=True)
class EarlierFile:
    """Earlier content of one of the kernel's files that holds a setting."""

    path: str
    text: str


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

    `library` is the module of the devices' library; "" if only files are to be restored; None for
    no guard.
    """

    def __init__(self, library: str | None) -> None:
        self._library = library
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The guard's process id; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def _say(self, message: dict[str, Any] | None, expected: str) -> None:
        # And wait for its answer: a pipe takes a message for a dead reader, too.
        if self._process is None:
            # -P: this file's folder must not shadow the standard library's modules.
            command = [sys.executable, "-P", str(Path(__file__).resolve())]
            self._process = subprocess.Popen(
                [*command, "--library", str(self._library), "--agent", str(os.getpid())],
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

    def expect(self, earlier: Sequence[Earlier], files: Sequence[EarlierFile] = ()) -> None:
        """Send the settings to restore before changing any; after GuardError none may be."""
        words = {
            "earlier": [asdict(old) for old in earlier],
            "files": [asdict(file) for file in files],
        }
        running = self._process is not None
        if self._library is None:
            return
        try:
            if not running:
                self._say(None, "ready")
            self._say(words, "knows")
        except GuardError:
            self.take_over()
            if not running:
                raise
            self.expect(earlier, files)  # it was killed: a new one gets the same

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


def connected(path: str) -> socket.socket:
    """Connect to a Unix socket of root or this user; OSError if nobody or another listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(GUARD_S)
        connection.connect(path)
        who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", who)[1]
        if uid not in (0, os.geteuid()):
            raise PermissionError(f"UID {uid} listens at {path}, who is neither root nor this user")
    except BaseException:
        connection.close()
        raise
    return connection


class RootGuardNvml:
    """Substitute for pynvml: queries are NVML's, and a guard of root makes the changes.

    `lock_MHz` is the earlier lock.
    """

    def __init__(self, nvml: Any, path: str = "", lock_MHz: Sequence[int] | None = None) -> None:
        self._nvml = nvml
        self._path, self._lock_MHz = path or DEFAULT_SOCKET, lock_MHz or ()
        self._stood: dict[tuple[str, str], Sequence[int]] = {}
        self._socket: socket.socket | None = None

    def __getattr__(self, name: str) -> Any:
        for verb in ("Set", "Reset"):
            if name.startswith(f"nvmlDevice{verb}"):
                return partial(self._change, verb, name.removeprefix(f"nvmlDevice{verb}"))
        return getattr(self._nvml, name)

    @property
    def installed(self) -> bool:
        """True if an administrator has installed the guard: its unit's socket is there."""
        return Path(self._path).is_socket()

    def why_not(self) -> str:
        """Return the reason why this guard does nothing for this process; empty if it does."""
        try:
            why = str(self.ask(verb="state").get("error", ""))
        except OSError as error:
            why = str(error)
        if why:
            self._drop()
        return why

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send one message and return the answer; a guard that was killed is replaced once."""
        fresh = self._socket is None
        try:
            self._socket = self._socket or connected(self._path)
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

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _change(self, verb: str, what: str, handle: Any, *values: int) -> None:
        nvml = self._nvml
        if what not in guard.NAMES:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        stood = self._stood.get((uuid, what), self._lock_MHz if what == "GpuLockedClocks" else ())
        asked = "set" if verb == "Set" else "restore"
        try:
            answer = self.ask(verb=asked, gpu=uuid, what=what, values=values, stood=stood)
        except OSError as error:
            raise nvml.NVMLError(nvml.NVML_ERROR_UNKNOWN) from error
        if "error" in answer:
            raise nvml.NVMLError(answer.get("nvml", nvml.NVML_ERROR_UNKNOWN))
        if asked == "set":  # for the guard after this one, if it is killed
            self._stood[uuid, what] = answer["stood"]
        else:
            self._stood.pop((uuid, what), None)

    def nvmlShutdown(self) -> None:
        """End the guard, which restores what still differs, and NVML."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self.ask(verb="end")
            self._drop()
        self._nvml.nvmlShutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a guard with the agent's rights. Return 0 if every setting was restored, else 1."""
    parser = argparse.ArgumentParser(description="restores the devices of a dead agent")
    parser.add_argument("--library", required=True)
    parser.add_argument("--agent", type=int, required=True)
    chosen = parser.parse_args(argv)
    guard.ignore_signals()
    library = None
    try:
        if chosen.library:
            library = importlib.import_module(chosen.library)
            library.nvmlInit()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    print("ready", flush=True)

    earlier: list[Earlier] = []
    files: list[EarlierFile] = []
    for line in guard.lines_of(sys.stdin.fileno(), guard.gone(chosen.agent)):
        message = json.loads(line)
        if message.get("done"):
            return 0
        earlier = [Earlier(**old) for old in message["earlier"]]
        files = [EarlierFile(**file) for file in message["files"]]
        with contextlib.suppress(OSError):  # an agent that is gone need not hear it
            print("knows", flush=True)
    back = guard.put_back(library, earlier)
    problems = [*back, *put_back_files(files)]
    with contextlib.suppress(OSError):  # there may be no reader left
        for problem in problems:
            print(problem, file=sys.stderr, flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
