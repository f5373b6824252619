"""Evidence: what the probes so far say of every candidate.

`Observations` are what was measured, what failed and what is in flight. A measured candidate is
closed, and so is one that failed by its own fault. A failure that blames the launch closes all its
live settings; one that blames neither leaves the candidate open. Settings that a running probe
visited without a result are closed until its record says more.

What is open is closed by no rule, but weighed by the chance that it is worth a probe:

**Crashes.** Each crash has a place, the kind of its failure with the error's type and innermost
frame. What may have caused the crashes of one place is a value of a launch knob that all of them
had and no launch trained with; where every single value has trained, it is a pair of values that no
launch trained with together. The probability is shared out over these suspects, so a launch with
few of them comes first, and if it trains, they are cleared.

**Larger micro-batches** than one that ran out of memory, all else equal, come last.

**Slack power limits.** A power limit well above what the devices draw changes nothing, unless they
work in bursts, which the mean power hides. So each limit that seems not to bind has a chance to
differ all the same, which falls with each pair of windows that agree where they should and is 1
once a pair does not.

**Unreached clocks.** Consumer cards list clocks above those that their voltage limiter allows. A
clock that fell short in one launch puts itself and all higher ones last, until a window of any
launch runs at it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from tuner.models.surrogate.surrogates import POWER_NOISE, TIME_NOISE
from tuner.search.question import POWER_LIMIT, most_power_W
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.node.measure.measurement import CLOCK_SHARE
from tuner.workload.records.probe import Failure, Measurement, ProbeRecord

if TYPE_CHECKING:
    from tuner.search_spaces.space import Candidates

#: Begins the flag of a window in which the power limit of a device was active.
POWER_CAPPED = "throttle_power"
#: Probability that a crash is an accident, which another launch of its kind need not meet. An
#: assumption: nothing was fitted.
ACCIDENT = 0.1
#: Chance below which a launch comes behind all others: it shares what two crashes had in common.
LAST = 0.02
#: A limit seems not to bind if it exceeds the mean power of a device by this factor. The mean hides
#: bursts: above it limits still lower the power of librispeech on both devices of zeus-nsdi23.
SLACK = 1.3
#: Probability that a rule which puts candidates last is wrong, before anything speaks for it; each
#: observation that does multiplies it again. An assumption: nothing was fitted.
DOUBT = 0.3
#: Probability that a larger micro-batch fits where a smaller one did not: as of four observations
#: that speak for it, for memory grows with the batch.
LARGER_FITS = DOUBT**4
#: Standard errors by which windows differ, and that are added to power.
ERRORS = 3.0
#: Windows agree only if their ratio, of time or power, is known to this (`ERRORS` of its errors).
AGREE = 0.1
CLOCK = "clock_MHz"
#: One or two launch values in words ("zero_stage 3").
_Cause = frozenset[str]


@dataclass(frozen=True)
class Outcome:
    """One window of a candidate, and the configuration that was delivered, which models learn."""

    candidate: int
    delivered: Configuration
    window: Measurement

    @property
    def power_capped(self) -> bool:
        """True if the devices reported that their power limit slowed them down."""
        return any(flag.startswith(POWER_CAPPED) for flag in self.window.flags)


class Observations:
    """Measurements and failures of the candidates, and the candidates in flight.

    Attributes:
        peak_bytes: peak memory by launch; infinite if it ran out of memory, NaN if not measured.
        not_taken: of candidates that the devices did not run as set, the clocks at which they ran,
            by name ("clock_MHz", of a stage "clock_MHz.0").
    """

    def __init__(
        self, candidates: Candidates, launch_of: np.ndarray, pending: Sequence[int] = ()
    ) -> None:
        self._candidates, self._launch_of, self.pending = candidates, launch_of, list(pending)
        self.measured: list[Outcome] = []
        self.closed: set[int] = set()
        self.failed_launches: set[int] = set()
        self.peak_bytes: dict[int, float] = {}
        self.not_taken: dict[int, dict[str, float]] = {}

    @classmethod
    def of(
        cls,
        records: Iterable[ProbeRecord],
        in_flight: Iterable[Configuration],
        candidates: Candidates,
        launch_of: np.ndarray,
    ) -> Observations:
        """Return the observations of these records, oldest first, and the candidates in flight.

        Args:
            launch_of: number of each candidate's launch.
        """
        pending = (candidates.find(configuration) for configuration in in_flight)
        found = cls(candidates, launch_of, [i for i in pending if i is not None])
        for record in records:
            found._add(record)
        return found

    def _add(self, record: ProbeRecord) -> None:
        measurements = {m.live: m for m in record.measurements}
        missed = {m.live: m for m in record.missed}
        unmeasured: list[int] = []
        launch: int | None = None
        for configuration in record.request.configurations():
            candidate, live = self._candidates.find(configuration), configuration.live
            if candidate is None:
                continue
            launch = int(self._launch_of[candidate])
            if live in measurements:
                self._add_measurement(candidate, measurements[live])
            elif live in missed:
                self.closed.add(candidate)
                self.not_taken[candidate] = dict(missed[live].delivered)
            else:
                unmeasured.append(candidate)
        if record.failure is None:
            self.closed.update(unmeasured)
        elif launch is not None:
            self._add_failure(record.failure, launch, unmeasured)

    def _add_measurement(self, candidate: int, measurement: Measurement) -> None:
        self.closed.add(candidate)
        launch, peak = int(self._launch_of[candidate]), measurement.peak_memory_bytes
        before = self.peak_bytes.get(launch, math.nan)
        self.peak_bytes[launch] = float(np.fmax(math.nan if peak is None else peak, before))
        launch_values = self._candidates[candidate].launch
        delivered = Configuration(launch_values, measurement.as_delivered)
        self.measured.append(Outcome(candidate, delivered, measurement))

    def _add_failure(self, failure: Failure, launch: int, unmeasured: list[int]) -> None:
        kind = failure.type
        if kind.blames is not None:  # otherwise they may be proposed again
            self.closed.update(unmeasured)
        if kind.blames == "launch" or (kind.blames == "program" and self.measured):
            self.failed_launches.add(launch)
        elif kind.blames in ("ranks", "program"):
            least = 2 if kind.blames == "ranks" else 1
            every = zip(self._candidates.configurations, self._launch_of, strict=True)
            self.failed_launches |= {int(number) for c, number in every if c.world_size >= least}
        if kind.lacks_memory:
            self.peak_bytes[launch] = math.inf


class CrashCauses:
    """Possible causes of the crashes of a study, and the launches that share them."""

    def __init__(self, launches: Sequence[Settings]) -> None:
        self._names = sorted({name for launch in launches for name in launch})
        self._launches = [self._values(launch) for launch in launches]

    def chances(self, records: Sequence[ProbeRecord]) -> np.ndarray:
        """Return the probability that each launch trains, by the crashes so far, (launches,)."""
        chances = np.ones(len(self._launches))
        for alike, suspects in self._causes(records):
            guilty = 1 - ACCIDENT ** len(alike)
            shared = [sum(cause <= values for cause in suspects) for values in self._launches]
            chances *= 1 - guilty * np.array(shared) / max(len(suspects), 1)
        return chances

    def sentences(self, records: Sequence[ProbeRecord]) -> tuple[str, ...]:
        """Return which launches come first because others crashed, a sentence for each cause."""
        made = []
        for alike, suspects in self._causes(records):
            if suspects:
                values = " or ".join(sorted(" and ".join(sorted(cause)) for cause in suspects))
                crashed = " and ".join(each.request.probe_id for each in alike)
                made.append(
                    f"launches without {values} come first from now on: {crashed} crashed with it, "
                    "and no launch with it has trained"
                )
        return tuple(made)

    def _causes(
        self, records: Sequence[ProbeRecord]
    ) -> Iterator[tuple[Sequence[ProbeRecord], Sequence[_Cause]]]:
        # The crashes of each place, with what may have caused them.
        trained = {self._values(each.request.launch) for each in records if each.measurements}
        crashes: dict[str, list[ProbeRecord]] = {}
        for record in records:
            failure = record.failure
            if failure is None or record.measurements or failure.type.blames != "launch":
                continue
            if failure.kind not in ("out_of_memory", "disk_full"):
                crashes.setdefault(failure.place, []).append(record)
        for alike in crashes.values():
            yield alike, self._suspects(alike, trained)

    def _suspects(
        self, crashes: Sequence[ProbeRecord], trained: Collection[_Cause]
    ) -> list[_Cause]:
        shared = frozenset.intersection(*(self._values(each.request.launch) for each in crashes))
        for size in (1, 2):
            causes = (frozenset(each) for each in combinations(shared, size))
            if left := [cause for cause in causes if not any(cause <= each for each in trained)]:
                return left
        return []

    def _values(self, launch: Settings) -> _Cause:
        # A knob that a launch does not name is at its default.
        configuration = Configuration(launch)
        return frozenset(f"{name} {configuration.get(name)}" for name in self._names)


class SlackLimits:
    """Candidates that probably equal a measured one, because neither's power limit binds."""

    def __init__(self, configurations: Sequence[Configuration], launch_of: np.ndarray) -> None:
        self._most_W = np.array([most_power_W(each) for each in configurations])
        # Candidates with the same number differ in their power limit only.
        others = (_without(POWER_LIMIT, each.live) for each in configurations)
        self._curve = _numbered(zip(launch_of, others, strict=True))

    def chances(self, measured: Sequence[Outcome]) -> np.ndarray:
        """Return the probability that each candidate differs from the measured ones, (n,)."""
        chances, agreeing = np.ones(len(self._most_W)), 0
        last = np.zeros(len(chances), dtype=bool)
        windows: dict[int, list[Outcome]] = {}
        for one in measured:
            if math.isfinite(self._most_W[one.candidate]) and not one.power_capped:
                windows.setdefault(int(self._curve[one.candidate]), []).append(one)
        for curve, several in windows.items():
            highest = max(several, key=lambda one: self._most_W[one.candidate])
            free = highest.window
            # Power of the whole job, perhaps with its hosts: what the devices draw is this at most.
            error = ERRORS * (POWER_NOISE if math.isnan(free.power_rse) else free.power_rse)
            slack = (self._curve == curve) & (self._most_W > SLACK * (1 + error) * free.power_W)
            slack &= self._most_W < self._most_W[highest.candidate]
            for one in several:
                differ = _differ(one.window, free) if slack[one.candidate] else None
                if differ:  # limits far above the mean power bind, and none is left for last
                    return chances
                agreeing += differ is False
            last |= slack
        chances[last] = DOUBT ** (1 + agreeing)
        return chances


