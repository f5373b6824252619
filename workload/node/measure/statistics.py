"""Statistics of a window: its means and their errors, its end, and the time of a step by phase.

Neighbouring steps and neighbouring power samples are alike, so the plain standard error of their
mean promises too much; every error here is widened by their autocorrelation. Power also follows
each step's phases, up and down; its blocks are therefore whole steps, over which the phases cancel.

A window ends when its errors are small enough, its time is up, or its configuration is shown to be
slower and to take more energy than a known one. That test is Student's t, because a short window
knows its own scatter badly, on both axes at once. Ending by mistake costs precision alone.

A mark of the program says which phase begins, and lasts until the next one. Names are a part of the
step, or a part and where in the model it runs: `data`, `forward`, `backward`, `optimizer`,
`communication` (of a pipeline), `forward.encoder`, ... Between windows ranks are at a `boundary`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from tuner.workload.node.meters.base import Reading
from tuner.workload.records.probe import PowerSample, WindowPolicy

if TYPE_CHECKING:
    import numpy as np

#: Half the width of a 90 % interval in standard errors (normal distribution).
Z90 = 1.6448536269514722

#: A block holds at least this much time: five samples of the timeline's 100 ms.
BLOCK_S = 0.5
#: A block that begins within the lag of sampled power is left out where this number remains;
#: otherwise only its steps within the lag are.
LEAST_BLOCKS = 3
#: A window may end from here on. NVML counters update about every 100 ms, and windows under 2 s
#: read low (docs/measuring.md).
FIRST_LOOK_S = 2.0
#: Each further look comes when the window is this many times as long.
LOOK_FACTOR = 1.5
#: Probability with which one look finds one axis behind that lies exactly `FAR` behind. A window of
#: 2 to 15 s has at most six looks, and both axes have to be behind.
LOOK_RISK = 0.05
#: A configuration is beaten if it is this far behind the upper ends of a known one on both axes:
#: launches of one configuration differ by 1 to 3 %, which one window cannot see.
FAR = 0.02
#: Step time (s) and energy of a step (J) that a known configuration reaches, at the upper ends of
#: their intervals.
Reached = tuple[float, float]

#: What the hook calls the wait for the agent at a window's boundary.
BOUNDARY = "boundary"
#: What it calls the time in which torch.compile traces and compiles (`tuner.workload.hook`).
COMPILATION = "compilation"

#: Share of a window's energy that may be in doubt at its edges: a longer one has a smaller share.
DOUBT_SHARE = 0.01

Mark = tuple[float, str]


def log_interval(log: float, se: float, per: float = 1.0) -> tuple[float, float]:
    """Return the 90 % interval of `per` times a quantity, given mean and error of its logarithm."""
    return per * math.exp(log - Z90 * se), per * math.exp(log + Z90 * se)


def log_error(interval: tuple[float, float]) -> float:
    """Return the standard error of the logarithm behind a 90 % interval; 0 if undetermined."""
    low, high = interval
    return math.log(high / low) / (2 * Z90) if low > 0 and math.isfinite(high) else 0.0


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Return the standard error of the mean of a series with correlated neighbours.

    The variance of the mean is widened by (1 + r) / (1 - r), r the lag-1 autocorrelation where it
    is positive (the effective sample size of an AR(1) series; Zieba 2010, "Effective number of
    observations and unbiased estimators of variance for autocorrelated data"). NaN below 2 values.
    """
    import numpy as np  # not before a window: a command is started without it

    series = np.asarray(values, dtype=float)
    if series.size < 2:
        return math.nan
    centred = series - series.mean()
    squares = float(centred @ centred)
    if squares <= 1e-24 * float(series @ series):  # equal but for rounding
        return 0.0
    lag1 = min(max(float(centred[1:] @ centred[:-1]) / squares, 0.0), 0.95)
    variance = squares / (series.size - 1)
    return math.sqrt(variance / series.size * (1 + lag1) / (1 - lag1))


def block_edges(opened_s: float, ends_s: Sequence[float]) -> tuple[float, ...]:
    """Return the edges of blocks of whole steps, each of at least `BLOCK_S`; the last is longer."""
    edges = [opened_s]
    for end_s in ends_s:
        if end_s - edges[-1] >= BLOCK_S:
            edges.append(end_s)
    if ends_s and edges[-1] < ends_s[-1]:
        if len(edges) > 1:
            edges[-1] = ends_s[-1]
        else:
            edges.append(ends_s[-1])
    return tuple(edges)


def _energies(samples: Sequence[PowerSample], edges_s: Sequence[float]) -> np.ndarray:
    """Return the joules between edges, (len(edges_s) - 1,): power linear between samples."""
    import numpy as np

    times = np.array([sample.time_s for sample in samples])
    power = np.array([sample.power_W for sample in samples])
    edges = np.asarray(edges_s, dtype=float)
    inside = (times > edges[0]) & (times < edges[-1])
    grid = np.union1d(times[inside], edges)
    drawn = np.interp(grid, times, power)
    total = np.concatenate([[0.0], np.cumsum(np.diff(grid) * (drawn[1:] + drawn[:-1]) / 2)])
    return np.diff(total[np.searchsorted(grid, edges)])


