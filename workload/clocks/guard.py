"""The guard: a small process that restores the devices' earlier settings when the agent cannot.

The agent's governor starts it before the first change, sends it the earlier settings over a pipe,
and ends it with "done". If the pipe closes without "done", or the agent ends, even by SIGKILL, the
guard restores the earlier settings: those of GPUs through NVML, those of processors by writing the
kernel's files, those of declared knobs by their commands. It is one file on the standard library
and NVML, in a session of its own, so that a signal to the agent's process group does not kill it
too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "Earlier",
    "EarlierCommand",
    "EarlierFile",
    "Guard",
    "GuardError",
    "GuardKeeper",
    "put_back",
    "put_back_commands",
    "put_back_files",
]

#: How often, and how far apart, a setting that would not go back is tried again.
TRIES, WAIT_S = 3, 0.2
#: The longest that a command of a declared knob may take, seconds.
COMMAND_S = 30.0


class GuardError(Exception):
    """Failure of the guard to run; nothing may be changed without it."""


@dataclass(frozen=True)
class Earlier:
    """Earlier settings of one GPU, of those that have been or are about to be changed.

    Attributes:
        uuid: the GPU.
        power_limit_mW: the limit to put back; None: it was not touched.
        clocks_touched: whether the SM clock's lock was touched.
        locked_clocks_MHz: the lock to put back, (lowest, highest); None: there was none, and the
            lock is released.
        memory_touched: whether the memory clock's lock was touched; it is then released, since
            NVML cannot be asked for an earlier one.
        application_clocks_MHz: the application clocks to put back, (memory, SM); None: they were
            not touched.
    """

    uuid: str
    power_limit_mW: int | None = None
    clocks_touched: bool = False
    locked_clocks_MHz: tuple[int, int] | None = None
    memory_touched: bool = False
    application_clocks_MHz: tuple[int, int] | None = None

    @property
    def touched(self) -> bool:
        """True if there is anything to restore."""
        return (
            self.clocks_touched
            or self.memory_touched
            or self.power_limit_mW is not None
            or self.application_clocks_MHz is not None
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Earlier:
        """Read the output of `asdict`, with pairs that JSON has turned into lists."""
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**plain)


@dataclass(frozen=True)
class EarlierFile:
    """Earlier content of one of the kernel's files that holds a setting.

    Attributes:
        path: the file.
        text: what it said.
    """

    path: str
    text: str


@dataclass(frozen=True)
class EarlierCommand:
    """Command that sets a declared knob to its earlier value.

    Attributes:
        words: the command, which no shell reads.
        cwd: the folder it runs in.
        account: uid, gid and supplementary groups that it runs as; empty for the guard's own.
    """

    words: tuple[str, ...]
    cwd: str
    account: tuple[int, ...] = ()

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run the command to its end.

        Raises:
            OSError: it cannot be started.
            subprocess.TimeoutExpired: it does not end.
        """
        uid, gid, *groups = self.account or (None, None)
        return subprocess.run(
            self.words,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            user=uid,
            group=gid,
            extra_groups=groups if self.account else None,
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
    """Write the earlier contents, in this order; return a sentence for each failure.

    A file that reads as it did is not written.
    """
    problems = []
    for file in earlier:
        for attempt in range(TRIES):
            try:
                if Path(file.path).read_text().strip() != file.text:
                    Path(file.path).write_text(file.text)
                break
            except OSError as error:
                if attempt == TRIES - 1:
                    problems.append(f"{file.path} was not put back to {file.text}: {error}")
                else:
                    time.sleep(WAIT_S)
    return problems


def put_back(nvml: Any, earlier: Sequence[Earlier]) -> list[str]:
    """Restore as many earlier settings as possible; return a sentence for each failure."""
    problems = []
    for gpu in earlier:

        def clocks(gpu: Earlier = gpu) -> None:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            if gpu.locked_clocks_MHz is None:
                nvml.nvmlDeviceResetGpuLockedClocks(handle)
            else:
                nvml.nvmlDeviceSetGpuLockedClocks(handle, *gpu.locked_clocks_MHz)

        def limit(gpu: Earlier = gpu) -> None:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            nvml.nvmlDeviceSetPowerManagementLimit(handle, gpu.power_limit_mW)

        def memory(gpu: Earlier = gpu) -> None:
            nvml.nvmlDeviceResetMemoryLockedClocks(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))

        def application(gpu: Earlier = gpu) -> None:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            assert gpu.application_clocks_MHz is not None
            nvml.nvmlDeviceSetApplicationsClocks(handle, *gpu.application_clocks_MHz)

        for what, touched, action in (
            ("SM clock lock", gpu.clocks_touched, clocks),
            ("memory clock lock", gpu.memory_touched, memory),
            ("application clocks", gpu.application_clocks_MHz is not None, application),
            ("power limit", gpu.power_limit_mW is not None, limit),
        ):
            for attempt in range(TRIES if touched else 0):
                try:
                    action()
                    break
                except nvml.NVMLError as error:
                    if attempt == TRIES - 1:
                        problems.append(f"the {what} of {gpu.uuid} was not put back: {error}")
                    else:
                        time.sleep(WAIT_S)
    return problems