def _differ(one: Measurement, other: Measurement) -> bool | None:
    time, power = one.step_time_s / other.step_time_s, one.power_W / other.power_W
    errors = np.array([(each.step_time_rse, each.power_rse) for each in (one, other)])
    error = np.where(np.isnan(errors), (TIME_NOISE, POWER_NOISE), np.maximum(errors, 1e-4))
    beyond = ERRORS * np.hypot(*error)
    if (abs(np.log([time, power])) > beyond).any():
        return True
    return False if beyond.min() < AGREE else None


def _without(knob: str, settings: Settings) -> Settings:
    return Settings({name: value for name, value in settings.items() if name != knob})


def _numbered(keys: Iterable[Hashable]) -> np.ndarray:
    # Equal keys have the same number.
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


class LargerBatches:
    """Launches that take more memory than one that ran out: all is equal, and more samples.

    They come last and are not closed: an allocator may need less for a larger batch.
    """

    def __init__(self, launches: Sequence[Settings]) -> None:
        self._sizes = np.array([Configuration(each).micro_batch for each in launches])
        self._like = _numbered(_without("micro_batch", each) for each in launches)

    def chances(self, observations: Observations) -> np.ndarray:
        """Return the probability that each launch fits, by the smaller ones."""
        chances = np.ones(len(self._sizes))
        for launch, peak in observations.peak_bytes.items():
            if math.isinf(peak):
                larger = (self._like == self._like[launch]) & (self._sizes > self._sizes[launch])
                chances[larger] = LARGER_FITS
        return chances


