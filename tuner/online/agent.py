"""The agent that tunes a training while it runs: a command, or a block of a program.

A command is started once and left alone: its ranks send the ends of their steps
(`tuner.workload.hook.online_marks`) and wait for nothing. The agent reads the meter, asks the
bandit (`tuner.online.bandit`) for the next setting and puts it in force by the governor, whose
guard restores the clocks if the agent dies. Whatever fails here ends the tuning and not the
training.

In a program, the block is `with tuner.tuning(): ...`. Rank 0 starts the agent as a process of its
own, which ends with the block or with rank 0. All ranks send the ends of their steps to it and wait
for nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Unpack

from tuner.online.follow import LengthUnknown, kept_limits, reading
from tuner.online.live import LiveTuning, Training
from tuner.online.metrics import Metrics
from tuner.online.request import Ended, TuningOptions, TuningOutcome, TuningRequest
from tuner.online.settings import Offer, Record, Setup, offers, with_declared
from tuner.online.windows import Mark, Marks
from tuner.receipt.measure import Command
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload import hook
from tuner.workload.hook import online_marks
from tuner.workload.hook.online_marks import ADDRESS
from tuner.workload.node.clocks.base import Governor, GovernorError
from tuner.workload.node.measure.stragglers import (
    KEPT,
    Arrivals,
    HostWatch,
    RankState,
    Straggler,
    device_state,
    sentence,
    stragglers,
)
from tuner.workload.node.measure.window import more_faults
from tuner.workload.node.meters import Meter, MeterError
from tuner.workload.node.meters.base import device_states
from tuner.workload.node.platforms import detect_cluster, platform_of
from tuner.workload.node.platforms.base import Platform
from tuner.workload.node.rank_server import control_socket
from tuner.workload.scripts.command import Script, read_command
from tuner.workload.scripts.launchers import kind_of

#: Time between two looks at devices and processes, and between two judgements, seconds.
POLL_S, JUDGE_S = 1.0, 10.0


class RankWatch:
    """Watch of the ranks of one training; `found` is called with each straggler once."""

    def __init__(
        self,
        meter: Meter,
        platform: Platform,
        found: Callable[[Straggler], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stragglers: dict[int, Straggler] = {}
        self.last: dict[int, RankState] = {}
        self._meter, self._platform, self._found, self._clock = meter, platform, found, clock
        self._faults = platform.faults()
        self._arrivals, self._host = Arrivals(), HostWatch()
        self._devices: deque[dict[int, dict[str, float]]] = deque(maxlen=KEPT)
        self._polled_s = self._judged_s = clock()
        self._ranks: set[int] = set()

    def take(self, mark: Mark) -> None:
        self._ranks.add(mark.rank)
        if mark.ready:
            self._arrivals.add(mark.rank, mark.step, mark.time_s)

    def poll(self, pids: Mapping[int, int]) -> None:
        """Look at devices and processes, and judge, if it is time."""
        now_s = self._clock()
        if len(self._ranks) < 2 or now_s - self._polled_s < POLL_S:
            return
        self._polled_s = now_s
        self._host.read(pids)
        with contextlib.suppress(MeterError):  # the tuning tells
            self._devices.append(device_states(self._meter.sample()))
        if now_s - self._judged_s >= JUDGE_S:
            self._judged_s = now_s
            self.last = self._states()
            for each in stragglers(self._arrivals, self.last):
                if each.state.rank not in self.stragglers:
                    self._found(each)
                self.stragglers[each.state.rank] = each

    def _states(self) -> dict[int, RankState]:
        faults = more_faults(self._faults, self._platform.faults())
        of_device = dict(enumerate(faults.get(uuid, {}) for uuid in self._faults))
        states = {rank: device_state(rank, rank, self._devices) for rank in sorted(self._ranks)}
        return {
            rank: replace(self._host.state(state), faults=of_device.get(rank, {}))
            for rank, state in states.items()
        }


def tune_training(
    start: Callable[[], Callable[[], int | None]],
    listener: socket.socket,
    request: TuningRequest,
    *,
    metrics: Metrics | None = None,
    announce: Callable[[str], None],
    report: Callable[[dict[str, float]], None] = lambda metrics: None,
) -> TuningOutcome:
    """Follow a training to its end and tune the clocks of this node's devices meanwhile.

    `start` starts it, once the devices can be read, and returns what returns its exit code, or None
    while it runs. Its ranks connect to `listener`.
    """
    signal, cluster = request.signal(), detect_cluster()
    # An administrator's cluster file has no say here: what may be set is found out.
    platform = platform_of(cluster)
    controlled = replace(cluster, clock_control=True)
    with (
        closing(platform.open_meter(cluster)) as meter,
        _closing(platform.open_governor(controlled, meter.info)) as governor,
        closing(Marks(listener)) as marks,
    ):
        setup = Setup.of(cluster.device.name, meter.info)
        record = Record(request.keep, setup) if request.keep is not None else None
        training = Training(request, meter, marks, announce, report, signal, record)
        if request.earlier is not None:
            training.leave_out(request.earlier, request.earlier.why_not(setup))
        if metrics is not None:
            metrics.begin(meter, platform.facts().devices, request.max_slowdown)
        ranks = RankWatch(meter, platform, lambda found: announce(sentence(found)))
        offered, ended, problem = _offered(training, governor)
        training.begin(reading(meter))
        ends = start()
        follow, live = partial(_follow, ends, marks, ranks, metrics), None
        if not ended:
            live, ended, problem = _tune(training, governor, offered, follow)
        if ended:
            more = " any more" if live is not None and any(live.seconds_at) else ""
            announce(f"not tuned{more}, and the training goes on: {problem}")
        not_restored = _restore(live or governor)
        follow(None)
        code: int | None = None
        while code is None:
            with contextlib.suppress(KeyboardInterrupt):  # the command alone decides on one
                if (code := ends()) is None:
                    time.sleep(0.1)
        return TuningOutcome(
            code,
            request.max_slowdown,
            meter=meter.info,
            ended=ended,
            problem=problem,
            not_restored=not_restored,
            record=training.record.folder if training.record is not None else None,
            limits=kept_limits(request.limits, training.started, meter),
            ranks=tuple(ranks.last.values()),
            stragglers=tuple(ranks.stragglers.values()),
            **(live.facts() if live is not None else {}),
        )


def _offered(training: Training, governor: Governor) -> tuple[list[Offer], Ended, str]:
    info, earlier = training.meter.info, training.request.earlier
    if info.estimated:
        return [], "unmetered", f"its energy is only estimated ({info.source})"
    measured_MHz = earlier.clocks_MHz if earlier is not None else ()
    offered = offers(governor, every=training.signal is not None, measured_MHz=measured_MHz)
    if training.request.knobs:
        offered.append((1.0, [Settings()]))
    if not offered:
        none = "the devices list no clocks and take no power limit"
        return [], "fixed", governor.why_not or none
    if training.signal is not None:
        training.signal.start()
    return offered, "", ""


def _tune(
    training: Training,
    governor: Governor,
    offered: list[Offer],
    follow: Callable[[LiveTuning], tuple[Ended, str]],
) -> tuple[LiveTuning, Ended, str]:
    problem = ""
    for top, settings in offered:
        if problem:
            if len(with_declared(settings, training.request.knobs, training.marks.present)) < 2:
                break  # the script registers none of its knobs
            instead = next(iter(settings[-1]), "what the script registers")
            training.announce(f"{problem}; {instead} is tried instead")
        live = LiveTuning(training, governor, top, settings)
        ended, problem = follow(live)
        if not live.has_given_up or _restore(live):
            break
    return live, ended, problem


def _follow(
    ends: Callable[[], int | None],
    marks: Marks,
    ranks: RankWatch,
    metrics: Metrics | None,
    live: LiveTuning | None,
) -> tuple[Ended, str]:
    try:
        while ends() is None:
            for mark in marks.wait(0.5):
                ranks.take(mark)
                if metrics is not None:
                    metrics.take(mark)
                if live is not None and not mark.ready:
                    live.take(mark)
            ranks.poll(marks.pids)
            if metrics is not None:
                metrics.poll(*((live.tuner, live.clock_MHz) if live is not None else ()))
    except MeterError as error:
        return "meter", str(error)
    except LengthUnknown as error:
        return "length", str(error)
    except (GovernorError, InputError) as error:
        return "refused", str(error)
    except KeyboardInterrupt:  # the command got it, too, and decides what to do
        return "", ""
    except Exception as error:
        return "fault", f"{type(error).__name__}: {error}"
    return "", ""


@contextlib.contextmanager
def _closing(governor: Governor) -> Iterator[Governor]:
    # What it cannot put back ends no training with an error.
    try:
        yield governor
    finally:
        with contextlib.suppress(GovernorError):
            governor.close()


def _restore(subject: Governor | LiveTuning) -> str:
    try:
        subject.restore()
    except (GovernorError, InputError) as error:
        return str(error)
    return ""


def watched(words: Sequence[str], cwd: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command with the hook in front of its script, and its leading variables;
    InputError without a script, or if its launcher starts it on other nodes or by itself.
    """
    Script(shlex.join(words), cwd=cwd).words  # noqa: B018 - refuses a script that does not exist
    script, launcher = read_command(words, cwd)
    prefix, assigned = [sys.executable], {}
    if launcher is not None:
        kind = kind_of(launcher)
        if launcher.nodes > 1 or (kind and (launcher.numbers_tasks or not kind.takes_hook)):
            subject = f"{launcher.nodes} nodes" if launcher.nodes > 1 else launcher.kind
            raise InputError(
                f"--tune cannot tune a job of {subject}: name a plain script, or one started by "
                "torchrun, deepspeed or accelerate on one node"
            )
        assigned = dict(launcher.assigned)
        if launcher.words:
            prefix, script = list(launcher.words), launcher.script
            if prefix[-1] in ("-m", "--module"):
                prefix, script = prefix[:-1], ("-m", *script)
    path = Path(hook.__file__).resolve().parent / "__main__.py"
    return [*prefix, str(path), "watch", *script], assigned


