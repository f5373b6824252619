"""One window: from boundary to boundary, whole optimizer steps, time and energy of the same span.

The ranks run freely between two boundaries that the `Conductor` names; at a boundary every rank has
finished its device's work and waits, so what the counters read belongs to the steps in between and
to nothing else. When a window closes is decided in `tuner.workload.node.measure.statistics`.

Between two launches and during one, the devices themselves are watched: idle power, damage, other
processes. CUDA reports a damaged GPU by errors that programs cause, too ("illegal memory access"),
so that its sentence alone would blame the configuration: a probe that fails while a counter of
damage moves has failed by the node.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.node.measure.statistics import (
    Reached,
    Window,
    beaten_by,
    compilation_s,
    missing_s,
    seconds_a_step,
    within,
)
from tuner.workload.node.measure.stragglers import Arrivals
from tuner.workload.node.meters.base import Meter, MeterError, Reading
from tuner.workload.node.platforms.base import Counters, Platform
from tuner.workload.node.rank_group import Ranks
from tuner.workload.node.rank_messages import Event
from tuner.workload.records.probe import (
    FAILURES,
    WITHOUT_A_STEP,
    Failure,
    PowerSample,
    ProbeLimits,
    WindowPolicy,
    shown_by,
)

#: A training that ends by itself within this time, seconds, is over before a search could repay
#: itself: one probe takes about as long, and a search makes several.
SHORT_TRAINING_S = 60.0
#: Windows of one setting that are discarded because of a compilation; the next one counts, flagged.
COMPILED_WINDOWS = 2
#: Warm-up is judged by blocks of whole steps this long (a step where steps are longer), ...
WARM_BLOCK_S = 0.2
#: ... of which neighbours must agree so far. Recorded runs lie within 2 % of their mean after two
#: steps (p95 of 13,303 iterations of the Perseus artifact); see docs/measuring.md.
WARM_SPREAD = 0.03
#: It ends here, stable or not: blocks, and seconds.
WARM_BLOCKS_MAX, WARM_MAX_S = 20, 60.0


@dataclass(frozen=True)
class WarmUp:
    """Steps before the first window; `step_time_s` is the mean of the last block."""

    step_times_s: tuple[float, ...]
    step_time_s: float
    stable: bool


def settled(blocks: Sequence[float]) -> bool:
    """Return True if the step time of blocks has settled.

    Two neighbours agree to `WARM_SPREAD`, or the last four go up and down in turn: what is left is
    then noise and no trend.
    """
    if len(blocks) < 2:
        return False
    if abs(blocks[-1] - blocks[-2]) <= WARM_SPREAD * min(blocks[-2:]):
        return True
    steps = [b - a for a, b in pairwise(blocks[-4:])]
    return len(steps) == 3 and all(a * b < 0 for a, b in pairwise(steps))


def most_steps(policy: WindowPolicy, settings: int, step_time_s: float) -> int:
    """Return how many optimizer steps of this length a probe takes at most, the first included.

    Windows that are measured again are left out.
    """

    def within_s(seconds: float) -> int:
        return max(1, math.ceil(seconds / step_time_s))

    block = within_s(WARM_BLOCK_S)
    warm = min(WARM_BLOCKS_MAX * block, within_s(WARM_MAX_S) + block)
    settling = within_s(policy.settle_s) if policy.settle_s > 0 else 0
    visits = settings + (policy.check_drift and settings > 1)
    return 1 + warm + visits * (settling + max(policy.min_steps, within_s(policy.max_s)) + 1)


class ProbeFailed(Exception):
    """Exception that carries a probe's `Failure` to the code that writes the record."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Conductor:
    """Lead of the ranks of one probe from boundary to boundary.

    `deadline_s` is on CLOCK_MONOTONIC; a step beyond the limits is a hang; `most_steps` returns the
    steps that the probe takes at most, by the time of a step.
    """

    def __init__(
        self,
        group: Ranks,
        *,
        deadline_s: float,
        limits: ProbeLimits | None = None,
        explain_exit: Callable[[int, int], Failure],
        cancelled: Callable[[], bool] = lambda: False,
        most_steps: Callable[[float], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._deadline_s = group, deadline_s
        self._limits, self._explain_exit = limits or ProbeLimits(), explain_exit
        self._cancelled, self._clock = cancelled, clock
        self.done = 0  # steps all ranks have done
        self.peaks: list[Mapping[str, int]] = []
        self.phases: list[tuple[float, str]] = []
        self.arrivals = Arrivals()  # of the ranks, in each step
        self._facts: dict[int, Mapping[str, Any]] = {}  # of each rank, where a launch asks for them
        self._last_at_s = 0.0
        self._first_s, self._latest_s = math.nan, math.nan  # ends of the first and the last step
        self._seen = 0  # the last step of any rank, which may lie before the next boundary
        self._fastest_s = math.inf  # time of a step, the mean between two boundaries
        self._most_steps = most_steps
        self._over = False
        #: True if every rank has ended without an error before it was stopped.
        self.ended_by_itself = False

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of rank 0 about the program, with mean losses and digests of all ranks."""
        digests = [facts.get("first_batch") for facts in self._facts.values()]
        facts = {**self._facts.get(0, {}), "first_batches": digests}
        if "process" in facts:  # of each rank of a command
            seen = [self._facts[rank].get("process") for rank in sorted(self._facts)]
            facts["processes"] = [process for process in seen if process]
        if "groups" in facts:
            of_ranks = [facts.get("groups", ()) for facts in self._facts.values()]
            facts["groups"] = _with_mean_losses(facts["groups"], of_ranks)
        return facts

    @property
    def _step_limit_s(self) -> float:
        return self._limits.step_s if self.done else self._limits.first_step_s

    def first_step(self) -> float:
        """Wait for the first step of all ranks; return its end on CLOCK_MONOTONIC."""
        self._wait_boundary(1)
        return self._last_at_s

    def wait_for_others(self, limit_s: float) -> None:
        """Wait until every process that trains has reported; ProbeFailed if one is not expected."""
        until_s = self._clock() + limit_s
        while self._group.expects_more() and self._clock() < until_s:
            event = self._group.next_event(0.1)
            if event is not None and not self._noted(event) and event.kind == "fail":
                raise ProbeFailed(self._explain(event))

    def require_one_training(self, limit_s: float) -> None:
        """Raise ProbeFailed if another training follows the one that has ended by itself."""
        if second := self._group.second_training(limit_s):
            raise ProbeFailed(Failure("refused", second))

    def run(self, steps: int) -> tuple[float, ...]:
        """Run `steps` more steps on all ranks; return each step's wall time, seconds."""
        return self._run(steps)[0]

    def _run(self, steps: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        target = self.done + steps
        began = self._clock()
        self._group.send(f"run {target}")
        ends = self._wait_boundary(target)
        self._fastest_s = min(self._fastest_s, (ends[-1] - began) / steps)
        return tuple(b - a for a, b in pairwise([began, *ends])), tuple(ends)

    def set_live(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Set live knobs of the program at a boundary; return each rank's answer, by rank."""
        self._group.send("set " + json.dumps(dict(values)))
        answers: dict[int, Mapping[str, Any]] = {}
        limit_s = self._clock() + self._limits.step_s
        while len(answers) < self._group.size:
            event = self._next(limit_s)
            if event.kind == "set":
                answers[event.rank] = event.detail
        return [answers[rank] for rank in sorted(answers)]

    def warm_up(self) -> WarmUp:
        """Run until the step time is stable, as judged in blocks of at least `WARM_BLOCK_S`."""
        times: list[float] = []
        blocks: list[float] = []
        began_s = self._clock()
        while len(blocks) < WARM_BLOCKS_MAX and self._clock() - began_s < WARM_MAX_S:
            block: list[float] = []
            while sum(block) < WARM_BLOCK_S:
                block += self.run(1)
            times += block
            blocks.append(sum(block) / len(block))
            if settled(blocks):
                return WarmUp(tuple(times), blocks[-1], True)
        return WarmUp(tuple(times), blocks[-1], False)

    def settle(self, seconds: float, step_time_s: float) -> None:
        """Run under a new live setting without measuring."""
        if seconds > 0:
            self.run(max(1, math.ceil(seconds / step_time_s)))

    def measure(
        self,
        meter: Meter,
        policy: WindowPolicy,
        step_time_s: float,
        *,
        samples: Callable[[], Sequence[PowerSample]] = tuple,
        competitors: Sequence[Reached] = (),
        again: int = COMPILED_WINDOWS,
    ) -> Window:
        """Measure one window under the current setting; one that a known one beats ends early.

        A window in which torch.compile compiled is discarded: that time belongs to the launch.
        """
        times: list[float] = []
        ends: list[float] = []
        opened = meter.boundary(opens=True)
        while True:
            now_s = ends[-1] if ends else opened.time_s
            window = Window(
                opened,
                Reading(now_s, opened.energy_J),
                tuple(times),
                tuple(ends),
                _between(samples(), opened.time_s, now_s),
            )
            lacks_s = missing_s(policy, window, competitors)
            if lacks_s <= 0:
                break
            steps = max(1, math.ceil(lacks_s / step_time_s), policy.min_steps - len(times))
            more, when = self._run(steps)
            times += more
            ends += when
            step_time_s = sum(times) / len(times)
        if again and compilation_s(self.phases, opened.time_s, ends[-1]):
            meter.boundary(opens=False)
            usual_s = statistics.median(times)
            return self.measure(
                meter, policy, usual_s, samples=samples, competitors=competitors, again=again - 1
            )
        closed = meter.boundary(opens=False)
        return Window(
            opened,
            closed,
            tuple(times),
            tuple(ends),
            _between(samples(), opened.time_s, closed.time_s),
            seconds_a_step(self.phases, opened.time_s, closed.time_s, len(times)),
            beaten_by(window, competitors) if missing_s(policy, window) > 0 else None,
            marks=tuple(within(self.phases, opened.time_s, closed.time_s)),
        )

    def run_to_end(
        self,
        on_step: Callable[[int, float], None],
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Let the program run to its end, however long its steps; ProbeFailed if a rank failed.

        `on_step` is called with each step that all ranks have done, and when the last one had;
        `on_wait` at least every 0.5 s.
        """
        self._group.send("run 1000000000")
        done: dict[int, list[float]] = {}
        ended: set[int] = set()
        while len(ended) < self._group.size:
            if self._cancelled():
                raise ProbeFailed(Failure("cancelled", "it was cancelled"))
            event = self._group.next_event(0.5)
            on_wait()
            if event is None or self._noted(event):
                continue
            if event.kind == "step":
                ends = done.setdefault(event.step, [])
                ends.append(event.time_s)
                if len(ends) == self._group.size:
                    self.done = event.step
                    on_step(event.step, max(done.pop(event.step)))
            elif event.kind == "fail" or (event.kind == "exit" and event.detail["code"]):
                raise ProbeFailed(self._explain(event))
            elif event.kind == "exit":
                ended.add(event.rank)
        self._over = True

    def finish(self) -> None:
        """Stop the ranks and gather their peaks; a rank that does not stop is killed later."""
        if self._over:  # they have ended by themselves
            return
        self._group.send("quit")
        ended: set[int] = set()
        until = min(self._deadline_s, self._clock() + 5.0)
        while len(ended) < self._group.size and self._clock() < until:
            event = self._group.next_event(until - self._clock())
            if event is None:
                break
            if not self._noted(event) and event.kind in ("end", "exit"):
                ended.add(event.rank)

    def _wait_boundary(self, target: int) -> list[float]:
        """Wait until all ranks are at step `target`; return the end of each step until then."""
        arrived: set[int] = set()
        ends: dict[int, float] = {}
        while len(arrived) < self._group.size:
            event = self._next(self._clock() + self._step_limit_s)
            if event.step > target or (event.kind == "at" and event.step != target):
                continue  # no rank goes on by itself: the program wrote this
            if event.kind in ("step", "at"):
                self._see(event)
                ends[event.step] = max(ends.get(event.step, 0.0), event.time_s)
            if event.kind == "at":
                arrived.add(event.rank)
        self.done = target
        self._last_at_s = ends[target]
        return [ends[step] for step in sorted(ends)]

    def _see(self, event: Event) -> None:
        self._seen = max(self._seen, event.step)
        if math.isnan(self._first_s):
            self._first_s = event.time_s
        self._latest_s = event.time_s

    def _next(self, limit_s: float) -> Event:
        """Return the next event; raise a failure with the best explanation."""
        while True:
            if self._cancelled():
                raise ProbeFailed(Failure("cancelled", "the probe was cancelled"))
            now = self._clock()
            if now >= self._deadline_s:
                seen = self._group.describe()
                message = f"out of time after {_steps(self._seen)}{seen}"
                raise ProbeFailed(Failure("time_limit", message))
            if now >= limit_s:
                within = f"no optimizer step within {self._step_limit_s:.0f} s"
                seen = self._group.describe()
                raise ProbeFailed(Failure("hang", f"{within}, after {self._seen} steps{seen}"))
            event = self._group.next_event(min(0.5, limit_s - now, self._deadline_s - now))
            if event is None or self._noted(event):
                continue
            if event.kind in ("fail", "end", "exit"):
                raise ProbeFailed(self._explain(event))
            return event

    def _noted(self, event: Event) -> bool:
        """Record an event other than a step; return False if it is a step."""
        if event.kind == "phase":
            if event.rank == 0:
                self.phases.append((event.time_s, str(event.detail["name"])))
        elif event.kind == "ready":
            self.arrivals.add(event.rank, event.step, event.time_s)
        elif event.kind == "facts":
            self._facts[event.rank] = event.detail
        elif event.kind == "peak":
            self.peaks.append(event.detail)
        else:
            return False
        return True

    def _explain(self, first: Event) -> Failure:
        """Return the cause among the reports of failing ranks: peers of a dead rank fail too."""
        events = [first]
        began = self._clock()
        while len({e.rank for e in events if e.kind == "exit"}) < self._group.size:
            # A rank that told an effect exits after it; only other ranks can bring the cause.
            effects = {e.rank for e in events if e.detail.get("effect")}
            cause_seen = any(e.kind in ("fail", "exit") and e.rank not in effects for e in events)
            wait_s = 1.0 if cause_seen else self._group.patience_s
            event = self._group.next_event(began + wait_s - self._clock())
            if event is None:
                break
            events.append(event)
        if (failure := _cause(events, self._explain_exit)) is not None:
            return failure
        self.ended_by_itself = self._over = True
        if not self.done:
            return Failure("no_steps", WITHOUT_A_STEP + self._group.describe())
        most = 0
        if self._most_steps is not None and 0 < self._fastest_s < math.inf:
            most = self._most_steps(self._fastest_s)
        enough = f"at least {most:,}" if most > self._seen else "more"
        took_s = self._latest_s - self._first_s
        ended = f"the program ended by itself after {_steps(self._seen)}"
        incomplete = "before the measurement was complete"
        if took_s >= SHORT_TRAINING_S or self._seen < 2:
            return Failure("ended", f"{ended}, {incomplete}; give it {enough} steps")
        return Failure(
            "ended",
            f"{ended} in {took_s:.2g} s, {incomplete}: a training as short as this is not worth "
            f"tuning; if it stands for a longer one, give it {enough} steps",
        )


def _steps(count: int) -> str:
    return f"{count:,} optimizer step{'s' * (count != 1)}"


def _with_mean_losses(
    groups: Sequence[Mapping[str, Any]], of_ranks: Sequence[Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    # The mean over the ranks is that of the global batch, whatever its split.
    made = []
    for number, group in enumerate(groups):
        of_step = [each[number].get("loss") for each in of_ranks if number < len(each)]
        losses = [loss for loss in of_step if loss is not None]
        made.append({**group, "loss": statistics.fmean(losses) if losses else None})
    return made


def _cause(events: Sequence[Event], explain_exit: Callable[[int, int], Failure]) -> Failure | None:
    """Return the failure that the others follow from; None if no rank failed."""
    causes: list[Failure] = []
    effects: list[Failure] = []
    spoke = {event.rank for event in events if event.kind == "fail"}
    for event in events:
        if event.kind == "fail":
            detail = event.detail
            frames = tuple(map(str, detail.get("frames", ())))
            reported = Failure(shown_by(detail["evidence"]), detail["message"], frames=frames)
            (effects if event.detail.get("effect") else causes).append(reported)
        elif event.kind == "exit" and event.detail["code"] and event.rank not in spoke:
            causes.append(explain_exit(event.rank, int(event.detail["code"])))
    # Stable: among causes of one kind the first that was heard is the cause.
    causes.sort(key=lambda failure: list(FAILURES).index(failure.kind))
    return next(iter(causes + effects), None)


def _between(
    samples: Sequence[PowerSample], start_s: float, end_s: float
) -> tuple[PowerSample, ...]:
    return tuple(sample for sample in samples if start_s <= sample.time_s <= end_s)


#: A device that has just worked is hot and at its highest clock: its power is that of an idle one
#: only after some seconds. An H100 then draws 20 to 60 % more than later.
COOL_S = 10.0


class IdlePower:
    """Idle power of a node, measured while its devices are cool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_until_s = -math.inf
        self.power_W: float | None = None
        self.sampled_W: float | None = None

    def was_busy(self) -> None:
        """Note that ranks have worked until now."""
        self._busy_until_s = self._clock()

    def measure(
        self,
        meter: Meter,
        idle_s: float,
        wait: Callable[[float], object] = time.sleep,
        *,
        samples: Callable[[], Sequence[PowerSample]] = tuple,
    ) -> float | None:
        """Return the idle power, watts: measured if the devices are cool, else the earlier one.

        `sampled_W` is then the mean of the power samples of that time.
        """
        if idle_s <= 0:
            return None
        warm = self._clock() - self._busy_until_s < COOL_S
        if warm and self.power_W is not None:
            return self.power_W
        opened = meter.boundary(opens=True)
        wait(idle_s)
        closed = meter.boundary(opens=False)
        if closed.time_s > opened.time_s:
            self.power_W = (closed.energy_J - opened.energy_J) / (closed.time_s - opened.time_s)
            sampled_W = [s.power_W for s in samples() if s.time_s >= opened.time_s]
            self.sampled_W = statistics.mean(sampled_W) if sampled_W else None
        return self.power_W


def more_faults(before: Counters, after: Counters) -> dict[str, dict[str, int]]:
    """Return by how much each counter of a device rose between two answers of `Platform.faults`."""
    found: dict[str, dict[str, int]] = {}
    for uuid, counters in before.items():
        for name, count in after.get(uuid, {}).items():
            if (more := count - counters.get(name, count)) > 0:  # not told before: not new
                found.setdefault(uuid, {})[name] = more
    return found


def new_faults(before: Counters, after: Counters) -> str:
    """Return the change of devices between two results of `Platform.faults`, or ""."""
    more = more_faults(before, after)
    found = []
    for uuid in before:
        if uuid not in after:
            found.append(f"{uuid} cannot be used any more")
        found += [f"{uuid} has {count} more {name}" for name, count in more.get(uuid, {}).items()]
    return "; ".join(found)


class DeviceWatch:
    """Watch of a platform's devices from construction on."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._before = platform.faults()

    def require_free(self) -> None:
        """Raise ProbeFailed, by the node, if another process uses a device or none answers."""
        try:
            busy = "; ".join(self._platform.busy())
        except (InputError, MeterError) as error:
            busy = str(error)
        if busy:
            raise ProbeFailed(Failure("node", busy))

    def others(self, own: Collection[int]) -> str:
        """Return a note for a window in which other processes used a device, else ""."""
        try:
            busy = "; ".join(self._platform.busy({*own, os.getpid()}))
        except (InputError, MeterError):  # the meter reports it
            busy = ""
        return busy and f"at the end of the window, {busy}"

    def cause(self, failure: Failure) -> Failure:
        """Return the failure, as one of the node if a device was damaged meanwhile."""
        if not self._before or not failure.type.of_device:
            return failure
        found = new_faults(self._before, self._platform.faults())
        return Failure("node", f"{found}: {failure.message}") if found else failure
