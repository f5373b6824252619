"""Conversion of a window to a measurement: errors, cross-checks and delivered settings.

Whatever a reader must know becomes a flag: a window cut short, a counter that is coarse for it, two
sources that disagree, a clock that was held back. A setting that the devices did not take is no
data point: it comes back as `UnappliedSetting`, with what they did instead.

The parts of a superchip are shown beside each other, over a window and in each phase. The module
holds its parts, so they are never added to it, nor to each other: "grace" holds "cpu" and "sysio".
Sensors tell means of 0.1 s: a phase that is shorter shares its samples with others.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.knobs import by_stage, delivered_names
from tuner.workload.node.clocks.base import FASTEST
from tuner.workload.node.measure.statistics import (
    BOUNDARY,
    COMPILATION,
    DOUBT_SHARE,
    Z90,
    Mark,
    Window,
    standard_error,
)
from tuner.workload.node.meters.base import Reading, device_number, device_states, over_devices
from tuner.workload.records.probe import (
    Drift,
    Measurement,
    PowerSample,
    UnappliedSetting,
    WindowPolicy,
)

#: Parts in the order in which they are shown, by their names in samples without "_W".
PARTS = {"gpu": "GPU", "grace": "Grace", "cpu": "CPU cores", "sysio": "SysIO"}
#: What stands between the name of a phase and that of a part.
OF = ": "


def power_by_part(samples: Iterable[PowerSample], marks: Sequence[Mark]) -> dict[str, float]:
    """Return mean powers by part ("gpu"), and by phase and part ("forward: gpu"), watts.

    Empty where the meter tells no parts, such as that of ordinary GPUs.
    """
    found: dict[str, list[float]] = {}
    times_s = [at_s for at_s, _ in marks]
    for sample in samples:
        number = bisect.bisect_right(times_s, sample.time_s)
        phase = marks[number - 1][1] if number else BOUNDARY
        for part in PARTS:
            if (power_W := sample.extra.get(f"{part}_W")) is not None:
                found.setdefault(part, []).append(power_W)
                if phase != BOUNDARY:
                    found.setdefault(f"{phase}{OF}{part}", []).append(power_W)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def part_rows(parts_W: Mapping[str, float]) -> list[list[str]]:
    """Return the mean powers as cells: a row for the window and for each phase, a column a part.

    Parts that no row has are left out; a row begins with the name of its phase.
    """
    phases = dict.fromkeys(name.rpartition(OF)[0] for name in parts_W)
    rows = []
    for phase in sorted(phases, key=bool):
        prefix = f"{phase}{OF}" if phase else ""
        powers_W = [parts_W.get(prefix + part) for part in named_parts(parts_W)]
        texts = ["" if power_W is None else f"{power_W:.0f} W" for power_W in powers_W]
        rows.append([phase or "window", *texts])
    return rows


def named_parts(parts_W: Mapping[str, float]) -> list[str]:
    """Return the parts with a known power, in the order in which they are shown."""
    names = {name.rpartition(OF)[2] for name in parts_W}
    return [part for part in PARTS if part in names]


def part_lines(parts_W: Mapping[str, float]) -> list[str]:
    """Return the mean powers as text, a line for the window and one for each phase."""
    words = [PARTS[part] for part in named_parts(parts_W)]
    return [
        f"{row[0]:<15} "
        + ", ".join(f"{word} {text}" for word, text in zip(words, row[1:], strict=True) if text)
        for row in part_rows(parts_W)
    ]


#: Counter and integrated power may differ by so much: NVML's power is within 5 % (NVIDIA, NVML API,
#: nvmlDeviceGetPowerUsage), and so is what is integrated from it.
AGREE = 0.05
#: A window shorter than this number of updates of the energy counter is flagged.
UPDATES = 20
#: A clock this far from the one set was not taken: two percent, and at least a step of 15 MHz.
CLOCK_SHARE, CLOCK_MHZ = 0.02, 16.0
#: The number of step times of a window that a record keeps.
KEPT_STEPS = 512
#: Power above the limit by more than this share: the limit was not taken.
LIMIT_SHARE = 0.05

#: Gap between power samples from which a window says so: seconds, and share of its length.
UNSAMPLED_S, UNSAMPLED_SHARE = 1.0, 0.5

_CLOCKS = ("clock_MHz", "memory_clock_MHz")


def kept_steps(times_s: Sequence[float]) -> tuple[float, ...]:
    """Return the step times to record: of more than `KEPT_STEPS`, means of equal runs."""
    each = -(-len(times_s) // KEPT_STEPS)
    if each <= 1:
        return tuple(times_s)
    whole = len(times_s) // each * each
    return tuple(sum(times_s[i : i + each]) / each for i in range(0, whole, each))


def delivered_of(samples: Sequence[PowerSample], requested: Settings) -> dict[str, float]:
    """Return mean clocks over a window: of all devices, and of each stage if set by stage.

    Samples in which the devices were idle throughout are passed over.
    """
    busy = [s for s in samples if s.extra.get("utilisation", 1.0) > 0.0] or list(samples)
    by_device = [device_states(sample) for sample in busy]
    ran: dict[str, list[float]] = {}
    for name in _CLOCKS:
        stages = delivered_names(name, requested.get(name))
        ran[name] = [sample.extra[name] for sample in busy if name in sample.extra]
        if not by_stage(requested.get(name)):
            if name == "clock_MHz":
                ran[name] = ran[name] or [s.extra[FASTEST] for s in busy if FASTEST in s.extra]
        else:
            devices = sorted(
                {n for each in by_device for n, state in each.items() if name in state}
            )
            of_stage = len(devices) // len(stages)
            for stage, key in enumerate(stages):
                ran[key] = [
                    each[number][name]
                    for each in by_device
                    for number in devices[stage * of_stage : (stage + 1) * of_stage]
                    if name in each.get(number, {})
                ]
    return {name: sum(values) / len(values) for name, values in ran.items() if values}


def not_applied(
    settings: Settings,
    delivered: dict[str, float],
    samples: Sequence[PowerSample],
    power_W: float,
    devices: int,
) -> str:
    """Return a sentence if the devices did not run as they were set, else an empty string.

    `power_W` is drawn by that number of `devices`, 0 if unknown. A clock above the one set was not
    locked. One below it may be held back by power or heat, which the devices tell as throttling:
    that is a delivered clock and a data point; without any such reason it was not taken either.
    Cores are set to a highest clock, which they need not reach.
    """
    throttled = any(FASTEST in s.extra for s in samples) or any(
        value for s in samples for name, value in s.extra.items() if name.startswith("throttle")
    )
    for name in _CLOCKS:
        requested = settings.get(name)
        for key, clock in delivered_names(name, requested).items():
            ran = delivered.get(key)
            if not isinstance(clock, int | float) or ran is None:
                continue
            off_MHz = ran - clock
            if abs(off_MHz) <= max(CLOCK_SHARE * clock, CLOCK_MHZ):
                continue
            if off_MHz > 0 or not throttled:
                where = f" of stage {key.rpartition('.')[2]}" if key != name else ""
                return f"{name}{where} was set to {clock} and the devices ran at {ran:.0f} MHz"
    limit_W = settings.get("power_limit_W")
    if isinstance(limit_W, int | float) and devices:
        most_W = limit_W * devices * (1 + LIMIT_SHARE)
        if power_W > most_W:
            return (
                f"power_limit_W was set to {limit_W} and the {devices} devices drew "
                f"{power_W / devices:.0f} W each"
            )
    return ""


def _devices(samples: Sequence[PowerSample]) -> int:
    several = {name for s in samples for name in s.extra if name.endswith("_power_W")}
    return len(several) or int(any("clock_MHz" in sample.extra for sample in samples))


def _disagreement(window: Window, independent: bool) -> float:
    """Return how far sampled power is from the counter, relatively; 0 if they agree or are one."""
    if not independent or not window.energy_J > 0:
        return 0.0
    difference = window.sampled_energy_J / window.energy_J - 1
    return difference if abs(difference) > AGREE else 0.0


def _longest_gap_s(window: Window) -> float:
    times_s = [window.opened.time_s, *(s.time_s for s in window.samples), window.closed.time_s]
    return max(b - a for a, b in pairwise(times_s))


def _flags(
    window: Window, policy: WindowPolicy, resolution_s: float, independent: bool
) -> list[str]:
    flags, length_s, samples = [], window.length_s, window.samples
    if window.beaten_by is not None:
        step_time_s, energy_J = window.beaten_by
        flags.append(
            f"ended after {length_s:.1f} s: another configuration needs at most "
            f"{step_time_s:.3g} s and {energy_J:.3g} J a step"
        )
    elif length_s < policy.min_s:
        flags.append(f"window shorter than {policy.min_s:g} s")
    for quantity, error, mean in (
        ("step time", window.step_time_se_s, window.step_time_s),
        ("power", window.power_se_W, window.power_W),
    ):
        # A tenth more, since the last check came a sample or two before the window closed.
        if window.beaten_by is None and error > 1.1 * policy.target_se * mean:
            flags.append(
                f"{quantity} +-{100 * error / mean:.1f} % (target {100 * policy.target_se:g} %; "
                "window limit reached)"
            )
    if 0 < length_s < UPDATES * resolution_s:
        flags.append(
            f"window of {length_s:.2g} s is short for a counter that is updated every "
            f"{1000 * resolution_s:.0f} ms"
        )
    if COMPILATION in window.phases_s:
        seconds = window.phases_s[COMPILATION] * len(window.step_times_s)
        flags.append(f"torch.compile compiled for {seconds:.1f} s within the window")
    if window.doubt > DOUBT_SHARE:
        flags.append(f"energy +-{100 * window.doubt:.1f} % (power fell slowly after the work)")
    unsampled_s = _longest_gap_s(window)
    if (independent or samples) and unsampled_s >= max(UNSAMPLED_S, UNSAMPLED_SHARE * length_s):
        flags.append(f"power was not sampled for {unsampled_s:.1f} of {length_s:.1f} s")
    if difference := _disagreement(window, independent):
        flags.append(f"energy counter and integrated power differ by {100 * difference:+.1f} %")
    for cause in sorted({name for s in samples for name in s.extra if name.startswith("throttle")}):
        hit = sum(1 for s in samples if s.extra.get(cause))
        if hit:
            flags.append(f"{cause} in {hit} of {len(samples)} samples")
    return flags


def measurement(
    live: Settings,
    window: Window,
    policy: WindowPolicy,
    *,
    settings: Settings | None = None,
    began_s: float = 0.0,
    notes: Sequence[str] = (),
    resolution_s: float = 0.0,
    independent: bool = False,
    devices: Collection[int] | None = None,
) -> Measurement | UnappliedSetting:
    """Return the measurement of one live setting from its window.

    `settings` are the applied ones, the request by default, `began_s` is the probe's start on the
    window's clock, `independent` as of `MeterInfo`; `devices` are the ranks', all by default.
    """
    set_to = live if settings is None else settings
    lease = _devices(window.samples)
    window = replace(window, samples=tuple(of_used_devices(window.samples, devices)))
    delivered = delivered_of(window.samples, set_to)
    if sentence := not_applied(set_to, delivered, window.samples, window.power_W, lease):
        return UnappliedSetting(live, sentence, delivered)
    # Of two figures that differ nobody knows the right one, nor what was drawn at a soft edge.
    doubted = math.hypot(_disagreement(window, independent), window.doubt)
    steps = len(window.step_times_s)
    temperatures = [s.extra["temperature_C"] for s in window.samples if "temperature_C" in s.extra]
    return Measurement(
        live=live,
        steps=steps,
        window_s=window.length_s,
        step_time_s=window.step_time_s,
        step_time_se_s=window.step_time_se_s,
        energy_J=window.energy_J,
        power_W=window.power_W,
        power_se_W=math.hypot(window.power_se_W, doubted * window.power_W),
        delivered=delivered,
        temperature_C=max(temperatures) if temperatures else None,
        flags=(*notes, *_flags(window, policy, resolution_s, independent)),
        step_times_s=kept_steps(window.step_times_s),
        started_s=window.opened.time_s - began_s,
        sampled_energy_J=window.sampled_energy_J if independent else math.nan,
        power_blocks_W=window.power_blocks_W,
        phases_s=window.phases_s,
        parts_W=power_by_part(window.samples, window.marks),
    )


def reached(measurement: Measurement) -> tuple[float, float]:
    """Return step time and energy of a step, each at the upper end of its 90 % interval."""
    time, power = (
        rse if math.isfinite(rse) else 0.0
        for rse in (measurement.step_time_rse, measurement.power_rse)
    )
    return (
        measurement.step_time_s * math.exp(Z90 * time),
        measurement.energy_per_step_J * math.exp(Z90 * math.hypot(time, power)),
    )


def drift_of(measurements: Sequence[Measurement], *, of_power: bool = True) -> Drift | None:
    """Return the drift between the first and the last visit of a setting visited twice."""
    for first in measurements:
        second = [m for m in measurements if m.live == first.live][-1]
        if second is not first:
            break
    else:
        return None

    def relative(name: str, error: str) -> tuple[float, float]:
        ratio = getattr(second, name) / getattr(first, name)
        return ratio - 1, ratio * math.hypot(getattr(first, error), getattr(second, error))

    warmer = None
    if first.temperature_C is not None and second.temperature_C is not None:
        warmer = second.temperature_C - first.temperature_C
    power, power_se = relative("power_W", "power_rse") if of_power else (math.nan, math.nan)
    return Drift(
        first.live,
        second.started_s - first.started_s,
        *relative("step_time_s", "step_time_rse"),
        power,
        power_se,
        warmer,
    )


def of_used_devices(
    samples: Sequence[PowerSample], devices: Collection[int] | None
) -> Sequence[PowerSample]:
    """Return the samples with the values of only these devices, as means over them.

    Clocks, temperatures and throttling of idle ones in the lease say nothing of the job, but their
    power stays in the sample. Samples that do not tell devices apart stay as they are.
    """
    if devices is None:
        return samples
    return [_restricted(sample, frozenset(devices)) for sample in samples]


def _restricted(sample: PowerSample, devices: frozenset[int]) -> PowerSample:
    states = {n: state for n, state in device_states(sample).items() if n in devices}
    whole = {name: v for name, v in sample.extra.items() if device_number(name) is None}
    if not states:
        return sample
    merged = over_devices([states[number] for number in sorted(states)])
    own = {f"gpu{n}_{name}": value for n, state in states.items() for name, value in state.items()}
    del merged["power_W"]
    return replace(sample, extra={**whole, **merged, **own})


# Windows whose energy counter and sampled power differ: measured again, then decided by levels.
#
# A device at work draws more than it does idle, and no more than its limit; over a window it draws
# no more on average than its samples show at work. Of two figures that still differ in a longer
# window, the one that contradicts these levels is not used. Where both fit, the counter's is used,
# and its error says how far the other one is.


#: Share from which counter and sampled power differ, if the samples are fine enough to show it.
DIFFERS = 0.02
#: Standard errors of the sampled power that a difference must exceed as well.
STANDARD_ERRORS = 2.0
#: The second window is this many times as long: what is wrong at its edges has a smaller share.
LONGER = 2.0
#: A difference in joules that grows by less with a window of twice the length is one of its edges.
GROWTH = 1.4
#: Sensors are right to this share (NVML API, nvmlDeviceGetPowerUsage).
SENSOR_ERROR = 0.05

Source = Literal["", "counter", "samples"]


@dataclass(frozen=True)
class Levels:
    """Power of all devices of the lease together, watts.

    Attributes:
        counted_idle_W, sampled_idle_W: while idle, by the counter and by samples; None if unknown.
        most_W: the devices' limits together; infinite if unknown.
    """

    counted_idle_W: float | None = None
    sampled_idle_W: float | None = None
    most_W: float = math.inf


@dataclass(frozen=True)
class AgreedWindow:
    """The window to use, and notes on it.

    `compared` is False if the samples are no check of the window's energy.
    """

    window: Window
    notes: tuple[str, ...] = ()
    compared: bool = True


def sampling_error(window: Window) -> float:
    """Return the relative error of the energy by samples, from their spread and their gaps."""
    import numpy as np

    powers = [sample.power_W for sample in window.samples]
    if len(powers) < 3 or not window.energy_J > 0:
        return math.inf
    low, high = np.quantile(powers, (0.1, 0.9))
    times = [window.opened.time_s, *(s.time_s for s in window.samples), window.closed.time_s]
    gap_s = float(np.diff(times).max())
    by_spread_J, by_gap_J = standard_error(powers) * window.length_s, (high - low) * gap_s
    return math.hypot(by_spread_J, by_gap_J) / window.energy_J


def difference(window: Window) -> float:
    """Return the relative difference of sampled power from the counter; 0 within the samples'
    error.
    """
    if not window.energy_J > 0 or math.isnan(window.sampled_energy_J):
        return 0.0
    found = window.sampled_energy_J / window.energy_J - 1
    least = max(DIFFERS, STANDARD_ERRORS * sampling_error(window))
    return found if abs(found) > least else 0.0


def contradicted(first: Window, second: Window, levels: Levels) -> tuple[Source, str]:
    """Return the source that the levels contradict and the reason; "" if neither or both."""
    reasons = {
        "counter": _why_not(second.energy_J, levels.counted_idle_W, second, levels)
        or _why_not_edges(first, second, levels),
        "samples": _why_not(second.sampled_energy_J, levels.sampled_idle_W, second, levels),
    }
    match reasons["counter"], reasons["samples"]:
        case (why, "") if why:
            return "counter", why
        case ("", why) if why:
            return "samples", why
        case _:
            return "", ""


def _why_not(energy_J: float, idle_W: float | None, window: Window, levels: Levels) -> str:
    power_W = energy_J / window.length_s
    if power_W > (1 + SENSOR_ERROR) * levels.most_W:
        return f"{power_W:.0f} W is above the limit of {levels.most_W:.0f} W"
    # Work that hardly draws power: both sources then say so, and do not differ by as much.
    if idle_W is not None and power_W < (1 + DIFFERS) * idle_W:
        return f"{power_W:.0f} W at work is not above its {idle_W:.0f} W when idle"
    return ""


def _why_not_edges(first: Window, second: Window, levels: Levels) -> str:
    """Return the reason against a counter that is wrong at the edges of windows, or ""."""
    idle_W, sampled_W = levels.counted_idle_W, levels.sampled_idle_W
    if not idle_W or not sampled_W or abs(idle_W / sampled_W - 1) > SENSOR_ERROR:
        return ""  # the sources have different scales
    before_J = first.energy_J - first.sampled_energy_J
    after_J = second.energy_J - second.sampled_energy_J
    if not 0 < after_J < GROWTH * before_J:
        return ""
    import numpy as np

    highest_W = float(np.quantile([sample.power_W for sample in second.samples], 0.95))
    power_W = second.energy_J / second.length_s
    if power_W <= (1 + DIFFERS) * highest_W:
        return ""  # such as an average that follows the work late
    return f"{power_W:.0f} W on average is above the {highest_W:.0f} W that was drawn at work"


def by_samples(window: Window) -> Window:
    """Return the window with the energy of its samples in place of the counter's."""
    opened, closed = window.opened, window.closed
    return replace(
        window,
        opened=replace(opened, doubt_J=0.0),
        closed=Reading(closed.time_s, opened.energy_J + window.sampled_energy_J),
    )