def integrate(samples: Sequence[PowerSample], start_s: float, end_s: float) -> float:
    """Return the joules of sampled power between two times; NaN with fewer than 3 samples."""
    if sum(start_s <= sample.time_s <= end_s for sample in samples) < 3:
        return math.nan
    return float(_energies(samples, (start_s, end_s))[0])


def block_powers(samples: Sequence[PowerSample], edges_s: Sequence[float]) -> np.ndarray:
    """Return the mean power between edges, watts; empty with fewer than 3 samples."""
    import numpy as np

    if len(edges_s) < 2 or math.isnan(integrate(samples, edges_s[0], edges_s[-1])):
        return np.empty(0)
    return _energies(samples, edges_s) / np.diff(edges_s)


@dataclass(frozen=True)
class Window:
    """Measurements between two boundaries."""

    opened: Reading
    closed: Reading
    step_times_s: tuple[float, ...]  # wall time of each step, as the last rank finished it
    ends_s: tuple[float, ...] = ()  # of each step, on CLOCK_MONOTONIC
    samples: tuple[PowerSample, ...] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)
    #: The known configuration that beats this one and ended the window.
    beaten_by: Reached | None = None
    #: When phases began, as rank 0 marked.
    marks: tuple[Mark, ...] = ()

    @property
    def length_s(self) -> float:
        return self.closed.time_s - self.opened.time_s

    @property
    def energy_J(self) -> float:
        """Energy of the window by the meter, joules."""
        return self.closed.energy_J - self.opened.energy_J

    @property
    def doubt(self) -> float:
        """Share of the energy that is in doubt at the edges of the window."""
        doubt_J = max(self.opened.doubt_J, self.closed.doubt_J)
        return doubt_J / self.energy_J if self.energy_J > 0 else 0.0

    @property
    def power_W(self) -> float:
        """Mean power of the window, watts."""
        return self.energy_J / self.length_s

    @property
    def step_time_s(self) -> float:
        """Mean time of a step, seconds."""
        return self.length_s / len(self.step_times_s)

    @property
    def step_time_se_s(self) -> float:
        """Standard error of the mean step time, seconds; NaN with a single step."""
        return standard_error(self.step_times_s)

    @property
    def settled_s(self) -> float:
        """Time from which sampled power shows the window's work: the first end of a step that is
        not within the sensor's lag; the window's opening if more than half of it would be left out.

        Devices wait idle at the opening edge, which sampled power shows for a while after it: a
        bias that the counter does not have.
        """
        opened_s = self.opened.time_s
        after = (end_s for end_s in self.ends_s if end_s - opened_s >= self.opened.lag_s)
        settled_s = next(after, opened_s)
        return settled_s if settled_s - opened_s <= self.length_s / 2 else opened_s

    @property
    def block_edges_s(self) -> tuple[float, ...]:
        """Edges of the blocks that tell how power scatters, on CLOCK_MONOTONIC.

        The block that begins within the sensor's lag is left out or, of few blocks, begins after
        it: what the lag adds is no scatter.
        """
        edges = block_edges(self.opened.time_s, self.ends_s)
        settled = tuple(edge for edge in edges if edge - edges[0] >= self.opened.lag_s)
        if len(settled) > LEAST_BLOCKS:
            return settled
        first_s = self.settled_s
        shortened = (first_s, *(edge for edge in edges if edge - first_s >= BLOCK_S / 2))
        return shortened if len(shortened) > 2 else edges

    @property
    def power_blocks_W(self) -> tuple[float, ...]:
        """Mean power of blocks of whole steps, watts; their mean is `power_W`.

        The samples tell how power was spread over the window, the counter how much it was.
        """
        import numpy as np

        edges = self.block_edges_s
        blocks = block_powers(self.samples, edges)
        if not blocks.size:
            return ()
        sampled_W = float(blocks @ np.diff(edges)) / (edges[-1] - edges[0])
        scale = self.power_W / sampled_W if sampled_W > 0 else 1.0
        return tuple(float(block) * scale for block in blocks)

    @property
    def power_se_W(self) -> float:
        """Standard error of the mean power, watts; NaN with fewer than two blocks."""
        return standard_error(self.power_blocks_W)

    @property
    def sampled_energy_J(self) -> float:
        """Energy of the window by integrated samples, joules; NaN with too few samples.

        Within the sensor's lag, the mean power of the rest counts.
        """
        closed_s = self.closed.time_s
        for first_s in (self.settled_s, self.opened.time_s):
            if not math.isnan(energy_J := integrate(self.samples, first_s, closed_s)):
                return energy_J * self.length_s / (closed_s - first_s)
        return math.nan


