"""The agent's own guard: a process with the agent's rights that restores changed settings.

The agent sends it the earlier settings over a pipe before the first change, and ends it with
"done". If the pipe closes without "done", or the agent ends, even by SIGKILL, the guard restores
them. Its process is this file, too. Where only root may set clocks, a guard of root's sets and
restores them (`tuner.workload.node.clocks.guard`,
`tuner.workload.node.clocks.root_guard.RootGuardNvml`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import pwd
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tuner.workload.node.clocks import guard
from tuner.workload.node.meters.gpus import on_twin, query

# Locks of GPUs: the file that a guard locks, and the search that holds it.
#
# A guard locks the device file of each GPU that it sets, and the kernel releases the lock when the
# guard ends. Every process that may use a GPU can lock it, so the guard of root and the agent's own
# exclude each other (`tuner.workload.node.clocks.guard.hold`).


#: The start of the name that a guard gives its process; its agent's number follows.
NAME = "guard:"


def device_of(nvml: Any, uuid: str) -> Path | None:
    """Return the device file of a GPU; None if NVML or this machine has none, as under WSL."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    minor = query(nvml, None, lambda: nvml.nvmlDeviceGetMinorNumber(handle))
    own = f"{os.environ['JOULEFRONT_TWIN']}.gpu{{}}" if on_twin() else guard.DEVICE
    path = Path(own.format(minor))
    return path if minor is not None and path.exists() else None


def _uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    return int(status.partition("\nUid:")[2].split()[0])


def _agent(pid: int) -> int:
    """Return the process for which a guard works, or the process itself; OSError if it is gone."""
    name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    agent = name.removeprefix(NAME)
    if not (name.startswith(NAME) and agent.isdecimal()):
        return pid
    # Any process can call itself a guard, so a user's is believed about this user only.
    return int(agent) if _uid(pid) in (0, _uid(int(agent))) else pid


def _lock_owners(path: Path) -> Iterator[int]:
    stat = path.stat()
    inode = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[1:2] == ["FLOCK"] and words[5] == inode:
            yield int(words[4])


def holder(path: Path) -> str:
    """Return which search holds a device, as "process 4321 of alice", or ""."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for pid in _lock_owners(path):
            agent = _agent(pid)
            uid = _uid(agent)
            try:
                user = pwd.getpwuid(uid).pw_name
            except KeyError:
                user = f"UID {uid}"
            return f"process {agent} of {user}"
    return ""


def why_held(uuid: str, path: Path | None) -> str:
    """Return the sentence for a search whose GPU another search holds."""
    owner = holder(path) if path is not None else ""
    return (
        f"another search{f' ({owner})' if owner else ''} sets the clocks of {uuid}; wait for its "
        "end, or leave the clocks alone with --no-clocks"
    )


#: The longest that the guard may take for an answer, seconds.
REPLY_S = 20.0
#: The longest that is waited for its end, or for that of the one before it, seconds.
END_S = 5.0
#: What is set, by the end of NVML's functions, and what sentences call it.
NOUNS = {
    "GpuLockedClocks": "SM clock lock",
    "MemoryLockedClocks": "memory clock lock",
    "PowerManagementLimit": "power limit",
}
#: A value of the kernel's files reads back within this share: RAPL's unit is 1/8 W, a clock's one
#: step of the hardware.
READ_BACK = 0.02
#: How the guard begins its answer if another search holds a GPU.
_HELD = "held: "


class GuardError(Exception):
    """Failure of the guard to run; nothing may be changed without it."""


class GpuHeld(GuardError):
    """Refusal by a guard, because another search sets the clocks of a GPU."""


@dataclass(frozen=True)
class EarlierValues:
    """Values that stood, MHz or milliwatts as NVML takes them; empty: it is reset.

    `ours` are the values of a power limit that the search has set last, or was about to set; empty
    if unknown. NVML cannot be asked for a lock of a clock.
    """

    uuid: str
    what: str
    values: tuple[int, ...] = ()
    ours: tuple[int, ...] = ()


def set_by_others(nvml: Any, old: EarlierValues) -> int | None:
    """Return the power limit that another process has set since, milliwatts; None if none has."""
    if old.what != "PowerManagementLimit" or not old.ours:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(old.uuid)
        now_mW = int(nvml.nvmlDeviceGetPowerManagementLimit(handle))
    except nvml.NVMLError:
        return None
    return None if now_mW in (*old.ours, *old.values) else now_mW


def stays(old: EarlierValues, limit_mW: int) -> str:
    """Return the sentence for a power limit that is not put back."""
    return f"the power limit of {old.uuid} stays at {limit_mW / 1000:g} W: another process set it"


def put_back(nvml: Any, earlier: Sequence[EarlierValues], *, tries: int = guard.TRIES) -> list[str]:
    """Restore as many earlier settings as possible; return a sentence for each failure.

    What another process has set since stays.
    """
    problems = []
    for old in earlier:
        if set_by_others(nvml, old) is not None:
            continue
        name = f"nvmlDevice{'Set' if old.values else 'Reset'}{old.what}"
        for attempt in range(tries):
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(old.uuid)
                getattr(nvml, name)(handle, *old.values)
                break
            except nvml.NVMLError as error:
                if attempt == tries - 1:
                    what = f"the {NOUNS[old.what]} of {old.uuid}"
                    problems.append(f"{what} was not put back: {error}")
                else:
                    time.sleep(guard.WAIT_S)
    return problems


@dataclass(frozen=True)
class EarlierFile:
    """Earlier content of one of the kernel's files that holds a setting.

    `ours` are the numbers that the search has written last, or was about to write.
    """

    path: str
    text: str
    ours: tuple[int, ...] = ()


def written_by_others(file: EarlierFile) -> str:
    """Return what another process has written since; "" if nothing. May raise OSError."""
    path = Path(file.path)
    now = path.read_text().strip()
    if not file.ours or now == file.text or not now.isdecimal():
        return ""
    if any(abs(int(now) - our) <= READ_BACK * our for our in file.ours):
        return ""
    if "/cpufreq/" in file.path and int(now) < file.ours[-1]:
        # The kernel shows a lower clock while it holds the cores to one against heat, whatever was
        # written: it then shows the same after another write.
        path.write_text(file.text)
        held = path.read_text().strip() == now
        path.write_text(str(file.ours[-1]) if held else now)
        return "" if held else now
    return now


def put_back_files(earlier: Sequence[EarlierFile]) -> list[str]:
    """Write the earlier contents where they differ; return a sentence for each failure.

    What another process has written since stays.
    """
    problems = []
    for file in earlier:
        for attempt in range(guard.TRIES):
            try:
                differs = Path(file.path).read_text().strip() != file.text
                if differs and not written_by_others(file):
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

    `library` says where its process finds the devices' library: a module, or "module:object", where
    an object that can be called is called for it; "" if only files are to be restored; None for no
    guard.
    """

    def __init__(self, library: str | None) -> None:
        self._library = library
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The guard's process id; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def _announce(self, message: dict[str, Any] | None, expected: str) -> None:
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
        ready, _, _ = select.select([self._process.stdout], [], [], REPLY_S)
        reply = self._process.stdout.readline().strip() if ready else "no answer in time"
        if reply.startswith(_HELD):
            raise GpuHeld(reply.removeprefix(_HELD))
        if reply != expected:
            raise GuardError(f"the guard process does not run: {reply or 'it ended'}")

    def expect(self, earlier: Sequence[EarlierValues], files: Sequence[EarlierFile] = ()) -> None:
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
                self._announce(None, "ready")
            self._announce(words, "knows")
        except GpuHeld:
            raise
        except GuardError:
            self.take_over()
            if not running:
                raise
            self.expect(earlier, files)  # it was killed: a new one gets the same

    def idle(self) -> None:
        """Let the guard keep its GPUs from other searches, with nothing to restore."""
        if self._process is not None:
            self.expect([])

    def done(self) -> None:
        """End the guard without changes: all settings are as they were."""
        if self._process is not None:
            with contextlib.suppress(GuardError):
                self._announce({"done": True}, "")
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