class Guard:
    """The agent's end of the pipe.

    Args:
        nvml: where the guard process finds NVML: a module, or "module:object", where an object that
            can be called is called for it; empty if only files are to be restored.
        start_s: how long it may take to say that it is ready, or that it knows what it was told.
        own_session: put it into a session of its own, else into a process group of its own.

    Raises:
        GuardError: it does not start.
    """

    def __init__(
        self, *, nvml: str = "pynvml", start_s: float = 20.0, own_session: bool = True
    ) -> None:
        # -P: this file's folder must not shadow the standard library's modules.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--nvml", nvml]
        self._process = subprocess.Popen(
            [*command, "--agent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # stderr is the agent's: what cannot be put back is seen there
            text=True,
            start_new_session=own_session,
            process_group=None if own_session else 0,
        )
        self._start_s = start_s
        if (answer := self._hear(start_s)) != "ready":
            self._process.kill()
            self._close(start_s)
            raise GuardError(f"the guard process does not start: {answer or 'it ended'}")

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._process.pid

    def _hear(self, wait_s: float) -> str:
        """Return the guard's next line; empty if it has ended."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], wait_s)
        return self._process.stdout.readline().strip() if ready else "no answer in time"

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise GuardError(f"the guard process is gone: {error}") from error

    def expect(
        self,
        earlier: Sequence[Earlier],
        files: Sequence[EarlierFile] = (),
        commands: Sequence[EarlierCommand] = (),
    ) -> None:
        """Send the guard the settings to restore, *before* changing any. Replaces earlier messages.

        Returns when the guard has said that it knows: a pipe takes a message for a dead reader too.

        Raises:
            GuardError: the guard is gone; nothing may be touched.
        """
        words = {
            "earlier": [asdict(gpu) for gpu in earlier],
            "files": [asdict(file) for file in files],
            "commands": [asdict(command) for command in commands],
        }
        self._say(words)
        if (answer := self._hear(self._start_s)) != "knows":
            raise GuardError(f"the guard process is gone: {answer or 'it ended'}")

    def done(self, *, wait_s: float = 5.0) -> None:
        """End the guard without changes: all settings are as they were."""
        with contextlib.suppress(GuardError):
            self._say({"done": True})
        self._close(wait_s)

    def take_over(self, *, wait_s: float = 5.0) -> None:
        """Close the pipe without "done": the guard restores the settings and ends."""
        self._close(wait_s)

    def _close(self, wait_s: float) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        if self._process.stdout is not None:
            self._process.stdout.close()


class GuardKeeper:
    """The guard of one governor: started before the first change, replaced if it was killed.

    Args:
        nvml: as `Guard`; None keeps no guard.
        own_session: as `Guard`.
    """

    def __init__(self, nvml: str | None, *, own_session: bool = True) -> None:
        self._nvml, self._own_session = nvml, own_session
        self._guard: Guard | None = None

    @property
    def pid(self) -> int:
        """The guard's process id; 0 if there is none."""
        return self._guard.pid if self._guard is not None else 0

    def expect(
        self,
        earlier: Sequence[Earlier],
        files: Sequence[EarlierFile] = (),
        commands: Sequence[EarlierCommand] = (),
    ) -> None:
        """Tell the guard what to restore, before anything is changed.

        Raises:
            GuardError: it does not start; nothing may be touched.
        """
        if self._nvml is None:
            return
        if self._guard is None:
            self._guard = self._start(self._nvml)
        try:
            self._guard.expect(earlier, files, commands)
        except GuardError:  # it was killed: a new one gets the same
            self._guard.take_over()
            self._guard = self._start(self._nvml)
            self._guard.expect(earlier, files, commands)

    def _start(self, nvml: str) -> Guard:
        return Guard(nvml=nvml, own_session=self._own_session)

    def done(self) -> None:
        """End the guard: all settings are as they were."""
        if self._guard is not None:
            self._guard.done()
            self._guard = None

    def take_over(self) -> None:
        """Let the guard restore the settings, and end."""
        if self._guard is not None:
            self._guard.take_over()


def _load(spec: str) -> Any:
    module, _, name = spec.partition(":")
    found = importlib.import_module(module)
    if not name:
        return found
    thing = getattr(found, name)
    return thing() if callable(thing) else thing


def _gone(agent: int) -> int | None:
    """Return a descriptor that is readable when the agent ends; None if unsupported.

    The pipe alone would do, but for a child of the agent that inherited its end of the pipe.
    """
    try:
        return os.pidfd_open(agent)
    except (AttributeError, OSError):
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the guard process. Return 0 if every setting was restored, else 1."""
    parser = argparse.ArgumentParser(description="restores the devices of a dead agent")
    parser.add_argument("--nvml", default="pynvml")
    parser.add_argument("--agent", type=int, required=True)
    chosen = parser.parse_args(argv)
    # Only the end of the agent ends the guard: a terminal's or a scheduler's signal to everybody
    # must not leave the clocks wrong.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nvml = None
    try:
        if chosen.nvml:
            nvml = _load(chosen.nvml)
            nvml.nvmlInit()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    agent = _gone(chosen.agent)
    print("ready", flush=True)

    earlier: list[Earlier] = []
    files: list[EarlierFile] = []
    commands: list[EarlierCommand] = []
    buffer, pipe = b"", sys.stdin.fileno()
    watched = [pipe] if agent is None else [pipe, agent]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if pipe not in ready:
            break  # the agent is gone, and the pipe is empty
        piece = os.read(pipe, 65536)
        if not piece:
            break
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message.get("done"):
                return 0
            earlier = [Earlier.from_json(gpu) for gpu in message["earlier"]]
            files = [EarlierFile(**file) for file in message["files"]]
            commands = [EarlierCommand(**command) for command in message["commands"]]
            with contextlib.suppress(OSError):  # an agent that is gone need not hear it
                print("knows", flush=True)
    problems = [*put_back(nvml, earlier), *put_back_files(files), *put_back_commands(commands)]
    with contextlib.suppress(OSError):  # there may be no reader left
        for problem in problems:
            print(problem, file=sys.stderr, flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
