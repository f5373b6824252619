"""Delivered clocks on twin GPUs: what a window reports against the integral of the true clock.

The governor sets a random clock or power limit on the GPUs of a lease, of which the job uses some.
GPUs switch late, are held back by their limit or by heat, never reach their highest clocks, and
idle ones follow a lock or do not.
"""

from __future__ import annotations

import random

from tests.twin import TwinGpu, TwinNode, joined_node
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.measure.measurement import delivered_of, of_used_devices
from tuner.workload.node.meters.nvml import NvmlMeter

SETTLE_S, WINDOW_S, SAMPLE_S = 1.0, 5.0, 0.1


def delivered_clock_error(seed: int) -> float:
    """Return the relative error of the delivered clock of one random window."""
    draw = random.Random(seed)
    gpu = TwinGpu(
        peak_W=draw.uniform(300.0, 420.0),
        limit_W=draw.uniform(250.0, 400.0),
        switch_s=draw.uniform(0.0, 0.4),
        reach_MHz=draw.choice((0.0, draw.uniform(1200.0, 1400.0))),
        heat_K_per_W=draw.uniform(0.08, 0.25),
        heat_s=draw.uniform(2.0, 10.0),
        idle_follows=draw.random() < 0.5,
        filter_s=0.08,
    )
    lease, used = 4, draw.choice((1, 2, 4))
    with joined_node(*[gpu] * lease, call_s=1e-5) as node:
        return _one(node, draw, used)


def _one(node: TwinNode, draw: random.Random, used: int) -> float:
    live = Settings(
        {"clock_MHz": draw.randrange(600, 1411, 15)}
        if draw.random() < 0.7
        else {"power_limit_W": draw.randint(150, 390)}
    )
    governor = NvmlGovernor(environ={}, guarded=False)
    meter = NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)
    try:
        for index in range(used):
            node.set(index, load=draw.uniform(0.8, 1.0))
        governor.apply(live, ranks=used)
        node.sleep(SETTLE_S)
        before, began_s = [node.clock_MHz_s(index) for index in range(used)], node.clock()
        samples = []
        while node.clock() - began_s < WINDOW_S:
            # Phases of a step: the limit holds the clock back in some and not in others.
            before_s = draw.uniform(0.0, SAMPLE_S)
            node.sleep(before_s)
            if draw.random() < 0.3:
                for index in range(used):
                    node.set(index, load=draw.uniform(0.3, 1.0))
            node.sleep(SAMPLE_S - before_s)
            samples.append(meter.sample())
        length_s = node.clock() - began_s
        ran = [(node.clock_MHz_s(index) - before[index]) / length_s for index in range(used)]
    finally:
        meter.close()
        governor.close()
    told = delivered_of(of_used_devices(samples, range(used)), live)["clock_MHz"]
    return told / (sum(ran) / used) - 1
