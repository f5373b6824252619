"""The agent that tunes a training while it runs: a command, or a block of a program.

A command is started once and left alone: its ranks send the ends of their steps
(`tuner.workload.hook.watch`) and wait for nothing. The agent reads the meter, asks the bandit
(`tuner.online.bandit`) for the next setting and puts it in force by the governor, whose guard
restores the clocks if the agent dies. Whatever fails here ends the tuning and not the training.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.online.bandit import OnlineTuner
from tuner.online.earlier import Record, Setup
from tuner.online.follow import UNMET, PowerFollower
from tuner.online.limits import MISSED, LengthUnknown, LimitTuner, kept_limits, reading, run_limits
from tuner.online.marks import Mark, Marks
from tuner.online.metrics import Metrics
from tuner.online.outcome import Ended, TuningOutcome
from tuner.online.ranks import RankWatch
from tuner.online.request import TuningRequest
from tuner.online.settings import offers, with_declared
from tuner.online.signal import Signal
from tuner.online.stages import log_slowest, mean_value, stage_settings, stage_shares
from tuner.online.windows import Chunk
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.clocks.base import Governor, GovernorError, KnobRefused
from tuner.workload.clocks.commands import CommandGovernor
from tuner.workload.measure.stragglers import sentence
from tuner.workload.meters import Meter, MeterError, Reading
from tuner.workload.node.live_settings import apply_live
from tuner.workload.node.machine import detect_cluster
from tuner.workload.platforms import platform_of
from tuner.workload.probe import SAME_CLOCK_MHZ, NotApplied

#: Steps after the start that belong to no chunk: compilation and caches.
WARM_STEPS = 5
#: Least time between two readings of the meter, a window and settling after a switch, seconds.
CHUNK_S, WINDOW_S, SETTLE_S = 1.0, 8.0, 2.0
#: Refused settings after which the tuning ends.
REFUSALS = 3
#: What is said of devices whose clock is unknown.
UNREAD = "the clock cannot be read back, so that a setting that is not in force goes unnoticed"


class LiveTuning:
    """Tuning of one running training: marks in, settings out.

    Args:
        settings: the machine as it is, then the live settings to choose from.
        top: value of the settings' knob on the machine as it is.
        started: the meter as the command started; None if it could not be read.
        marks: of the ranks, which set the program's live knobs.
        say: receives a sentence for each thing worth one.
        report: receives metrics after each chunk of steps, with units in their names.
    """

    def __init__(
        self,
        governor: Governor,
        meter: Meter,
        settings: Sequence[Settings],
        top: float,
        request: TuningRequest,
        *,
        say: Callable[[str], None],
        signal: Signal | None = None,
        record: Record | None = None,
        started: Reading | None = None,
        marks: Marks | None = None,
        report: Callable[[dict[str, float]], None] = lambda metrics: None,
    ) -> None:
        self._knob, self._top = next(iter(settings[-1]), ""), top
        limits, most = run_limits(request.limits), request.max_slowdown
        self._kind: Callable[..., OnlineTuner]
        if signal is not None:
            self._kind = partial(PowerFollower, budget=most)
        elif limits is not None:
            self._kind = partial(LimitTuner, limits=limits)
        else:
            self._kind = partial(OnlineTuner, max_slowdown=most or 0.0)
        self._governor, self._meter, self._signal, self._say = governor, meter, signal, say
        self._earlier, self._record, self._report = request.earlier, record, report
        self._request, self._started, self._marks = request, started, marks
        self._said: dict[str, str] = {}
        self._choose_from(settings)
        self.refused: list[str] = []
        self._ranks: set[int] = set()
        self._busy_s: dict[int, list[float]] = {}
        self._opened: tuple[Mark, Reading] | None = None
        self._in_force, self._unchecked = 0, False

    def _tell(self, about: str, what: str, sentence: str) -> None:
        """Say a sentence, unless the same was the last of its kind."""
        if what and what != self._said.get(about):
            self._say(sentence)
        self._said[about] = what

    def _choose_from(self, plain: Sequence[Settings]) -> None:
        """Begin with these settings and all declared knobs, of which nothing is measured yet."""
        knobs = self._request.knobs
        present = self._marks.present if self._marks is not None else {}
        self._plain, settings = plain, with_declared(plain, knobs, present)
        values = [setting.get(self._knob, self._top) for setting in settings]
        self.settings, self._values = settings, [mean_value(value) for value in values]
        given: dict[str, Any] = {"window_s": WINDOW_S, "settle_s": SETTLE_S}
        if self._earlier is not None and self._signal is None:
            top_MHz = self._top if self._knob == "clock_MHz" else 0.0
            given["studied"] = self._earlier.studied(settings, top_MHz)
        if knobs:
            given["declared"] = [tuple(s.get(knob.name) for knob in knobs) for s in settings]
        self.tuner = self._kind([log_slowest(value, self._top) for value in values], **given)
        self.tuner.stepwise = self._knob != "clock_MHz"
        self.seconds_at = [0.0] * len(settings)

    def _lower_stages(self) -> None:
        """Choose from clocks by stage, if stages of a pipeline have slack and take their own."""
        shares = stage_shares(self._busy_s) if self._busy_s.keys() == self._ranks else ()
        if not shares or self._knob != "clock_MHz" or self._signal is not None:
            return
        settings = stage_settings(self._plain, shares, self._governor.supported_clocks_MHz)
        work = ", ".join(f"{100 * share:.0f}" for share in shares) + " %"
        try:
            self._governor.apply(settings[1], ranks=len(self._ranks))
            self._governor.restore()
        except (GovernorError, InputError) as error:
            self._say(f"the ranks keep one clock, although they compute for {work}: {error}")
            return
        self._say(f"the ranks compute for {work} of the slowest's time; so are their clocks set")
        self._choose_from(settings)

    @property
    def clock_MHz(self) -> float:
        """Clock that is set, the highest if none is; NaN if limits are set instead."""
        return self._values[self._in_force] if self._knob == "clock_MHz" else math.nan

    def _open(self, mark: Mark) -> None:
        """Begin to measure with the first mark after the warm-up."""
        if mark.busy_s:
            self._busy_s.setdefault(mark.rank, []).append(mark.busy_s)
        late = self._busy_s and self._ranks - self._busy_s.keys() and mark.step < 4 * WARM_STEPS
        if mark.step <= WARM_STEPS or late:
            return
        setup = self._earlier and replace(self._earlier.setup, ranks=len(self._ranks))
        if self._earlier is not None and setup and (why := self._earlier.why_not(setup)):
            self._earlier = None
            self._say(why)
        knobs, present = self._request.knobs, self._marks.present if self._marks else {}
        for knob in knobs:
            if knob.by_script and knob.name not in present:
                self._say(f"the script registers no live knob {knob.name!r} in its first step")
                knobs = tuple(each for each in knobs if each is not knob)
        self._request = replace(self._request, knobs=knobs)
        self._choose_from(self._plain)  # with what is known by now
        self._lower_stages()
        self._opened = mark, self._meter.read()
        if isinstance(self.tuner, LimitTuner):
            now = self._opened[1]
            stated = self._marks.length if self._marks is not None else None
            self.tuner.begin(mark, now, self._started or now, self._request.steps or stated)

    def take(self, mark: Mark) -> None:
        """Take in a step's end; may set another clock.

        Raises:
            MeterError, GovernorError: the devices cannot be metered or put back any more.
        """
        self._ranks.add(mark.rank)
        if self._opened is None:
            self._open(mark)
        if self._opened is None or mark.rank != self._opened[0].rank:
            return
        first, before = self._opened
        least_s = max(CHUNK_S, 5 * self._meter.resolution_s)
        seconds, steps = mark.time_s - first.time_s, mark.step - first.step
        if seconds < least_s or steps < 1:
            return
        now = self._meter.read()
        if now.time_s <= before.time_s:
            return
        # Marks arrive a little after their time: the power of the meter's span is the steps'.
        energy_J = (now.energy_J - before.energy_J) * seconds / (now.time_s - before.time_s)
        self._opened = mark, now
        self.seconds_at[self._in_force] += seconds
        self._check()
        noticed, ran_at = len(self.tuner.changes), self._in_force
        if self._signal is not None:
            self._ask(self._signal)
        decision = self.tuner.add(Chunk(steps, seconds, energy_J))
        self._keep(ran_at)
        self._report(
            {
                "joulefront/step_time_s": seconds / steps,
                "joulefront/power_W": energy_J / seconds,
                f"joulefront/{self._knob or 'setting'}": self._values[ran_at],
                "joulefront/saved_kJ": self.tuner.balance.saved_J[1] / 1000,
                "joulefront/slowdown": self.tuner.balance.slowdown[1],
            }
        )
        if isinstance(self.tuner, LimitTuner) and (missed := self.tuner.missed):
            self._tell("limits", missed, MISSED[missed])
        # One that follows power does not measure again.
        for change in self.tuner.changes[noticed:] if self._signal is None else ():
            self._say(
                f"{change.quantity} changed by {100 * change.relative:+.0f} % at step "
                f"{mark.step}; measuring again from the highest setting"
            )
        if decision.setting != self._in_force:
            self._set(decision.setting)

    def _keep(self, setting: int) -> None:
        """Record the window that ended, and say once why earlier measurements are not used."""
        earlier, window, unlike = self._earlier, self.tuner.window, self.tuner.unlike
        if window is None:
            return
        if earlier is not None and unlike is not None:
            self._earlier = None
            live = self.settings[setting].short if setting else "the highest setting"
            apart = f"{unlike.quantity} at {live} differs by {100 * unlike.relative:+.0f} %"
            self._say(f"{earlier.name} is not used: {apart}")
        if self._record is not None:
            epoch, ranks = len(self.tuner.changes), len(self._ranks)
            try:
                self._record.add(self.settings[setting], window, epoch=epoch, ranks=ranks)
            except OSError as error:
                self._record = None
                self._say(f"what is learned is not kept for the next run: {error}")

    def _ask(self, signal: Signal) -> None:
        """Hand the target on, and say once what is wrong with it."""
        assert isinstance(self.tuner, PowerFollower)
        self.tuner.target_W, target_W = signal.target_W, self.tuner.target_W
        self._tell("signal", signal.problem, signal.problem)
        if target_W is not None:
            unmet = self.tuner.unmet
            self._tell("target", unmet, f"{target_W:g} W {UNMET.get(unmet, '')}")

    def facts(self) -> dict[str, Any]:
        """Return the fields of the outcome that it knows."""
        tuner = self.tuner
        return {
            "settings": ("", *(setting.short for setting in self.settings[1:])),
            "steps": tuner.steps,
            "seconds_at": tuple(self.seconds_at),
            "relative": tuple(tuner.relative()),
            "balance": tuner.balance,
            "stalled_s": tuner.stalled_s,
            "changes": tuple(tuner.changes),
            "periods": tuple(tuner.periods) if isinstance(tuner, PowerFollower) else (),
        }

    def _apply(self, setting: int) -> None:
        """Put a setting in force, or raise an error: of a device, a command or the program."""
        set_live = self._marks.set_live if self._marks is not None else lambda values: []
        # GPUs that no rank uses are left alone.
        given = self._governor, set_live, self._request.knobs, self.settings[setting]
        done = apply_live(*given, ranks=len(self._ranks))
        if isinstance(done, NotApplied):
            raise KnobRefused(done.message)

    def _set(self, setting: int) -> None:
        try:
            self._apply(setting)
        except (GovernorError, InputError) as error:
            self._refuse(setting, str(error), by_device=not isinstance(error, KnobRefused))
            return
        # A limit is read back as it is set.
        self._in_force, self._unchecked = setting, setting > 0 and self._knob == "clock_MHz"

    def _check(self) -> None:
        """Read back, once after a switch, that the devices do not run faster than they were set."""
        if not self._unchecked:
            return
        self._unchecked = False
        wanted = self._values[self._in_force]
        delivered = self._governor.delivered().get("clock_MHz")
        if delivered is None:
            self._tell("clock", UNREAD, UNREAD)
        elif delivered > wanted + 2 * SAME_CLOCK_MHZ:
            reads = f"{self.settings[self._in_force].short} reads back as {delivered:.0f} MHz"
            self._refuse(self._in_force, reads)

    def restore(self) -> None:
        """Put back what stood before: by the devices, by commands, and by the program."""
        self._in_force, self._unchecked = 0, False
        self._governor.restore()
        if self.settings[0]:
            self._apply(0)

    def _refuse(self, setting: int, why: str, *, by_device: bool = True) -> None:
        self.refused += [why] if by_device else []
        self._say(f"{why}; the setting is not tried again")
        self.tuner.bar(setting)
        self.restore()
        if len(self.refused) >= REFUSALS:
            raise GovernorError(f"{len(self.refused)} settings were refused, the last: {why}")


def tune_training(
    start: Callable[[], Callable[[], int | None]],
    listener: socket.socket,
    request: TuningRequest,
    *,
    metrics: Metrics | None = None,
    say: Callable[[str], None],
    report: Callable[[dict[str, float]], None] = lambda metrics: None,
) -> TuningOutcome:
    """Follow a training to its end and tune the clocks of this node's devices meanwhile.

    Args:
        start: starts the training, once the devices can be read; returns what returns its exit
            code, or None while it runs.
        listener: where its ranks connect.
    """
    signal, cluster = request.signal(), detect_cluster()
    # An administrator's cluster file has no say here: what may be set is found out.
    platform = platform_of(cluster)
    devices = platform.open_governor(replace(cluster, clock_control=True))
    commands = [knob for knob in request.knobs if knob.set]
    governor = CommandGovernor(devices, commands, Path.cwd()) if commands else devices
    with _closing(governor), closing(platform.open_meter(cluster)) as meter:
        setup, earlier = Setup.of(cluster.device.name, meter.info), request.earlier
        if earlier is not None and (why := earlier.why_not(setup)):
            say(why)
            request, earlier = replace(request, earlier=None), None
        record = Record(request.keep, setup) if request.keep is not None else None
        measured_MHz = earlier.clocks_MHz if earlier is not None else ()
        offered = offers(governor, every=signal is not None, measured_MHz=measured_MHz)
        if request.knobs and not offered:
            offered = [(1.0, [Settings()])]
        ended: Ended = "unmetered" if meter.info.estimated else ""
        problem = f"its energy is only estimated ({meter.info.source})" if ended else ""
        if not ended and not offered:
            none = "the devices list no clocks and take no power limit"
            ended, problem = "fixed", governor.why_not or none
        marks = Marks(listener)
        if metrics is None:
            metrics = Metrics()  # which publishes nothing before it begins
        else:
            metrics.begin(meter, platform.facts().devices, request.max_slowdown)
        ranks = RankWatch(meter, platform, lambda found: say(sentence(found)))
        live = None
        try:
            started, ends = reading(meter), start()
            if signal is not None and not ended:
                signal.start()
            for top, settings in offered if not ended else ():
                live = LiveTuning(
                    *(governor, meter, settings, top, request),
                    say=say,
                    signal=signal,
                    record=record,
                    started=started,
                    marks=marks,
                    report=report,
                )
                ended, problem = _follow(ends, marks, ranks, metrics, live)
                if len(live.refused) < REFUSALS or _restore(live):
                    break
            if ended:
                tuned = "not tuned" if live is None else "not tuned any more"
                say(f"{tuned}, and the training goes on: {problem}")
            not_restored = _restore(live or governor)
            _follow(ends, marks, ranks, metrics, None)
            code = _wait(ends)
            kept = kept_limits(request.limits, started, meter)
        finally:
            if signal is not None:
                signal.close()
            marks.close()
    return TuningOutcome(
        code,
        request.max_slowdown,
        meter=meter.info,
        ended=ended,
        problem=problem,
        not_restored=not_restored,
        record=record.folder if record is not None else None,
        limits=kept,
        ranks=tuple(ranks.last.values()),
        stragglers=tuple(ranks.stragglers.values()),
        **(live.facts() if live is not None else {}),
    )


def _follow(
    ends: Callable[[], int | None],
    marks: Marks,
    ranks: RankWatch,
    metrics: Metrics,
    live: LiveTuning | None,
) -> tuple[Ended, str]:
    """Watch the ranks until the command ends, and tune; return why it was not tuned to its end."""
    try:
        while ends() is None:
            for mark in marks.wait(0.5):
                ranks.take(mark)
                metrics.take(mark)
                if live is not None and not mark.ready:
                    live.take(mark)
            ranks.look(marks.pids)
            metrics.look(*((live.tuner, live.clock_MHz) if live is not None else ()))
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
def _closing(governor: Governor) -> Iterator[None]:
    """Close a governor at the end; what it cannot put back ends no training with an error."""
    try:
        yield
    finally:
        with contextlib.suppress(GovernorError):
            governor.close()


def _restore(what: Governor | LiveTuning) -> str:
    try:
        what.restore()
    except (GovernorError, InputError) as error:
        return str(error)
    return ""


def _wait(ends: Callable[[], int | None]) -> int:
    """Wait for the end of the command, which alone decides on an interrupt."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            if (code := ends()) is not None:
                return code
            time.sleep(0.1)