def tune(
    command: Sequence[str],
    request: TuningRequest,
    *,
    metrics: Metrics | None = None,
    announce: Callable[[str], None] = lambda sentence: None,
    output: int | None = None,
    ignored: Collection[int] = (),
) -> TuningOutcome:
    """Run a training command to its end and tune the clocks of this node's devices meanwhile.

    Its standard output goes to the file descriptor `output`, by default this process's own. A
    signal for this process alone is passed on to it, but those that were `ignored` when this
    process started. Raises InputError if the command or the target of power cannot be read.
    """
    words, assigned = watched(command, Path.cwd())
    listener, address, remove = control_socket()
    environ = {**os.environ, **assigned, ADDRESS: address}
    try:
        with Command(words, environ, ignored=ignored, output=output) as running:

            def ended() -> int | None:
                if running.status is None:
                    running.wait(0)
                return running.status

            def start() -> Callable[[], int | None]:
                running.start()
                return ended

            return tune_training(start, listener, request, metrics=metrics, announce=announce)
    finally:
        remove()


def rank_group() -> tuple[int, int, Any]:
    """Return rank, number of ranks, and store; InputError if several have no process group yet."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return dist.get_rank(), dist.get_world_size(), store
    sizes = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    if any(size not in ("", "1") for size in sizes):
        raise InputError(
            "tuner.tuning is entered before its ranks form a process group; enter it after "
            "torch.distributed.init_process_group"
        )
    return 0, 1, None


def publish(store: Any, key: str, address: str) -> None:
    """Send the other ranks the address of a socket on this node."""
    store.set(key, f"{_machine()} {address}")


def published(store: Any, key: str, timeout_s: float) -> str:
    """Return rank 0's address, "" after the timeout; InputError if it is on another node."""
    until = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > until:
            return ""
        time.sleep(0.05)
    machine, _, address = store.get(key).decode().partition(" ")
    if machine != _machine():
        raise InputError("tuner.tuning tunes the ranks of one node, and these are on several")
    return str(address)


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


