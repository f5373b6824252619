"""Energy of random windows on twin GPUs, by the meter through the unmodified pynvml.

Sensors and counters are as imperfect as published measurements found them: power sampled for a
quarter of each 100 ms and seen through a filter, counters updated every 20 to 100 ms that lag
(arXiv 2312.02741; ML.ENERGY). Steps have phases, idle gaps or constant power. As in a probe, the
GPUs work before the window opens and are idle while the ranks wait at a boundary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.twin import TwinGpu, TwinNode, joined_node
from tuner.workload.node.meters.nvml import NvmlMeter

KINDS = ("steps", "gaps", "constant")


@dataclass(frozen=True)
class WindowError:
    """Relative errors of one random window.

    Attributes:
        error: of the meter's energy between two boundaries.
        plain: of the bare difference of the counters at the same times; None without counters.
        kind: "steps", "gaps" or "constant".
        waited_s: time that the two boundaries took.
    """

    error: float
    plain: float | None
    kind: str
    waited_s: float


def _segments(draw: random.Random, kind: str, length_s: float) -> list[tuple[float, float]]:
    """(seconds, utilisation) of a window: phases of steps, with idle gaps between, or constant."""
    if kind == "constant":
        return [(length_s, draw.uniform(0.2, 1.0))]
    phases = [(draw.uniform(0.02, 0.4), draw.uniform(0.1, 1.0)) for _ in range(draw.randint(2, 5))]
    if kind == "gaps":
        phases.append((draw.uniform(0.05, 0.8), 0.0))
    step_s = sum(seconds for seconds, _ in phases)
    return phases * max(3, round(length_s / step_s))


def random_gpu(draw: random.Random, *, counted: bool) -> TwinGpu:
    wraps = counted and draw.random() < 0.3
    start_mJ = 2**32 - draw.randint(1000, 2_000_000) if wraps else draw.randint(0, 2**31)
    peak_W, idle_W = draw.uniform(200.0, 700.0), draw.uniform(40.0, 120.0)
    period_s, phase_s = draw.uniform(0.02, 0.1), draw.random()
    filter_s, delay_s, leak = (draw.uniform(0.0, most) for most in (0.1, 0.05, 0.002))
    return TwinGpu(
        peak_W=peak_W,
        idle_W=idle_W,
        limit_W=1000.0,
        default_limit_W=1000.0,
        max_limit_W=1000.0,
        has_counter=counted,
        counter_period_s=period_s,
        counter_start_mJ=start_mJ,
        counter_modulus_mJ=2**32 if wraps else 0,
        phase_s=phase_s,
        filter_s=filter_s,
        counter_delay_s=delay_s,
        leak_per_K=leak,
        heat_s=30.0,
        sensor_period_s=0.1,
        sensor_window_s=0.025,
        counter_is_module=False,
    )


def window_error(seed: int) -> WindowError:
    """Meter one random window, from boundary to boundary."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    counted = draw.random() < 0.85
    gpus = [random_gpu(draw, counted=counted) for _ in range(draw.choice((1, 1, 2, 4)))]
    with joined_node(*gpus, call_s=draw.uniform(2e-6, 2e-4)) as node:
        return _meter_one(node, draw, kind, counted)


def _meter_one(node: TwinNode, draw: random.Random, kind: str, counted: bool) -> WindowError:
    meter = NvmlMeter(clock=node.clock, sleep=node.sleep, environ={}, sample_period_s=3600.0)

    def advance(seconds: float) -> None:
        until_s = node.clock() + seconds
        while node.clock() < until_s - 1e-9:
            # A meter that integrates looks every 50 ms by itself; the loop stands for its thread.
            node.sleep(min(0.05, until_s - node.clock()) if not counted else seconds)
            if not counted:
                meter.read()

    try:
        node.set(load=draw.uniform(0.2, 1.0))
        advance(draw.uniform(0.5, 1.5))  # warm-up steps
        node.set(load=0.0)
        called_s = node.clock()
        opened = meter.boundary(opens=True)
        waited_s = node.clock() - called_s
        bare_J, start_J = meter.read().energy_J, node.energy_J()
        for seconds, share in _segments(draw, kind, draw.uniform(2.0, 10.0)):
            node.set(load=share)
            advance(seconds)
        node.set(load=0.0)
        truth_J = node.energy_J() - start_J
        bare_J = meter.read().energy_J - bare_J
        called_s = node.clock()
        closed = meter.boundary(opens=False)
        waited_s += node.clock() - called_s
    finally:
        meter.close()
    error = (closed.energy_J - opened.energy_J) / truth_J - 1
    return WindowError(error, bare_J / truth_J - 1 if counted else None, kind, waited_s)
