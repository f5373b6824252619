"""Tuning of one running training: marks in, settings out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tuner.online.bandit import OnlineTuner
from tuner.online.follow import LimitTuner, PowerFollower, Signal, run_limits
from tuner.online.request import TuningRequest
from tuner.online.settings import (
    EarlierMeasurements,
    Record,
    log_slowest,
    mean_value,
    stage_settings,
    stage_shares,
    with_declared,
)
from tuner.online.windows import Chunk, Mark, Marks
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.node.clocks.base import (
    Governor,
    GovernorError,
    KnobRefused,
    UnsupportedKnob,
)
from tuner.workload.node.meters import Meter, Reading
from tuner.workload.node.probe_run import apply_live
from tuner.workload.records.probe import SAME_CLOCK_MHZ, UnappliedSetting

#: Steps after the start that belong to no chunk: compilation and caches.
WARM_STEPS = 5
#: Least time between two readings of the meter, seconds.
CHUNK_S = 1.0
#: Refused settings after which the tuning ends.
REFUSALS = 3
#: What is said of a job in short phases, and of devices whose clock is unknown.
RESTLESS = "step time changes too often to compare settings: the highest is kept until it is steady"
UNREAD = "the clock cannot be read back, so that a setting that is not in force goes unnoticed"


@dataclass
class Training:
    """Running training with its tuner and its meter."""

    request: TuningRequest  # without what turned out not to be of this training
    meter: Meter
    marks: Marks
    announce: Callable[[str], None]
    # receives metrics after each chunk of steps, with units in their names.
    report: Callable[[dict[str, float]], None] = lambda metrics: None
    signal: Signal | None = None
    record: Record | None = None
    started: Reading | None = None  # of the meter as the command started

    def leave_out(self, earlier: EarlierMeasurements, why: str) -> None:
        """Continue without earlier measurements if there is a reason, and announce it."""
        if why:
            self.announce(f"{earlier.name} is not used: {why}")
            self.request = replace(self.request, earlier=None)

    def keep_knobs(self, knobs: Sequence[Knob]) -> None:
        """Leave out every declared knob but these."""
        self.request = replace(self.request, knobs=tuple(knobs))

    def begin(self, started: Reading | None) -> None:
        """Note the meter's reading as the command starts; None if it failed."""
        self.started = started

    def stop_recording(self) -> None:
        """Keep nothing more for the next run."""
        self.record = None


