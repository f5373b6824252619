"""Delivered clocks on twin GPUs: what a window reports against the integral of the true clock.

The governor sets a random clock or power limit on the GPUs of a lease, of which the job uses some.
GPUs switch late, are held back by their limit or by heat, never reach their highest clocks, and
idle ones follow a lock or do not. And a search on a GPU that never reaches its highest clocks.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.testing.studies import measured, record
from tuner.testing.twin import TwinGpu, TwinNode
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.measure.measurement import delivered_of, not_applied, of_used_devices
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.records.probe import Measurement, ProbeRecord, ProbeRequest, UnappliedSetting

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
    with tempfile.TemporaryDirectory() as folder:
        node = TwinNode(Path(folder) / "node", [gpu] * lease, call_s=1e-5)
        with node.joined():
            try:
                return _one(node, draw, used)
            finally:
                node.close()


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


def windows_without_a_clock(launches: int = 3) -> int:
    """Search a GPU that reaches 1290 of 1410 MHz; return the windows that are lost to its limiter.

    Each launch has three clocks that are reached, and two that are listed and never reached. The
    search ends when all of the former are measured: until then it has something better to probe.
    """
    candidates = Candidates.from_configurations(
        Configuration.of(micro_batch=2**i, clock_MHz=clock)
        for i in range(launches)
        for clock in (600, 900, 1200, 1350, 1410)
    )
    planner = CandidatePlanner(candidates, seed=0)
    records: list[ProbeRecord] = []
    lost = ran = 0
    with tempfile.TemporaryDirectory() as folder:
        node = TwinNode(Path(folder) / "node", [TwinGpu(load=1.0, reach_MHz=1290)], call_s=1e-5)
        with node.joined():
            governor = NvmlGovernor(environ={}, guarded=False)
            meter = NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)
            try:
                while ran < 3 * launches and (plan := planner.plan(PlanningState(records))):
                    probe = ProbeRequest(f"p{len(records):04d}", plan.launch, plan.live)
                    outcomes = [_window(node, governor, meter, live) for live in plan.live]
                    missed = tuple(one for one in outcomes if isinstance(one, UnappliedSetting))
                    windows = tuple(one for one in outcomes if isinstance(one, Measurement))
                    records.append(record(request=probe, measurements=windows, missed=missed))
                    lost, ran = lost + len(missed), ran + len(windows)
            finally:
                meter.close()
                governor.close()
                node.close()
    return lost


def _window(
    node: TwinNode, governor: NvmlGovernor, meter: NvmlMeter, live: Settings
) -> Measurement | UnappliedSetting:
    """Measure one clock; a step takes a fixed number of cycles."""
    governor.apply(live, ranks=1)
    node.sleep(SETTLE_S)
    samples = []
    for _ in range(10):
        node.sleep(SAMPLE_S)
        samples.append(meter.sample())
    ran, power_W = delivered_of(samples, live), samples[-1].power_W
    if why := not_applied(live, ran, samples, power_W, 1):
        return UnappliedSetting(live, why, ran)
    return measured(live, time_s=600.0 / ran["clock_MHz"], power_W=power_W)