#: The longest that is waited for the agent at the start and at the end of a block, seconds.
START_S, END_S = 60.0, 40.0
_LOG = logging.getLogger("tuner.online")


@dataclass
class TunedBlock:
    """Training in a block, as its agent reports it; nothing is known on ranks other than 0.

    Attributes:
        metrics: latest step time, power, clock, saving and slowdown, with units in their names.
        outcome: what was saved, at which slowdown, with intervals; None until the block ends.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    outcome: TuningOutcome | None = None


class _Agent:
    # The agent's process, as rank 0 sees it.
    def __init__(self, block: TunedBlock, request: TuningRequest) -> None:
        self._block, self._max_slowdown = block, request.max_slowdown
        self.ready, self._closing = threading.Event(), False  # it reads the devices, or has ended
        listener, self.address, self._remove = control_socket()
        self._link, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            # -P: the working folder must not shadow our modules. A session of its own: an interrupt
            # is the program's.
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(listener.fileno())],
            pass_fds=[theirs.fileno(), listener.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        theirs.close()
        listener.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with contextlib.suppress(OSError):
            self._link.send((request, os.getpid(), self.address))

    def _read(self) -> None:
        try:
            while self._block.outcome is None:
                message = self._link.recv()
                if isinstance(message, str):
                    _LOG.warning("tuner: %s", message)
                elif isinstance(message, TuningOutcome):
                    self._block.outcome = message
                else:
                    self._block.metrics = message
                    self.ready.set()
        except Exception:  # it ended, within a message or between two
            if not self._closing:
                _LOG.warning("tuner: the agent ended; the training goes on untuned")
        self.ready.set()

    def close(self, code: int) -> None:
        """End the agent, and keep its report; `code` is 1 if the block failed, else 0."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._link.send(code)
        self._reader.join(END_S)
        if self._reader.is_alive():
            self._process.kill()  # its guard restores the clocks
        ended = self._process.wait()
        self._reader.join()
        self._link.close()
        self._remove()
        why = f"the agent ended with exit code {ended}"
        untold = TuningOutcome(code, self._max_slowdown, ended="fault", problem=why)
        self._block.outcome = self._block.outcome or untold


