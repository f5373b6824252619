"""`figures`: are energy, time and overhead right."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpu_hour.conditions import edges
from benchmarks.gpu_hour.hour import Hour, described, measured, recording

#: The longest that a counter and its filter take to settle after the load has ended, seconds.
SETTLED_S = 0.7


def figures(hour: Hour) -> None:
    hour.check("warm-up probe", lambda: described(hour.probe("warm", zero_stage=1)))
    hour.check("windows against a recording", lambda: windows(hour))
    hour.check("edges of windows of four lengths", lambda: edges(hour))
    hour.check("the same launch four times", lambda: same_launch(hour))
    hour.check("metering overhead", lambda: overhead(hour))


def windows(hour: Hour) -> str:
    """Compare the energy of a window with an independent recording of the same counter."""
    window_s, recorded_s = (3.0, 30.0) if hour.rehearse else (20.0, 100.0)
    policy = replace(hour.window, min_s=window_s, max_s=window_s, target_se=1.0)
    hour.runner()
    assert hour.meter is not None
    hour.meter.edges.clear()
    with recording(hour.folder / "nvml-windows.json", recorded_s) as rows:
        measured(hour.probe("windows", window=policy))
        energies = rows.result().energies()
    lines = []
    edges = hour.meter.edges
    for (t0_s, e0_J, opens), (t1_s, e1_J, opens_next) in itertools.pairwise(edges):
        if opens and not opens_next and t1_s - t0_s >= window_s / 2:
            before_J = [joules for at_s, joules in energies if at_s <= t0_s][-1]
            apart_J = energy_at_end_J(energies, t1_s) - before_J
            lines.append(
                f"{t1_s - t0_s:.1f} s: meter {e1_J - e0_J:.1f} J, recording {apart_J:.1f} J "
                f"({(e1_J - e0_J) / apart_J - 1:+.2%})"
            )
    return "; ".join(lines) or "no window"


def energy_at_end_J(energies: Sequence[tuple[float, float]], time_s: float) -> float:
    """Return what a counter has counted until the end of a window, after which the GPU rests.

    It is read once it has settled, and the energy at rest since then is subtracted.

    Args:
        energies: readings of the counter (s, J).
        time_s: the end of the window.
    """
    later = [row for row in energies if time_s + SETTLED_S <= row[0] <= time_s + SETTLED_S + 0.4]
    slope_W = (later[-1][1] - later[0][1]) / (later[-1][0] - later[0][0])
    return later[0][1] - slope_W * (later[0][0] - time_s)


def same_launch(hour: Hour) -> str:
    """Tell how far equal launches differ."""
    found = [measured(hour.probe(f"same{number}", zero_stage=1)) for number in range(4)]
    times_s = [one.step_time_s for one in found]
    powers_W = [one.power_W for one in found]
    return (
        f"step time within {max(times_s) / min(times_s) - 1:.2%}, power within "
        f"{max(powers_W) / min(powers_W) - 1:.2%}"
    )


def overhead(hour: Hour) -> str:
    """Measure what metering costs the training."""
    pairs = "2" if hour.rehearse else "8"
    figures = hour.work / "metering.json"
    words = ("--pairs", pairs, "--json", str(figures))
    told, end = hour.command(sys.executable, "-m", "benchmarks.metering", *words)
    if not told:
        return end
    found = {each["name"]: each["value"] for each in json.loads(figures.read_text())}
    return (
        f"{found['overhead']:+.2f} % ({found['overhead_low']:+.2f} to "
        f"{found['overhead_high']:+.2f} %), {pairs} pairs"
    )
