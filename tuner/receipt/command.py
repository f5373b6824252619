"""The measured command as a child of this process, which it does not notice.

It has this process's standard streams, open files, process group, priorities and signal masks, so
that terminals, pipes and Ctrl-C work as without tuner. A signal that reaches this process alone
(`kill PID`, a container's stop) is passed on; one that reaches the whole group (Ctrl-C at the
terminal, `timeout`, Slurm) is not, for the command has got it already.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

from tuner.search_spaces.errors import InputError

#: Signals that end or advise a command, and are passed on.
PASSED_ON = frozenset(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
)
#: Signals that Python ignores, and the command does not.
_PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)
#: Time in which the kernel hands a signal for the whole group to each of its processes, seconds.
_WITNESS_S = 0.1
_NO, _YES = b"n", b"y"


class GroupWitness:
    """A process in this process's group that reports the signals it has received, too."""

    def __init__(self) -> None:
        self._link, link = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._link.close()
            _report_signals(link)
        link.close()

    def received(self, number: int) -> bool:
        """Return True if the witness has received this signal, too.

        A request waits for its turn, which may come late on a busy machine.
        """
        until_s = time.monotonic() + _WITNESS_S
        while not (received := self._has(number)) and time.monotonic() < until_s:
            time.sleep(_WITNESS_S / 20)
        return received

    def _has(self, number: int) -> bool:
        with contextlib.suppress(OSError):
            self._link.send(bytes([number]))
            return self._link.recv(1) == _YES
        return False

    def close(self) -> None:
        self._link.close()
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _report_signals(link: socket.socket) -> None:
    # Runs in the witness, with the signals blocked, as long as its parent lives.
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        while number := link.recv(1):
            link.send(_NO if signal.sigtimedwait(set(number), 0) is None else _YES)
    finally:
        os._exit(0)


def words_of(command: Sequence[str]) -> list[str]:
    """Return the words that are started: those of the command, or a shell for one line in quotes.

    InputError if there is no such program.
    """
    first = command[0]
    if len(command) == 1 and len(first.split()) > 1 and not os.path.exists(first):
        return ["bash", "-c", first]
    if shutil.which(first) is not None:
        return list(command)
    if os.path.isdir(first):
        raise InputError(f"{first} is a folder; name the command that trains after --")
    if os.path.isfile(first):
        with open(first, "rb") as file:
            by_shell = file.read(2) == b"#!" or first.endswith((".sh", ".sbatch", ".slurm"))
        starter = "bash" if by_shell else "python"
        raise InputError(f"{first} may not be executed; start it as: -- {starter} {first} ...")
    raise InputError(f"there is no command {first!r}; name the command that trains after --")


class Command:
    """A command that runs, from the start of the context to its end.

    Args:
        words: as `words_of` returns them.
        variables: its environment.
        ignored: signals that were ignored when this process started, which the command ignores.
        output: descriptor to which its standard output goes instead of this process's.
    """

    def __init__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        *,
        ignored: Collection[int] = (),
        output: int | None = None,
    ) -> None:
        self._words, self._variables = list(words), dict(variables)
        self._ignored, self._output = ignored, output
        self.pid, self.signalled = 0, False
        self.status: int | None = None

    def __enter__(self) -> Self:
        self._handlers = {number: signal.getsignal(number) for number in self._ignored}
        for number in self._ignored:
            signal.signal(number, signal.SIG_IGN)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
        self._witness = GroupWitness()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._witness.close()
        while self.status is not None and signal.sigtimedwait(PASSED_ON, 0):
            pass  # they were for the command, which has ended
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self) -> None:
        """Start it; InputError if that fails."""
        try:
            self.pid = self._spawn(self._words)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                why = error.strerror or str(error)
                raise InputError(f"{self._words[0]} cannot be started: {why}") from error
            # A script without a first line that says what runs it: every shell does.
            found = shutil.which(self._words[0]) or self._words[0]
            self.pid = self._spawn(["/bin/sh", found, *self._words[1:]])

    def _spawn(self, words: list[str]) -> int:
        moved = [] if self._output is None else [(os.POSIX_SPAWN_DUP2, self._output, 1)]
        return os.posix_spawnp(
            words[0],
            words,
            self._variables,
            file_actions=moved,
            setsigmask=self._mask,
            setsigdef=_PYTHONS,
        )

    def wait(self, limit_s: float) -> bool:
        """Wait at most this long; pass signals on; return True once the command has ended.

        `signalled` is True after a signal that was for the command.
        """
        received = signal.sigtimedwait({*PASSED_ON, signal.SIGCHLD}, limit_s)
        self.signalled = received is not None and received.si_signo in PASSED_ON
        if received is not None and self.signalled:
            self._pass_on(received.si_signo)
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def _pass_on(self, number: int) -> None:
        if number not in self._ignored and not self._witness.received(number):
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


def end_as(status: int) -> int:
    """Return the exit code of a command's status; end by the signal if one ended the command.

    A shell that runs a loop stops at Ctrl-C only if the command in it was ended by the signal.
    """
    if status >= 0:
        return status
    number = -status
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number


def left_running(variable: str, value: str) -> list[tuple[int, list[str]]]:
    """Return the processes, with their command lines, whose environment has this variable."""
    wanted = f"{variable}={value}".encode()
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            folder = f"/proc/{int(name)}"
            if os.stat(folder).st_uid != os.geteuid():
                continue
            with open(f"{folder}/environ", "rb") as file:
                if wanted not in file.read().split(b"\0"):
                    continue
            with open(f"{folder}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").rstrip("\0").split("\0")
            if words != [""]:
                found.append((int(name), words))
    return sorted(found)
