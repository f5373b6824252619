"""Candidates that are put off: probably unsafe, probably equal to a measured one, or unreachable.

**Peak power.** The highest power sample of a window is its mean power times a factor, learned from
the study's windows. Candidates that probably exceed a cap on peak power are left out, so the search
goes from the safe side inwards (Sui et al. 2015, "Safe exploration for optimization with Gaussian
processes", ICML). Before there is enough to fit the surrogates the safest one may be probed.

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
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from tuner.models.surrogate.surrogates import POWER_NOISE, TIME_NOISE, Posterior
from tuner.models.surrogate.ties import TOLERANCE
from tuner.search.candidate_pool import CandidateView
from tuner.search.observations import Observation, Observations
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.node.measure.measurement import CLOCK_SHARE

#: Probability of exceeding the cap above which a candidate is not probed; if every one is above it,
#: as after the first windows, the safest is probed up to the second figure.
MOST_PROBABLE, SAFEST_PROBABLE = 0.1, 0.5
#: Prior of the log of peak over mean power, which counts as this number of windows: its mean and
#: standard deviation. An assumption, which a few windows outweigh.
PRIOR_MEAN, PRIOR_SD, PRIOR_WINDOWS = 0.12, 0.06, 2.0
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
POWER_LIMIT = "power_limit_W"
CLOCK = "clock_MHz"


def most_power_W(configuration: Configuration) -> float:
    """Return the mean power that the devices' power limit permits; infinite without a limit."""
    limit = configuration.get(POWER_LIMIT)
    # One limit for each stage bounds it, too, and is left to the surrogates.
    return float(limit) * configuration.world_size if isinstance(limit, int | float) else math.inf


@dataclass(frozen=True)
class PeakLimit:
    """Cap on peak power, and the expected peaks."""

    cap_W: float
    log_ratio: float  # mean of the log of peak over mean power
    log_ratio_sd: float  # its standard deviation from configuration to configuration
    # whether `most_power_W` bounds the power: that of the devices alone is metered.
    limits_hold: bool = False

    @classmethod
    def of(cls, cap_W: float, peaks_W: Sequence[float], means_W: Sequence[float]) -> PeakLimit:
        """Return the limit with the ratio of these windows, shrunk towards the prior."""
        ratios = np.log(np.asarray(peaks_W, float) / np.asarray(means_W, float))
        whole = PRIOR_WINDOWS + len(ratios)
        mean = (PRIOR_WINDOWS * PRIOR_MEAN + ratios.sum()) / whole
        squares = PRIOR_WINDOWS * (PRIOR_SD**2 + (PRIOR_MEAN - mean) ** 2)
        squares += float(((ratios - mean) ** 2).sum())
        return cls(cap_W, float(mean), math.sqrt(squares / whole))

    @property
    def mean_power_W(self) -> float:
        """Mean power at which the peak is expected to be the cap."""
        return self.cap_W / math.exp(self.log_ratio)

    def probability_above(self, posterior: Posterior, widening: float) -> np.ndarray:
        """Return the probability that each configuration exceeds the cap, (n,)."""
        sd = np.hypot(widening * posterior.log_power_std, self.log_ratio_sd)
        above = posterior.log_power + self.log_ratio - math.log(self.cap_W)
        return np.asarray(norm.cdf(above / sd))

    def safe(
        self,
        candidates: CandidateView,
        widening: float,
        configurations: Sequence[Configuration],
        levels: np.ndarray | None = None,
    ) -> CandidateView | None:
        """Return the candidates that may be probed; None if there are none.

        Args:
            levels: how high the settings of each are, (n,), to choose by while too little is
                measured to fit the surrogates; None once it is enough.
        """
        risk = self.probability_above(candidates.posterior, widening)
        most_W = np.full(len(risk), math.inf)
        if self.limits_hold:
            most_W = np.array([most_power_W(each) for each in configurations])
            above = np.log(most_W) + self.log_ratio - math.log(self.cap_W)
            risk = np.minimum(risk, norm.cdf(above / self.log_ratio_sd))
        kept = np.flatnonzero(risk <= max(MOST_PROBABLE, float(risk.min())) + TOLERANCE)
        if risk.min() > SAFEST_PROBABLE:
            if levels is None:
                return None
            kept = np.lexsort((levels, most_W))[:1]
        return candidates[kept]


class SlackLimits:
    """Candidates that probably equal a measured one, because neither's power limit binds."""

    def __init__(self, configurations: Sequence[Configuration], launch_of: np.ndarray) -> None:
        self._most_W = np.array([most_power_W(each) for each in configurations])
        # Candidates with the same number differ in their power limit only.
        others = (_without(POWER_LIMIT, each.live) for each in configurations)
        self._curve = _numbered(zip(launch_of, others, strict=True))

    def chances(self, measured: Sequence[Observation]) -> np.ndarray:
        """Return the probability that each candidate differs from the measured ones, (n,)."""
        chances, agreeing = np.ones(len(self._most_W)), 0
        last = np.zeros(len(chances), dtype=bool)
        windows: dict[int, list[Observation]] = {}
        for one in measured:
            if math.isfinite(self._most_W[one.candidate]) and not one.power_capped:
                windows.setdefault(int(self._curve[one.candidate]), []).append(one)
        for curve, several in windows.items():
            free = max(several, key=lambda one: self._most_W[one.candidate])
            # Power of the whole job, perhaps with its hosts: what the devices draw is this at most.
            error = ERRORS * (POWER_NOISE if math.isnan(free.power_rse) else free.power_rse)
            slack = (self._curve == curve) & (self._most_W > SLACK * (1 + error) * free.power_W)
            slack &= self._most_W < self._most_W[free.candidate]
            for one in several:
                differ = _differ(one, free) if slack[one.candidate] else None
                if differ:  # limits far above the mean power bind, and none is left for last
                    return chances
                agreeing += differ is False
            last |= slack
        chances[last] = DOUBT ** (1 + agreeing)
        return chances


def _differ(one: Observation, other: Observation) -> bool | None:
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
