"""Checks of conditions of fleets on the twin node.

Each returns a sentence if the fault is there, and an empty string if it is mended.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.twin.clocks import SAMPLE_S, SETTLE_S
from tests.support.studies import measured, record
from tests.twin import TwinGpu, TwinNode, joined_node
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.measure.measurement import delivered_of, not_applied
from tuner.workload.node.measure.window import DeviceWatch
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.node.rank_server import RankServer
from tuner.workload.records.probe import (
    Failure,
    Measurement,
    ProbeRecord,
    ProbeRequest,
    UnappliedSetting,
)


def preload_touches(packages: Path) -> int | None:
    """Return the calls by which the preload of torch and DeepSpeed starts the CUDA driver.

    Args:
        packages: folder of a CUDA build of torch, in front of this environment's packages.

    Returns:
        Their number; None with a torch that has no CUDA, which could not start it.
    """
    with joined_node(TwinGpu(), virtual_time=False) as node:
        env = node.environment() | {"DS_ACCELERATOR": "cuda"}
        paths = [str(packages), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        server = RankServer(env=env)
        try:
            server.start()
            cuda = server.torch is not None and server.torch.cuda
        finally:
            server.close()
        return len(node.cuda_touches()) if cuda else None


def _detected(gpu: TwinGpu) -> Cluster:
    with joined_node(gpu):
        return detect_cluster(environ={})


def superchip() -> str:
    """Ask for the link, and for the scope of a GPU that tells its module's energy alone."""
    link_Bps = _detected(TwinGpu(name="NVIDIA GH200 480GB", c2c=True)).host_link_Bps
    if link_Bps < 400e9:
        return f"the link of a superchip is {link_Bps / 1e9:.0f} GB/s"
    gpu = TwinGpu(
        name="NVIDIA GH200 480GB",
        c2c=True,
        module_W=120.0,
        gpu_scope=0,
        counter_is_module=True,
        usage_is_module=True,
    )
    with joined_node(gpu) as node:
        meter = NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)
        scope = meter.info.scope
        meter.close()
    return "" if scope == "module" else f"a module's energy is labelled with the scope {scope!r}"


def windows_without_a_clock() -> int:
    """Search a GPU that reaches 1290 of 1410 MHz; return the windows that are lost to its limiter.

    Each of three launches has three clocks that are reached, and two that are listed and never
    reached. The search ends when all of the former are measured: until then it has something
    better to probe.
    """
    candidates = Candidates.from_configurations(
        Configuration.of(micro_batch=2**i, clock_MHz=clock)
        for i in range(3)
        for clock in (600, 900, 1200, 1350, 1410)
    )
    planner = CandidatePlanner(candidates, seed=0)
    records: list[ProbeRecord] = []
    lost = ran = 0
    with joined_node(TwinGpu(load=1.0, reach_MHz=1290), call_s=1e-5) as node:
        governor = NvmlGovernor(environ={}, guarded=False)
        meter = NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)
        try:
            while ran < 9 and (plan := planner.plan(PlanningState(records))):
                probe = ProbeRequest(f"p{len(records):04d}", plan.launch, plan.live)
                outcomes = [_window(node, governor, meter, live) for live in plan.live]
                missed = tuple(one for one in outcomes if isinstance(one, UnappliedSetting))
                windows = tuple(one for one in outcomes if isinstance(one, Measurement))
                records.append(record(request=probe, measurements=windows, missed=missed))
                lost, ran = lost + len(missed), ran + len(windows)
        finally:
            meter.close()
            governor.close()
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


def assumed_clocks() -> str:
    """Ask what a device reaches, left alone and when its clock is set."""
    clock_MHz = _detected(TwinGpu(default_application_MHz=1155)).device.default_clock_MHz
    if clock_MHz != 1410:
        return f"a device left alone is expected at {clock_MHz} MHz"
    # The first window may be at the lower one of the two clocks, or at the higher.
    lost = windows_without_a_clock()
    return f"{lost} windows at clocks that are never reached" if lost > 2 else ""


def damage() -> str:
    """Let memory fail while a rank reports an error that programs cause, too."""
    with joined_node(TwinGpu()) as node:
        watch = DeviceWatch(Nvidia())
        node.ecc_error(uncorrected=1)
        kind = watch.cause(Failure("crash", "an illegal memory access was encountered")).kind
        return "" if kind == "node" else f"a memory error of the GPU is a {kind}"
