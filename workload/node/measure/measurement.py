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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

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
)
from tuner.workload.node.meters.base import device_number, device_states, over_devices
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