def _agent(link: Connection[Any, Any], listener: socket.socket) -> None:
    request, parent, address = link.recv()
    codes: list[int] = []

    def send(message: str | dict[str, float] | TuningOutcome) -> None:
        with contextlib.suppress(OSError):  # the program is gone
            link.send(message)

    def ends() -> int | None:
        try:
            if not codes and link.poll():
                codes.append(link.recv())
        except (OSError, EOFError):
            codes.append(1)
        # Workers of the program may hold the other end open.
        return codes[0] if codes else 1 if os.getppid() != parent else None

    def start() -> Callable[[], int | None]:
        send({})  # lets the block begin
        return ends

    try:
        send(tune_training(start, listener, request, announce=send, report=send))
    finally:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


_blocks = 0
_open = False


@contextlib.contextmanager
def tuning(**options: Unpack[TuningOptions]) -> Iterator[TunedBlock]:
    """Tune the clocks of this node's GPUs while a block of this program trains.

    The block's optimizer steps are seen without changes to it. At its end, or if this process or
    the agent dies, the clocks are as before. Where nothing can be tuned, the block runs untuned,
    and the outcome says why. Of several ranks, each enters the block, after their process group
    was made; rank 0 has the outcome.

    Examples:
        ```python
        with tuner.tuning(max_slowdown=0.05) as run:
            trainer.train()
        print(run.outcome.balance.saved_J)
        ```

    Args:
        options: `max_slowdown` (default: 0.05), or `deadline_s` and `budget_kJ` of the block, or
            `power_cap_W`; or as quantities with a unit (`deadline="8h"`). `steps`: number of the
            block's optimizer steps, if its framework does not say it. `follow_power`: a file, an
            address, or watts. `transfer`: the folder of a study or an earlier tuned training, to
            begin with; `keep`: where what is learned is kept, with a number added.

    Raises:
        InputError: the options contradict each other or cannot be read, a block is open already,
            or the ranks have no process group or are on several nodes.
    """
    global _blocks, _open
    request = TuningRequest.of(options)
    request.signal()  # which is read here first, where an error can be seen
    if _open:
        raise InputError("a block of tuner.tuning is open already; leave it first")
    rank, ranks, store = rank_group()
    owner, key = os.getpid(), f"joulefront/tuning/{_blocks}"
    _blocks += 1
    outer = sys.modules.get("joulefront_hook")
    if outer is not None and outer.state.link is not None:  # in a probe or `tuner run --tune`
        problem = "the program runs under tuner already"
        outcome = TuningOutcome(0, request.max_slowdown, ended="fixed", problem=problem)
        yield TunedBlock(outcome=outcome)
        return
    block = TunedBlock()
    agent, code = _Agent(block, request) if rank == 0 else None, 1
    try:
        _open = True
        if agent is not None:
            agent.ready.wait(START_S)
            if ranks > 1:
                publish(store, key, agent.address)
        online_marks.begin(agent.address if agent else published(store, key, START_S), rank)
        yield block
        code = 0
    finally:
        if os.getpid() == owner:  # a forked worker may unwind through here
            _open = False
            online_marks.end()
            if agent is not None:
                agent.close(code)


if __name__ == "__main__":
    _agent(Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