class LiveTuning:
    """Tuning of a training by one kind of live setting, whose value is `top` on the machine as it
    is, which is the first of the settings."""

    def __init__(
        self, training: Training, governor: Governor, top: float, settings: Sequence[Settings]
    ) -> None:
        self._training, self._governor, self._announce = training, governor, training.announce
        self._knob, self._top = next(iter(settings[-1]), ""), top
        self.refused: list[str] = []
        self.unsupported = False
        self._notified: dict[str, str] = {}
        self._ranks: set[int] = set()
        self._busy_s: dict[int, list[float]] = {}
        self._opened: tuple[Mark, Reading] | None = None
        self._in_force, self._unchecked = 0, False
        self._choose_from(settings)

    def _notify_about(self, about: str, sentence: str) -> None:
        # Unless the same was the last of its kind.
        if sentence and sentence != self._notified.get(about):
            self._announce(sentence)
        self._notified[about] = sentence

    def _choose_from(self, plain: Sequence[Settings]) -> None:
        training, knobs = self._training, self._training.request.knobs
        self._plain, self.settings = plain, with_declared(plain, knobs, training.marks.present)
        values = [setting.get(self._knob, self._top) for setting in self.settings]
        self._values = [mean_value(value) for value in values]
        self.seconds_at = [0.0] * len(values)
        given: dict[str, Any] = {
            "x": [log_slowest(value, self._top) for value in values],
            "stepwise": self._knob != "clock_MHz",
        }
        if training.request.earlier is not None:
            top_MHz = self._top if self._knob == "clock_MHz" else 0.0
            given["studied"] = training.request.earlier.studied(self.settings, top_MHz)
        if knobs:
            given["declared"] = [tuple(s.get(knob.name) for knob in knobs) for s in self.settings]
        limits, most = run_limits(training.request.limits), training.request.max_slowdown
        self.tuner: OnlineTuner
        if training.signal is not None:
            self.tuner = PowerFollower(max_slowdown=most, **given)
        elif limits is not None:
            self.tuner = LimitTuner(limits=limits, **given)
        else:
            self.tuner = OnlineTuner(max_slowdown=most or 0.0, **given)

    def _lower_stages(self) -> None:
        shares = stage_shares(self._busy_s) if self._busy_s.keys() == self._ranks else ()
        if not shares or self._knob != "clock_MHz" or self._training.signal is not None:
            return
        settings = stage_settings(self._plain, shares, self._governor.supported_clocks_MHz)
        work = ", ".join(f"{100 * share:.0f}" for share in shares) + " %"
        try:
            self._governor.apply(settings[1], ranks=len(self._ranks))
            self._governor.restore()
        except UnsupportedKnob as error:
            self._give_up(str(error))
        except (GovernorError, InputError) as error:
            self._announce(f"the ranks keep one clock, although they compute for {work}: {error}")
            return
        self._announce(
            f"the ranks compute for {work} of the slowest's time; so are their clocks set"
        )
        self._choose_from(settings)

    @property
    def has_given_up(self) -> bool:
        """True if the devices took no value of its knob, or refused several."""
        return self.unsupported or len(self.refused) >= REFUSALS

    @property
    def clock_MHz(self) -> float:
        """Clock that is set, the highest if none is; NaN if limits are set instead."""
        return self._values[self._in_force] if self._knob == "clock_MHz" else math.nan

    def _open(self, mark: Mark) -> None:
        if mark.busy_s:
            self._busy_s.setdefault(mark.rank, []).append(mark.busy_s)
        late = self._busy_s and self._ranks - self._busy_s.keys() and mark.step < 4 * WARM_STEPS
        if mark.step <= WARM_STEPS or late:
            return
        training, marks = self._training, self._training.marks
        if (earlier := training.request.earlier) is not None:
            now = replace(earlier.setup, ranks=len(self._ranks))
            training.leave_out(earlier, earlier.why_not(now))
        knobs = training.request.knobs
        present = tuple(each for each in knobs if each.name in marks.present)
        for knob in knobs:
            if knob not in present:
                self._announce(f"the script registers no live knob {knob.name!r} in its first step")
        training.keep_knobs(present)
        self._choose_from(self._plain)  # with what is known by now
        self._lower_stages()
        self._opened = mark, training.meter.read()
        if isinstance(self.tuner, LimitTuner):
            steps = training.request.steps or marks.length
            self.tuner.begin(mark, self._opened[1], training.started or self._opened[1], steps)

    def take(self, mark: Mark) -> None:
        """Take in a step's end; may set another clock. Raises MeterError or GovernorError if the
        devices cannot be metered or put back any more."""
        training = self._training
        self._ranks.add(mark.rank)
        if self._opened is None:
            self._open(mark)
        if self._opened is None or mark.rank != self._opened[0].rank:
            return
        first, before = self._opened
        least_s = max(CHUNK_S, 5 * training.meter.resolution_s)
        seconds, steps = mark.time_s - first.time_s, mark.step - first.step
        if seconds < least_s or steps < 1:
            return
        now = training.meter.read()
        if now.time_s <= before.time_s:
            return
        if foreign := self._governor.foreign():
            # What ran under two settings is no measurement of either.
            self._opened = mark, now
            for sentence in foreign:
                self._announce(sentence)
            if self._in_force:
                self._set(self._in_force)
            return
        # Marks arrive a little after their time: the power of the meter's span is the steps'.
        energy_J = (now.energy_J - before.energy_J) * seconds / (now.time_s - before.time_s)
        self._opened = mark, now
        self.seconds_at[self._in_force] += seconds
        self._check()
        noticed, ran_at = len(self.tuner.changes), self._in_force
        if training.signal is not None:
            self._request_setting(training.signal)
        decision = self.tuner.add(Chunk(steps, seconds, energy_J))
        self._keep(ran_at)
        balance = self.tuner.balance
        training.report(
            {
                "joulefront/step_time_s": seconds / steps,
                "joulefront/power_W": energy_J / seconds,
                f"joulefront/{self._knob or 'setting'}": self._values[ran_at],
                "joulefront/saved_kJ": balance.saved_J[1] / 1000,
                "joulefront/slowdown": balance.slowdown[1],
            }
        )
        if isinstance(self.tuner, LimitTuner) and (missed := self.tuner.missed):
            self._notify_about(missed, missed)
        # One that follows power does not measure again.
        for change in self.tuner.changes[noticed:] if training.signal is None else ():
            changed = (
                f"{change.quantity} changed by {100 * change.relative:+.0f} % at step "
                f"{mark.step}; measuring again from the highest setting"
            )
            self._notify_about("changes", RESTLESS if self.tuner.restless else changed)
        if decision.setting != self._in_force:
            self._set(decision.setting)

    def _keep(self, setting: int) -> None:
        training, window, unlike = self._training, self.tuner.window, self.tuner.unlike
        if window is None:
            return
        if (earlier := training.request.earlier) is not None and unlike is not None:
            live = self.settings[setting].short if setting else "the highest setting"
            apart = f"{unlike.quantity} at {live} differs by {100 * unlike.relative:+.0f} %"
            training.leave_out(earlier, apart)
        if training.record is not None:
            epoch, ranks = len(self.tuner.changes), len(self._ranks)
            try:
                training.record.add(self.settings[setting], window, epoch=epoch, ranks=ranks)
            except OSError as error:
                training.stop_recording()
                self._announce(f"what is learned is not kept for the next run: {error}")

    def _request_setting(self, signal: Signal) -> None:
        assert isinstance(self.tuner, PowerFollower)
        target_W = self.tuner.target_W
        self.tuner.follow(signal.target_W)
        self._notify_about("signal", signal.problem)
        if target_W is not None and (unmet := self.tuner.unmet):
            # Once for each target, however often it comes to that.
            sentence = f"{target_W:g} W {unmet}"
            self._notify_about(sentence, sentence)

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
        given = self._training.marks.set_live, self._training.request.knobs, self.settings[setting]
        # GPUs that no rank uses are left alone.
        done = apply_live(self._governor, *given, ranks=len(self._ranks))
        if isinstance(done, UnappliedSetting):
            if self._knob in done.unsupported:
                self._give_up(done.message)
            raise KnobRefused(done.message)

    def _give_up(self, why: str) -> NoReturn:
        self.unsupported = True
        raise GovernorError(why)

    def _set(self, setting: int) -> None:
        try:
            self._apply(setting)
        except (GovernorError, InputError) as error:
            if self.unsupported:
                raise
            self._refuse(setting, str(error), by_device=not isinstance(error, KnobRefused))
            return
        # A limit is read back as it is set.
        self._in_force, self._unchecked = setting, setting > 0 and self._knob == "clock_MHz"

    def _check(self) -> None:
        # Once after a switch: the devices do not run faster than they were set.
        if not self._unchecked:
            return
        self._unchecked = False
        delivered = self._governor.delivered().get("clock_MHz")
        if delivered is None:
            self._notify_about(UNREAD, UNREAD)
        elif delivered > self._values[self._in_force] + 2 * SAME_CLOCK_MHZ:
            reads = f"{self.settings[self._in_force].short} reads back as {delivered:.0f} MHz"
            self._refuse(self._in_force, reads)

    def restore(self) -> None:
        """Restore the earlier settings: by the devices, by commands, and by the program."""
        self._in_force, self._unchecked = 0, False
        self._governor.restore()
        if self.settings[0]:
            self._apply(0)

    def _refuse(self, setting: int, why: str, *, by_device: bool = True) -> None:
        self.refused += [why] if by_device else []
        self._announce(f"{why}; the setting is not tried again")
        self.tuner.bar(setting)
        self.restore()
        if self.has_given_up:
            raise GovernorError(f"{len(self.refused)} settings were refused, the last: {why}")