class UnreachedClocks:
    """Candidates at clocks that the devices do not reach."""

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        clocks = (_clocks_MHz(c.live).values() for c in configurations)
        self._clocks_MHz = np.array([max(each, default=0) for each in clocks])
        self._configurations = configurations

    def chances(self, observations: Observations) -> np.ndarray:
        """Return the probability that each candidate runs as set, by its clock, (n,).

        A clock does not count if another window ran at it or above it: the devices may have been
        disturbed.
        """
        every = [_clocks_MHz(one.delivered.live).values() for one in observations.measured]
        ran = [clock for clocks in every for clock in clocks]
        missed = [
            clock
            for candidate, delivered in observations.not_taken.items()
            for name, clock in _clocks_MHz(self._configurations[candidate].live).items()
            if max((delivered.get(name, math.inf), *ran)) < (1 - CLOCK_SHARE) * clock
        ]
        above = self._clocks_MHz >= min(missed, default=math.inf)
        return np.where(above, DOUBT ** (1 + len(missed)), 1.0)


def _clocks_MHz(live: Settings) -> dict[str, float]:
    # By the names of what the devices delivered; empty if the clock is left to the device.
    clock = live.get(CLOCK)
    if isinstance(clock, tuple):
        return {f"{CLOCK}.{i}": float(each) for i, each in enumerate(clock)}
    return {CLOCK: float(clock)} if isinstance(clock, int | float) else {}
