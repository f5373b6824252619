"""Faults of the GPUs and of their driver, on a twin GPU node.

Real ranks run on this machine's cores; the meter and the governor speak to its NVML as they
would to a driver, and each probe sweeps two clocks. The fault strikes in the study's second probe.
What every GPU stands at is read from the node itself, before and after.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from tests.faults.harness import QUICK, Fault, Outcome, outcome_of, run_of, wait_gone
from tests.faults.probe import keep_server, real_runner, recorded, server_mark, study
from tests.twin import TwinGpu, TwinNode
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRequest, WindowPolicy

CLOCKS = (900, 1410)
SPACE = """what = "of the fault tests"
[knobs]
data_parallel = [1, 2]
micro_batch = [2, 4]
clock_MHz = [900, 1410]
"""
#: When, after the second probe was asked for, a fault of the device itself strikes, seconds: in the
#: middle of its windows.
STRIKES_S = 1.0

Strike = Callable[[TwinNode], None]


def stands(node: TwinNode) -> list[tuple[object, ...]]:
    """Return every GPU's clocks and limit."""
    return [
        (node.locked_MHz(gpu), node.memory_locked_MHz(gpu), node.limit_W(gpu)) for gpu in (0, 1)
    ]


@contextlib.contextmanager
def on_twin_node(
    folder: Path, gpus: Sequence[TwinGpu], *, children: bool = False
) -> Iterator[TwinNode]:
    """Put this process on a node of busy GPUs; with `children`, what it starts, too."""
    node = TwinNode(
        folder / "twin-node", [replace(gpu, load=1.0) for gpu in gpus], virtual_time=False
    )
    with node.joined(children=children):
        yield node
    node.close()


def clocked(
    folder: Path, clocks: tuple[int, ...], *, guarded: bool = False, shared: bool = True
) -> LocalRunner:
    """Return the real runner on this machine's cores, metered and clocked by NVML.

    Args:
        folder: the fault's.
        clocks: that the device offers, MHz.
        guarded: a guard of its own restores the clocks if this process ends without doing so.
        shared: as in `real_runner`.
    """
    from tuner.workload.node.clocks.governor import NvmlGovernor
    from tuner.workload.node.meters.nvml import NvmlMeter
    from tuner.workload.node.platforms import detect_cluster

    here = detect_cluster(environ={"CUDA_VISIBLE_DEVICES": ""})
    device = replace(here.device, clocks_MHz=clocks, default_clock_MHz=clocks[-1])
    runner = real_runner(
        folder,
        shared=shared,
        cluster=replace(here, device=device, clock_control=True, devices_per_node=2),
        meter=NvmlMeter(environ={}),
        governor=NvmlGovernor(environ={}, guarded=guarded),
    )
    # A meter that lost joules is opened anew, as one that the runner opened itself.
    runner._open_meter = lambda: NvmlMeter(environ={})
    return runner


def _device(
    strike: Strike,
    kind: str | None,
    word: str,
    folder: Path,
    *,
    gpu: TwinGpu = TwinGpu(),  # noqa: B008 - frozen
    **options: Any,
) -> Outcome:
    """Run a study over two GPUs that are made so; the other arguments are those of `_struck`."""
    with on_twin_node(folder, [gpu, gpu]) as node:
        return _struck(node, strike, kind, word, folder, **options)


