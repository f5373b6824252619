"""Measurement of a command from its start to its end: the child, the meter and the receipt file.

The command has this process's standard streams, open files, process group, priorities and signal
masks, so that terminals, pipes and Ctrl-C work as without tuner. A signal that reaches this process
alone (`kill PID`, a container's stop) is passed on; one that reaches the whole group (Ctrl-C at the
terminal, `timeout`, Slurm) is not, for the command has got it already.

The file is replaced every few seconds by a newer one, so that it holds what was used until then if
this process is killed. The command trains on in that case: it waits for nothing here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tuner.problem.run_folder import new_name
from tuner.receipt.receipt import (
    KIND,
    DeviceTotals,
    EnergyCurve,
    Receipt,
    Training,
    TrainingShare,
    own_energy_J,
    read_counts,
    trainings_of,
)
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import strict_json
from tuner.search_spaces.safe_files import TemporaryFolder, private_folder, require_own, write_text
from tuner.workload import hook
from tuner.workload.hook import ATTACH
from tuner.workload.node.meters import Meter, MeterError
from tuner.workload.node.meters.base import CounterMeter, opener_of
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.platforms import detect_cluster, platform_of
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.scripts.secrets import hidden

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
        #: Processor time of the command and all that it waited for, once it has ended.
        self.used_s: float | None = None

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
        pid, status, used = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
            self.used_s = used.ru_utime + used.ru_stime
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


#: Time between two readings of the meter and the counts, and between two writes, seconds.
POLL_S, WRITE_S = 1.0, 5.0
#: Reading counts may take this long while the command runs, whose end is seen late by it, seconds.
COUNTING_S = 0.2
#: Most of a core that looking may take, of a command with thousands of trainings or a slow meter.
MOST_SHARE = 0.02
#: Time in which helpers of an ended command end, too, seconds.
ENDING_S = 0.2
#: Processes that a note names.
_NAMED = 3


def open_node_meter() -> Meter:
    """Open the user's own meter, or that of the visible GPUs, of whatever kinds, or of the cores.

    InputError if the machine has GPUs whose energy cannot be metered.
    """
    try:
        if (own := opener_of(os.environ)) is not None:
            return own()
        gpus = Nvidia().facts()
        if gpus.broken:
            raise InputError(f"the GPUs of this machine cannot be metered: {gpus.why_none}")
        if gpus.devices:
            return NvmlMeter()
    except MeterError as error:
        raise InputError(str(error)) from error
    cluster = detect_cluster()
    return platform_of(cluster).open_meter(cluster)


def _stem(words: Sequence[str]) -> str:
    scripts = [word for word in words if word.endswith((".py", ".sh", ".sbatch"))]
    return Path(scripts[0] if scripts else words[0].split()[0]).stem


def receipt_file(out: str | None, runs_dir: str | Path, command: Sequence[str]) -> Path:
    """Return the file of the receipt: `out`, or energy.json in a new folder of the runs' folder.

    InputError if `out` holds something else, or the folder cannot be made.
    """
    if out is not None:
        path = Path(out)
        if path.exists() and KIND not in _start_of(path):
            raise InputError(f"--out {out} exists and holds no receipt; name another file")
        return path
    receipts = Path(runs_dir) / "receipts"
    require_own(receipts)
    try:
        private_folder(receipts)
        while True:
            folder = receipts / new_name(_stem(command), receipts)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                return folder / "energy.json"
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(
            f"no receipt can be kept in {receipts}: {why}; name a file with --out FILE"
        ) from error


def _start_of(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(200).decode(errors="replace")


@dataclass(frozen=True)
class MeasureOptions:
    """Options of measuring a command.

    Attributes:
        file: where the receipt is written while the command runs.
        samples_a_step: number of samples of an optimizer step, over all ranks; None counts them.
        ignored: signals that the command ignores, as this process did when it started.
        output: descriptor of the command's standard output; None for this process's.
    """

    file: Path
    samples_a_step: float | None = None
    ignored: Collection[int] = ()
    output: int | None = None


class _Account:
    # Gathers what the command uses; `receipt` sums it up at any moment.

    def __init__(
        self, meter: Meter, command: Sequence[str], counts: Path, options: MeasureOptions
    ) -> None:
        self._meter, self._counts = meter, counts
        self._samples_a_step = options.samples_a_step
        self._words = tuple(hidden(command)[0])
        self._trainings: list[Training] = []
        self.notes: list[str] = []
        self._problem = ""
        self._began_s = time.monotonic()
        opened = meter.boundary(opens=True)
        self._started = datetime.now().astimezone().isoformat(timespec="seconds")
        self.curve = EnergyCurve(opened)
        self._devices = DeviceTotals(opened.time_s, tells_devices=meter.info.tells_clocks)
        self._own: tuple[float, float] = (math.nan, math.nan)

    def poll(self, running: Command, *, last: bool = False) -> None:
        """Read meter and counts.

        The last reading is that of the moment of this call: what the program left to be counted
        takes no time or energy of its own.
        """
        if last:
            self._read_meter(last=True)
            self._see_share(running)
        with contextlib.suppress(OSError):  # the folder was removed: what was counted stays
            limit_s = math.inf if last else COUNTING_S
            counts = read_counts(self._counts, self._began_s, limit_s=limit_s)
            self._trainings = trainings_of(counts)
        if not last:
            self._read_meter()
            self._see_share(running)
        moments = {t for each in self._trainings for t in (each.lead.first_s, each.lead.last_s)}
        self.curve.forget(moments)

    def _see_share(self, running: Command) -> None:
        cores = self._devices.cores
        cores.look(running.pid, running.used_s)
        if not self._meter.info.tells_clocks and not self._problem:
            idle_W = self._meter.idle_W if isinstance(self._meter, CounterMeter) else 0.0
            self._own = cores.share, own_energy_J(self.curve, cores, idle_W)

    def _read_meter(self, *, last: bool = False) -> None:
        if self._problem:
            return
        try:
            self.curve.add(self._meter.boundary(opens=False) if last else self._meter.read())
            if not last:
                self._devices.add(self._meter.sample())
        except Exception as error:  # whatever it is, the command runs on
            cause = str(error) if isinstance(error, MeterError) else repr(error)
            self._problem = (
                f"The meter failed {self.curve.time_s:.0f} s after the start, and energy is "
                f"counted until then: {cause}"
            )

    def receipt(
        self, state: Literal["running", "ended"] = "running", status: int | None = None
    ) -> Receipt:
        """Return the receipt until the last look."""
        curve = self.curve
        shares = tuple(
            TrainingShare.of(each, curve, self._samples_a_step) for each in self._trainings
        )
        first_s = min((each.lead.first_s for each in self._trainings), default=math.nan)
        mean_W = curve.energy_J / curve.time_s if curve.time_s > 0 else math.nan
        return Receipt(
            state=state,
            command=self._words,
            host=socket.gethostname(),
            started=self._started,
            began_s=curve.opened.time_s,
            time_s=curve.time_s,
            energy_J=curve.energy_J,
            meter=self._meter.info,
            exit_code=status if status is not None and status >= 0 else None,
            signal=-status if status is not None and status < 0 else None,
            first_step_energy_J=math.nan if not shares else curve.energy_at(first_s),
            trainings=shares,
            devices=self._devices.shares(mean_W),
            notes=(*self._seen(shares), *self.notes),
            core_share=self._own[0],
            own_energy_J=self._own[1],
        )

    def _seen(self, shares: Sequence[TrainingShare]) -> Iterator[str]:
        if self._problem:
            yield self._problem
        if not shares:
            yield (
                "No optimizer step was seen, so there are no figures a step: no Python process "
                "below the command stepped a torch optimizer or a DeepSpeed engine (a loop of "
                "another kind counts its steps by joulefront_hook.step())."
            )
        if any(len(each.ranks) < each.world for each in self._trainings):
            yield (
                "Not all ranks were seen on this node. The energy of other nodes is not part of "
                "this receipt, whose figures a step are of this node's share."
            )
        if (tasks := _tasks_here(os.environ)) > 1:
            yield (
                f"This command is one of {tasks} that a launcher started on this node; devices "
                "that they share are charged in the receipt of each (put tuner run before the "
                "launcher)."
            )
        if _overlap(self._trainings):
            yield "Trainings ran at the same time, and each is charged all of the energy meanwhile."
        if any(each.steps > 1 and not each.samples > 0 for each in shares):
            yield (
                "Samples were not counted, for no DataLoader of torch drew them all; --samples N "
                "says how many a step takes."
            )


def _tasks_here(environ: Mapping[str, str]) -> int:
    # Tasks of a Slurm step, "8(x2),4", or ranks of torchrun, one of which this process is.
    texts = (environ.get("SLURM_STEP_TASKS_PER_NODE"), environ.get("LOCAL_WORLD_SIZE"))
    counts = [re.match(r"\d+", text or "") for text in texts]
    return max((int(found[0]) for found in counts if found is not None), default=1)


def _overlap(trainings: Sequence[Training]) -> bool:
    spans = sorted((each.lead.first_s, each.lead.last_s) for each in trainings)
    return any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))


def measure(
    command: Sequence[str],
    options: MeasureOptions,
    announce: Callable[[str], None] = lambda sentence: None,
) -> tuple[Receipt, int]:
    """Run a command as it stands; return its receipt and its exit code, or minus its signal.

    Raises:
        InputError: it cannot be started, its energy cannot be metered, or the file cannot be
            written; the command does not run then.
        KeyboardInterrupt: a signal came before it was started.
    """
    words = words_of(command)
    with _counts_folder() as counts:
        variables = _variables(counts)
        with (
            Command(words, variables, ignored=options.ignored, output=options.output) as running,
            closing(open_node_meter()) as meter,
        ):
            account = _Account(meter, command, counts, options)
            _write(account.receipt(), options.file)
            if (signal.sigpending() & PASSED_ON).difference(options.ignored):
                raise KeyboardInterrupt
            running.start()
            _follow(running, account, options.file, announce)
            account.poll(running, last=True)
            if left := _left_running(counts):
                account.notes.append(_left(left))
            status = running.status or 0
            receipt = account.receipt("ended", status)
            with _reported(announce):
                _write(receipt, options.file)
            return receipt, status


def _follow(
    running: Command, account: _Account, file: Path, announce: Callable[[str], None]
) -> None:
    write_s = time.monotonic()
    due_s = write_s + POLL_S
    while not running.wait(max(0.0, due_s - time.monotonic())):
        now_s = time.monotonic()
        if now_s < due_s and not running.signalled:
            continue
        account.poll(running)
        if now_s - write_s >= WRITE_S or running.signalled:
            write_s = now_s
            with _reported(announce):
                _write(account.receipt(), file)
        due_s = now_s + max(POLL_S, (time.monotonic() - now_s) / MOST_SHARE)


@contextlib.contextmanager
def _reported(announce: Callable[[str], None]) -> Iterator[None]:
    # A file that cannot be written while the command runs is no reason to stop it.
    try:
        yield
    except InputError as error:
        announce(str(error))


def _write(receipt: Receipt, file: Path) -> None:
    try:
        write_text(file, json.dumps(strict_json(receipt.to_json()), indent=1) + "\n", mode=0o600)
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"the receipt {file} cannot be written: {why}") from error


@contextlib.contextmanager
def _counts_folder() -> Iterator[Path]:
    # In memory: a count must not wait for a disk that is busy with a checkpoint.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    with TemporaryFolder(parent=memory) as folder:
        yield folder.path


def _variables(counts: Path) -> dict[str, str]:
    entry = str(Path(hook.__file__).parent / "entry")
    path = os.pathsep.join(filter(None, [entry, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, ATTACH: str(counts), "PYTHONPATH": path}


def _left_running(counts: Path) -> list[tuple[int, list[str]]]:
    # Helpers of a process that has ended, such as multiprocessing's, end a moment later.
    if left_running(ATTACH, str(counts)):
        time.sleep(ENDING_S)
    return left_running(ATTACH, str(counts))


def _left(processes: Sequence[tuple[int, Sequence[str]]]) -> str:
    shown = [(pid, shlex.join(hidden(words)[0][:3])) for pid, words in processes[:_NAMED]]
    named = [f"{pid} ({words})" for pid, words in shown]
    more = f" and {len(processes) - _NAMED} more" if len(processes) > _NAMED else ""
    return (
        f"The command ended, and processes that it started still run: {', '.join(named)}{more}; "
        "what they use from here on is not part of this receipt (a shell waits for its background "
        "jobs with `wait`)."
    )