@dataclass(frozen=True)
class _Mean:
    value: float
    rse: float
    freedom: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> _Mean:
        """Return the mean of a series; its error is `standard_error`."""
        import numpy as np

        series = np.asarray(values, dtype=float)
        error = standard_error(series)
        if math.isnan(error) or series.mean() <= 0:
            return cls(math.nan, math.nan, 0.0)
        # The number of independent values that would have this error.
        count = float(series.var(ddof=1)) / error**2 if error else float(series.size)
        return cls(float(series.mean()), error / float(series.mean()), max(count - 1.0, 1.0))


def _means(window: Window) -> tuple[_Mean, _Mean]:
    """Return the means of step time and of power, as far as the window has come."""
    blocks = block_powers(window.samples, window.block_edges_s)
    return _Mean.of(window.step_times_s), _Mean.of(blocks)


def beaten_by(window: Window, competitors: Sequence[Reached]) -> Reached | None:
    """Return a known configuration that beats the window's on both axes, or None.

    The lower ends (`LOOK_RISK`) must be more than `FAR` above the known ones.
    """
    time, power = _means(window)
    if math.isnan(time.rse) or math.isnan(power.rse):
        return None
    both = min(time.freedom, power.freedom)
    low_s = time.value * math.exp(-_quantile(time.freedom) * time.rse)
    low_J = time.value * power.value
    low_J *= math.exp(-_quantile(both) * math.hypot(time.rse, power.rse))
    far = 1.0 + FAR
    return next(
        (each for each in competitors if low_s > far * each[0] and low_J > far * each[1]), None
    )


def _quantile(freedom: float) -> float:
    """Return the quantile of Student's t that a look uses."""
    from scipy.special import stdtrit  # takes a while, which no start of a script waits for

    return float(stdtrit(freedom, 1.0 - LOOK_RISK))


def missing_s(policy: WindowPolicy, window: Window, competitors: Sequence[Reached] = ()) -> float:
    """Return the seconds that a window still lacks to its target error; 0 if it is complete."""
    length_s = window.length_s
    enough = len(window.step_times_s) >= policy.min_steps
    least_s = min(FIRST_LOOK_S, policy.min_s) if competitors else policy.min_s
    if length_s < least_s or not enough:
        # 2 % more than asked, so that slightly fast steps do not cost another boundary.
        return max((least_s - length_s) * 1.02, 1e-3)
    if length_s >= policy.max_s or beaten_by(window, competitors):
        return 0.0
    if (doubted_s := min(policy.max_s, _doubted_s(window))) > length_s:
        return doubted_s - length_s
    next_look_s = (LOOK_FACTOR - 1.0) * length_s if competitors else math.inf
    if length_s < policy.min_s:
        return min((policy.min_s - length_s) * 1.02, next_look_s)
    excess = max(
        (mean.rse / policy.target_se for mean in _means(window) if not math.isnan(mean.rse)),
        default=0.0,
    )
    if excess <= 1.0:
        return 0.0
    # The error falls with the root of the length: go half of the way that this promises, then look.
    promised_s = length_s * (excess**2 - 1) / 2
    return min(promised_s, policy.max_s - length_s, policy.min_s, next_look_s)


def _doubted_s(window: Window) -> float:
    """Return the length from which the doubt at the edges is a small share; 0 without power."""
    power_W = _means(window)[1].value
    # The closing edge is like the opening one: the devices have worked before both.
    return window.opened.doubt_J / (DOUBT_SHARE * power_W) if power_W > 0 else 0.0


def within(marks: Sequence[Mark], opened_s: float, closed_s: float) -> tuple[Mark, ...]:
    """Return a window's (time, phase) marks, from the phase that was current when it opened."""
    ordered = sorted(marks)
    before = [name for at_s, name in ordered if at_s <= opened_s]
    first = ((opened_s, before[-1]),) if before else ()
    return (*first, *((at_s, name) for at_s, name in ordered if opened_s < at_s <= closed_s))


def seconds_a_step(
    marks: Sequence[Mark], opened_s: float, closed_s: float, steps: int
) -> dict[str, float]:
    """Return the mean seconds per step in each phase of a window, longest first.

    The waits at boundaries are left out, so the values sum to a little less than the step time.
    """
    seconds: dict[str, float] = {}
    inside = within(marks, opened_s, closed_s)
    for (begins_s, name), (ends_s, _) in pairwise([*inside, (closed_s, BOUNDARY)]):
        if name != BOUNDARY:
            seconds[name] = seconds.get(name, 0.0) + (ends_s - begins_s) / steps
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def compilation_s(marks: Sequence[Mark], opened_s: float, closed_s: float) -> float:
    """Return the seconds of a span in which rank 0 compiled; 0.0 where nothing is marked."""
    return seconds_a_step(marks, opened_s, closed_s, 1).get(COMPILATION, 0.0)