def _struck(
    node: TwinNode,
    strike: Strike,
    kind: str | None,
    word: str,
    folder: Path,
    *,
    later: bool = False,
    mend: Strike | None = None,
    probes: int = 3,
    window: WindowPolicy = QUICK,
    for_good: bool = False,
    never: str = "",
) -> Outcome:
    """Run a study over two GPUs, one of which is struck in the second probe.

    Args:
        node: where it runs.
        strike: causes the fault.
        kind: of the second probe's failure; None where it is to measure.
        word: of what is said: in the failure, or among the flags.
        folder: the fault's.
        later: strike in the middle of the probe instead of before it.
        mend: ends the fault; the study is then asked again. None: it ends by itself.
        probes: how many it should have in the end.
        window: of each clock.
        for_good: nothing mends it, so the search is to end by itself and say why.
        never: a word that no flag may have.
    """
    before = stands(node)
    timers: list[threading.Timer] = []

    def cause(request: ProbeRequest) -> None:
        if request.probe_id != "p0001":
            return
        if later:
            timers.append(threading.Timer(STRIKES_S, strike, [node]))
            timers[0].start()
        else:
            strike(node)

    def session() -> None:
        runner = clocked(folder, CLOCKS)
        with keep_server():
            study(folder, runner, space=SPACE, before=cause, probes=probes, window=window)

    session()
    if mend is not None:
        for timer in timers:
            timer.join()
        mend(node)
        session()
    records = recorded(folder)
    struck = records["p0001"]
    failure = struck.failure
    flags = sorted({flag for m in struck.measurements for flag in m.flags})
    said = (
        failure.message if failure else "; ".join(flag for flag in flags if word and word in flag)
    )
    others = [r.failure for name, r in records.items() if name != "p0001" and not r.ok]
    stopped = str((run_of(folder).read_study() or {}).get("ended", {}).get("stopped"))
    return outcome_of(
        folder,
        ((failure.kind if failure else None) == kind, f"it is a {failure}"),
        (word in said, f"it said {said!r}, flags {flags}"),
        (mend is not None or for_good or not others, f"others failed: {others}"),
        (for_good or records[max(records)].ok, f"the last failed: {records[max(records)]}"),
        (not for_good or "because of the node" in stopped, f"it stopped so: {stopped}"),
        (not never or not any(never in flag for flag in flags), f"flags {flags}"),
        said=said or "nothing: the probe was measured",
        clocks_wrong=sum(a != b for a, b in zip(before, stands(node), strict=True)),
        processes_left=wait_gone(*server_mark()),
    )


def _fails(name: str, code: int, *, first: int = 1, times: int = 1) -> Strike:
    return lambda node: node.fail(name, code, first=first, times=times)


_UNKNOWN = pynvml.NVML_ERROR_UNKNOWN
#: Its counter wraps after some 2 s of 380 W: in the middle of the study's first probes.
WRAPS = TwinGpu(counter_modulus_mJ=1 << 32, counter_start_mJ=(1 << 32) - 1_500_000)

#: (name, strike, kind of the second probe's failure, word of what is said, options of `_struck`).
STRIKES: tuple[tuple[str, Strike, str | None, str, dict[str, Any]], ...] = (
    (
        "clock change refused half-way",
        _fails("nvmlDeviceSetGpuLockedClocks", _UNKNOWN, first=2),
        *("node", "did not take", {}),
    ),
    (
        "clock is put back at the third try",
        _fails("nvmlDeviceResetGpuLockedClocks", _UNKNOWN, times=2),
        *(None, "", {}),
    ),
    (
        "permission to set clocks is withdrawn",
        lambda node: node.permit(False),
        *("not_taken", "ermission", {"mend": lambda node: node.permit(True), "probes": 9}),
    ),
    (
        "NVML returns errors for the energy",
        _fails("nvmlDeviceGetTotalEnergyConsumption", _UNKNOWN, first=8, times=30),
        *("node", "does not tell the GPUs' energy", {}),
    ),
    ("energy counter wraps", lambda node: None, None, "", {"never": "differ", "gpu": WRAPS}),
    (
        "energy counter goes backwards",
        TwinNode.reset_counter,
        "node",
        "went backwards",
        {"later": True},
    ),
    (
        "energy counter stands still",
        TwinNode.stall,
        *("node", "has not moved"),
        {"probes": 6, "window": replace(QUICK, min_s=3.0, max_s=3.5), "for_good": True},
    ),
    (
        "GPU falls off the bus",
        lambda node: node.set(1, lost=1),
        *("node", "lost", {"later": True, "mend": lambda node: node.set(1, lost=0), "probes": 9}),
    ),
    ("thermal throttling", lambda node: node.set(heat_MHz=600), None, "throttl", {}),
)
FAULTS: tuple[Fault, ...] = tuple(
    Fault(name, partial(_device, strike, kind, word, **options), fast=False)
    for name, strike, kind, word, options in STRIKES
)