def _load(spec: str) -> Any:
    module, _, name = spec.partition(":")
    found = importlib.import_module(module)
    if not name:
        return found
    thing = getattr(found, name)
    return thing() if callable(thing) else thing


class _LockedGpus:
    """The GPUs that this guard has locked."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._files: dict[str, IO[bytes] | None] = {}

    def why_not(self, uuids: Iterable[str]) -> str:
        """Lock GPUs until this process ends; return the reason if one cannot be had, or ""."""
        end_s = time.monotonic() + END_S
        for uuid in sorted(set(uuids) - set(self._files)):
            path = device_of(self._library, uuid)
            while uuid not in self._files:
                try:
                    self._files[uuid] = guard.hold(str(path)) if path is not None else None
                except BlockingIOError:  # a guard that is about to end has a moment
                    if time.monotonic() > end_s:
                        return why_held(uuid, path)
                    time.sleep(guard.WAIT_S)
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a guard with the agent's rights. Return 0 if every setting was restored, else 1."""
    parser = argparse.ArgumentParser(description="restores the devices of a dead agent")
    parser.add_argument("--library", required=True)
    parser.add_argument("--agent", type=int, required=True)
    chosen = parser.parse_args(argv)
    with contextlib.suppress(OSError, ValueError):  # its limits are the user's
        guard.detach(chosen.agent)
    library = None
    try:
        if chosen.library:
            library = _load(chosen.library)
            library.nvmlInit()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    print("ready", flush=True)

    earlier: list[EarlierValues] = []
    files: list[EarlierFile] = []
    held = _LockedGpus(library)
    for line in guard.lines_of(chosen.agent, lambda: os.read(0, 65536), math.inf):
        message = json.loads(line)
        if message.get("done"):
            return 0
        wanted = [EarlierValues(**old) for old in message["earlier"]]
        if why := held.why_not({old.uuid for old in wanted}):
            print(f"{_HELD}{why}", flush=True)
            continue
        earlier = wanted
        files = [EarlierFile(**file) for file in message["files"]]
        with contextlib.suppress(OSError):  # an agent that is gone need not hear it
            print("knows", flush=True)
    kept = [(old, set_by_others(library, old)) for old in earlier]
    back = put_back(library, earlier)
    problems = [*back, *put_back_files(files)]
    with contextlib.suppress(OSError):  # there may be no reader left
        for problem in [*(stays(old, mW) for old, mW in kept if mW), *problems]:
            print(problem, file=sys.stderr, flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
