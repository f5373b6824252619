"""Text of `tuner fit`: whether a job fits, and what it takes (`tuner.planning.fit`)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tuner.display.plan_text import ASSUMED, states_lines
from tuner.formatting import energy_text
from tuner.planning.fit import SURE, Change, Fit, Most
from tuner.results.predict import Forecast
from tuner.search_spaces.knobs import short_word

GB = 1e9
#: One letter a part; a bar is as wide as this many characters.
_LETTERS, _WIDTH = "#=+*o~:.x%@&", 60


def fit_lines(said: Fit, costs: Forecast) -> list[str]:
    """Return the answer as lines."""
    kind = "cores" if said.cluster.device.type == "cpu" else "GPUs"
    none = f"No configuration of space {said.space} fits on {said.cluster.name}"
    changes = ["", none] if said.probability < SURE else []
    if said.changes:
        first, *faster = said.changes
        changes = ["", "Cheapest change that fits", f"  {_change(first)}"]
        if faster:
            changes += ["Faster, with more changes", *(f"  {_change(each)}" for each in faster)]
    return [
        f"Predicted, not measured: {said.job.name} on {said.cluster.name}, "
        f"{said.configuration.world_size} of {said.cluster.devices} {kind}",
        f"  {said.configuration.short}",
        *(f"  {sentence}" for sentence in states_lines(said.job)),
        f"  {_verdict(said)}",
        *_host(said),
        *cost_lines(costs),
        "",
        "Memory of the fullest rank",
        *_parts(said),
        "",
        "Limits, everything else as above",
        *_limits(said),
        *changes,
        "",
        *breakdown_lines(costs),
        "",
        "Known error of such predictions",
        f"  {ASSUMED}",
        *(f"  {sentence}" for sentence in costs.known_error),
        *(() if said.known_error else _unknown(said)),
    ]


def _verdict(said: Fit) -> str:
    sure = max(said.probability, 1 - said.probability) >= SURE
    likely = "fits" if sure else "probably fits"
    words = likely if said.fits else "does not fit" if sure else "may not fit"
    spare = "to spare" if said.spare_bytes >= 0 else "too many"
    return (
        f"{words}: {said.memory_bytes / GB:.1f} of {said.capacity_bytes / GB:.1f} GB, "
        f"{abs(said.spare_bytes) / GB:.1f} GB {spare} "
        f"(probability of fitting {_percent(said.probability)})"
    )


def _percent(probability: float) -> str:
    if probability > 0.99:
        return "over 99 %"
    return "under 1 %" if probability < 0.01 else f"{100 * probability:.0f} %"


def _host(said: Fit) -> list[str]:
    room = said.cluster.host_memory_bytes
    if not said.host_memory_bytes:
        return []
    short = " (DOES NOT FIT)" if room and said.host_memory_bytes > room else ""
    of = f" of {room / GB:.1f}" if room else ""
    unknown = "" if room else " (the cluster file lacks host_memory_bytes: no room is checked)"
    return [f"  on each node's host: {said.host_memory_bytes / GB:.1f}{of} GB{short}{unknown}"]


def _parts(said: Fit) -> list[str]:
    bar, letters = stacked_bar(said.parts)
    return [
        f"  [{bar}]",
        *(
            f"  {letters[name]} {name:<13} {value / GB:>7.2f} GB  {value / said.memory_bytes:>5.1%}"
            for name, value in said.parts.items()
        ),
    ]


def _most(most: Most, cap: str) -> str:
    if not most.likely:
        return "none fits"
    text = f"{most.likely:,}"
    if most.sure < most.likely:
        text += f" ({most.sure:,} to be sure)" if most.sure else " (none is sure)"
    return f"{text}, {cap}" if most.capped else text


def _limits(said: Fit) -> list[str]:
    fewest = "none up to 16 times the cluster's"
    if said.fewest_gpus is not None:
        gpus, change = said.fewest_gpus
        fewest = f"{gpus:,}"
        if change.knobs:
            fewest += f", with {_words(change)} ({change.time_ratio:.3g} times as long a step)"
    replicas = "none" if said.fewest_replicas is None else f"{said.fewest_replicas:,}"
    return [
        f"  largest micro-batch  {_most(said.micro_batch, 'as large as the global batch allows')}",
        f"  longest sequence     {_most(said.sequence_length, 'as long as the model allows')}",
        f"  fewest GPUs          {replicas} by replicas alone",
        f"  in space {said.space:<11} {fewest}",
    ]


def _words(change: Change) -> str:
    return " ".join(short_word(name, change.configuration.get(name)) for name in change.knobs)


def _change(change: Change) -> str:
    time, energy = change.time_ratio - 1, change.energy_ratio - 1
    return (
        f"{_words(change)}: {change.memory_bytes / GB:.1f} GB "
        f"({_percent(change.probability)}), {100 * time:+.0f} % time and "
        f"{100 * energy:+.0f} % energy of a step"
    )


def _unknown(said: Fit) -> tuple[str, ...]:
    return (
        f"  peak memory: unknown on {said.cluster.device.name}: peaks were compared with "
        "measurements on other devices only (python -m benchmarks.fit); the first probe tells",
    )


def stacked_bar(parts: Mapping[str, float], width: int = _WIDTH) -> tuple[str, dict[str, str]]:
    """One line of letters whose lengths are the parts' shares, and each part's letter.

    Shares are rounded so that the bar is exactly `width` long (largest remainders); a part too
    small for one character has its letter in the legend only.
    """
    total = sum(parts.values())
    if not 0 < total < math.inf:  # a device without bandwidth or speed: nothing to share out
        return "", {name: _LETTERS[i % len(_LETTERS)] for i, name in enumerate(parts)}
    letters = {name: _LETTERS[i % len(_LETTERS)] for i, name in enumerate(parts)}
    exact = {name: width * (value / total) for name, value in parts.items()}
    cells = {name: int(value) for name, value in exact.items()}
    left = sorted(exact, key=lambda name: cells[name] - exact[name])
    for name in left[: width - sum(cells.values())]:
        cells[name] += 1
    return "".join(letters[name] * cells[name] for name in parts), letters


def _section(title: str, parts: Mapping[str, float], unit: str) -> list[str]:
    if not parts:  # a device whose file says that it draws nothing
        return [title, f"  0 {unit}"]
    bar, letters = stacked_bar(parts)
    total = sum(parts.values())
    wide = max(len(name) for name in parts)
    return [
        title,
        f"  [{bar}]",
        *(
            f"  {letters[name]} {name:<{wide}} {value:>10.4g} {unit}  {value / total:>6.1%}"
            for name, value in parts.items()
        ),
    ]


def _corrected_lines(said: Forecast) -> list[str]:
    if not said.corrected:
        return []
    (t, t_low, t_high), (w, w_low, w_high), (j, j_low, j_high) = (
        said.corrected[name] for name in ("step_time_s", "power_W", "energy_J")
    )
    return [
        f"  corrected by {said.probes} windows: {t:.4g} s a step (90 %: {t_low:.4g} to "
        f"{t_high:.4g}), {w:,.0f} W ({w_low:,.0f} to {w_high:,.0f}), {j:,.4g} J a step "
        f"({j_low:,.4g} to {j_high:,.4g})"
    ]


def cost_lines(said: Forecast) -> list[str]:
    """Return what a step and the whole training take, as lines."""
    b, cluster, steps = said.breakdown, said.cluster, said.job.steps
    charged = (
        "whole packages"
        if cluster.device.type == "cpu"
        else "the modules"
        if cluster.host_W or cluster.supply_loss
        else "the GPUs alone"
    )
    return [
        f"  {b.step_time_s:.4g} s a step, {b.power_W:,.0f} W ({charged}), "
        f"{energy_text(b.energy_J / 1e3)} a step"
        + (f", devices at {b.clock_MHz:.0f} MHz" if cluster.device.type == "cuda" else ""),
        f"  the whole training, {steps:,} steps: {steps * b.step_time_s / 3600:,.3g} h and "
        f"{energy_text(steps * b.energy_J / 1e3)}",
        *_corrected_lines(said),
    ]


def breakdown_lines(said: Forecast) -> list[str]:
    """Return where the time and the energy of a step go, as lines."""
    return [
        *_section("Where the time of a step goes (the busiest stage)", said.breakdown.time_s, "s"),
        "",
        *_section("Where the energy of a step goes (the whole job)", said.breakdown.joules, "J"),
    ]
