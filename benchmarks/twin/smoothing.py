"""Windows on twin GPUs whose power falls slowly after work (Blackwell's power smoothing).

The window is as long as the rules make it: that of the search, longer while its edges are in doubt.
The truth is what the GPU drew between the two edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.twin import TwinGpu, TwinNode, joined_node
from tuner.workload.node.measure.statistics import Window, missing_s
from tuner.workload.node.meters.base import Reading
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.records.probe import SEARCH_MIN_S, PowerSample, WindowPolicy

#: Rates (W/s) and hysteresis (s) of the audit; 0 W/s: none.
RAMPS = ((0, 0), (2000, 0), (500, 0), (200, 0), (100, 0), (50, 0), (200, 0.5), (200, 2.0))
#: Sensors and counter as those of an A100 (arXiv 2312.02741).
GPU = TwinGpu(
    filter_s=0.05,
    sensor_period_s=0.1,
    sensor_window_s=0.025,
    counter_delay_s=0.02,
    smoothing=1,
)
STEP_S, POLL_S = 0.1, 0.05


@dataclass(frozen=True)
class Edges:
    """A window: its relative error, its length, and the share that its edges leave in doubt."""

    error: float
    length_s: float
    doubt: float


def window_of(gpu: TwinGpu, policy: WindowPolicy | None = None) -> Edges:
    """Measure a window of steps on a GPU, as long as its policy and its edges want it."""
    policy = policy or replace(WindowPolicy(), min_s=SEARCH_MIN_S)
    with joined_node(gpu) as node:
        return _window(node, policy)


def _window(node: TwinNode, policy: WindowPolicy) -> Edges:
    meter = NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep, sample_period_s=3600.0)

    def advance(seconds: float) -> None:
        # A meter that integrates looks by itself; the loop stands for its thread.
        for _ in range(round(seconds / POLL_S)):
            node.sleep(POLL_S)
            meter.read()

    try:
        node.set(load=1.0)
        advance(5.0)  # warm-up steps
        node.set(load=0.0)
        opened, before_J = meter.boundary(opens=True), node.energy_J()
        node.set(load=1.0)
        ends, samples = list[float](), list[PowerSample]()
        while True:
            now_s = ends[-1] if ends else opened.time_s
            window = Window(
                *(opened, Reading(now_s, opened.energy_J), (STEP_S,) * len(ends)),
                *(tuple(ends), tuple(samples)),
            )
            if missing_s(policy, window) <= 0:
                break
            advance(STEP_S)
            ends.append(node.clock())
            samples.append(meter.sample())
        true_J = node.energy_J() - before_J
        node.set(load=0.0)
        whole = replace(window, closed=meter.boundary(opens=False))
        return Edges(whole.energy_J / true_J - 1, whole.length_s, whole.doubt)
    finally:
        meter.close()


def smoothing_error_worst() -> float:
    """Return the worst relative error over `RAMPS`, and print each."""
    worst = 0.0
    for rate, hold_s in RAMPS:
        found = window_of(replace(GPU, ramp_W_per_s=rate, hold_s=hold_s))
        worst = max(worst, abs(found.error))
        print(
            f"  {rate:5} W/s after {hold_s:.1f} s: {100 * found.error:+.2f} % of a window of "
            f"{found.length_s:.1f} s"
        )
    return worst


if __name__ == "__main__":
    smoothing_error_worst()
