"""The agent that tunes a training while it runs: a command, or a block of a program.

A command is started once and left alone: its ranks send the ends of their steps
(`tuner.workload.hook.watch`) and wait for nothing. The agent reads the meter, asks the bandit
(`tuner.online.bandit`) for the next setting and puts it in force by the governor, whose guard
restores the clocks if the agent dies. Whatever fails here ends the tuning and not the training.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from tuner.online.earlier_measurements import Record, Setup
from tuner.online.follow import LengthUnknown, kept_limits, reading
from tuner.online.live import REFUSALS, LiveTuning, Training
from tuner.online.marks import Mark, Marks
from tuner.online.metrics import Metrics
from tuner.online.request import Ended, TuningOutcome, TuningRequest
from tuner.online.settings import Offer, offers
from tuner.receipt.measure import Command
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload import hook
from tuner.workload.hook.watch import ADDRESS
from tuner.workload.node.clocks.base import Governor, GovernorError
from tuner.workload.node.device_watch import more_faults
from tuner.workload.node.machine import detect_cluster
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
from tuner.workload.node.meters import Meter, MeterError
from tuner.workload.node.meters.base import device_states
from tuner.workload.node.platforms import platform_of
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
    if training.request.knobs and not offered:
        offered = [(1.0, [Settings()])]
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
    for top, settings in offered:
        live = LiveTuning(training, governor, top, settings)
        ended, problem = follow(live)
        if len(live.refused) < REFUSALS or _restore(live):
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