class Agreement:
    """Comparison of the two sources over the windows of one probe.

    A window is measured again once at most, and not if an earlier one differed by the same share.
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self._earlier: list[tuple[float, Source, str]] = []  # difference, and what was found then

    def settle(
        self,
        first: Window,
        policy: WindowPolicy,
        again: Callable[[WindowPolicy], Window] | None,
    ) -> AgreedWindow:
        """Return the window to use in place of one whose figures may differ.

        `again` measures the same setting once more; None if there is no time for it.
        """
        found = difference(first)
        if not found or first.beaten_by is not None:
            return AgreedWindow(first)
        for share, source, why in self._earlier:
            if abs(share - found) <= DIFFERS:
                return _used(first, source, why)
        if again is None:
            return _used(first, *contradicted(first, first, self.levels))
        length_s = LONGER * first.length_s
        second = again(replace(policy, min_s=length_s, max_s=max(policy.max_s, length_s)))
        if not difference(second):
            return AgreedWindow(second)
        source, why = contradicted(first, second, self.levels)
        self._earlier.append((found, source, why))
        return _used(second, source, why)


def _used(window: Window, source: Source, why: str) -> AgreedWindow:
    if not source:
        return AgreedWindow(window)
    differ = f"energy counter and integrated power differ by {100 * difference(window):+.1f} %"
    if source == "counter":
        used = by_samples(window)
        return AgreedWindow(
            used, (f"{differ}: integrated power is used, for by the counter {why}",)
        )
    note = f"{differ}: the counter is used, for by integrated power {why}"
    return AgreedWindow(window, (note,), compared=False)
