"""Metering: its overhead, its lost samples, and the error of its energy.

Three parts. (1) The reported energy of 1,000 random windows on fake GPUs of exactly known power:
steps with phases, idle gaps, constant power, counters updated every 20 to 100 ms, with and without
wrap-around, and GPUs without a counter; for comparison the error of the plain difference of the
counter (the fake's power sensor is exact; a real one adds its own error). (2) The power timeline at
100 ms for ten minutes while every core is loaded: samples lost. (3) Real training steps with and
without metering alternately: the overhead with its interval, and the processor time of sampling.
Targets: under 0.1 % overhead, no sample lost.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.figures import Figure, arguments, publish
from tuner.workload.meters.nvml import NvmlMeter

#: Keeps one core busy until it is ended, or its parent is gone.
BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))\n"


@dataclass(frozen=True)
class _Window:
    """One random window's relative errors.

    Attributes:
        error: of the meter's energy between two boundaries.
        plain: of the bare difference of the counters at the same times; None without counters.
        kind: "steps", "gaps" or "constant".
    """

    error: float
    plain: float | None
    kind: str


def _segments(draw: random.Random, kind: str, length_s: float) -> list[tuple[float, float]]:
    """(seconds, utilisation) of a window: phases of steps, with idle gaps between, or constant."""
    if kind == "constant":
        return [(length_s, draw.uniform(0.2, 1.0))]
    phases = [(draw.uniform(0.02, 0.4), draw.uniform(0.1, 1.0)) for _ in range(draw.randint(2, 5))]
    if kind == "gaps":
        phases.append((draw.uniform(0.05, 0.8), 0.0))
    step_s = sum(seconds for seconds, _ in phases)
    return phases * max(3, round(length_s / step_s))


def one_window(seed: int) -> _Window:
    """Meter one random window, from boundary to boundary, on fake GPUs.

    As in a probe the GPUs are idle while the ranks wait at a boundary.
    """
    from tuner.testing.fake_nvml import FakeClock, FakeGpu, FakeNVML

    draw = random.Random(seed)
    kind = draw.choice(("steps", "gaps", "constant"))
    counted = draw.random() < 0.85
    wraps = counted and draw.random() < 0.3
    clock = FakeClock()
    gpus = []
    for _ in range(draw.choice((1, 1, 2, 4))):
        near_mJ = 2**32 - draw.randint(1000, 2_000_000)
        gpus.append(
            FakeGpu(
                load=((0.0, 0.0),),
                peak_W=draw.uniform(200.0, 700.0),
                limit_W=1000.0,
                max_limit_W=1000.0,
                idle_W=draw.uniform(40.0, 120.0),
                has_counter=counted,
                counter_period_s=draw.uniform(0.02, 0.1),
                counter_start_mJ=near_mJ if wraps else draw.randint(0, 2**31),
                counter_modulus_mJ=2**32 if wraps else None,
            )
        )
    fake = FakeNVML(gpus, clock=clock)
    meter = NvmlMeter(
        nvml=fake, clock=clock, sleep=clock.advance, environ={}, sample_period_s=3600.0
    )

    def load(share: float | None) -> None:
        for gpu in range(len(gpus)):
            fake.event("load", share, gpu=gpu)

    def advance(seconds: float) -> None:
        until_s = clock.now_s + seconds
        while clock.now_s < until_s - 1e-9:
            # A meter that integrates looks every 50 ms by itself; the clock stands for its thread.
            clock.advance(min(0.05, until_s - clock.now_s) if not counted else seconds)
            if not counted:
                meter.read()

    try:
        advance(draw.uniform(0.3, 0.9))
        opened = meter.boundary(opens=True)
        bare_J = meter.read().energy_J
        start_s = clock.now_s
        for seconds, share in _segments(draw, kind, draw.uniform(2.0, 10.0)):
            load(share)
            advance(seconds)
        load(0.0)
        end_s = clock.now_s
        bare_J = meter.read().energy_J - bare_J
        closed = meter.boundary(opens=False)
        truth_J = fake.true_energy_J(start_s, end_s)
    finally:
        meter.close()
    error = (closed.energy_J - opened.energy_J) / truth_J - 1
    return _Window(error, bare_J / truth_J - 1 if counted else None, kind)


def accuracy(windows: int) -> list[Figure]:
    began = time.monotonic()
    every = [one_window(seed) for seed in range(windows)]
    sizes = [abs(window.error) for window in every]
    plain = [abs(window.plain) for window in every if window.plain is not None]
    aligned = [abs(window.error) for window in every if window.plain is not None]
    sampled = [abs(window.error) for window in every if window.plain is None]
    for kind in ("steps", "gaps", "constant"):
        mine = [abs(window.error) for window in every if window.kind == kind]
        print(
            f"{kind:9} {len(mine):5} windows, error median {100 * statistics.median(mine):.4f} %, "
            f"worst {100 * max(mine):.4f} %"
        )
    print(f"({time.monotonic() - began:.0f} s for {windows} windows of 2 to 10 s)", flush=True)

    def both(name: str, values: list[float]) -> list[Figure]:
        return [
            Figure(f"{name}_median", 100 * statistics.median(values), "%"),
            Figure(f"{name}_worst", 100 * max(values), "%"),
        ]

    return [
        Figure("windows", windows, "count"),
        *both("energy_error", sizes),
        *both("energy_error_by_counter", aligned),
        *both("energy_error_by_bare_counter", plain),
        *both("energy_error_by_sampled_power", sampled),
    ]


def lost_samples(seconds: float, niceness: int) -> list[Figure]:
    """The real timeline of this machine's meter at 100 ms while every core is busy."""
    from tuner.workload.meters import open_meter
    from tuner.workload.meters.timeline import Timeline
    from tuner.workload.node.machine import detect_cluster

    cores = len(os.sched_getaffinity(0))
    burners = [
        subprocess.Popen(["nice", "-n", str(niceness), sys.executable, "-c", BURN])
        for _ in range(cores)
    ]
    meter = open_meter(detect_cluster())
    try:
        timeline = Timeline(meter)
        time.sleep(seconds)
        samples = timeline.stop()
    finally:
        meter.close()
        for burner in burners:
            burner.kill()
            burner.wait()
    load = os.getloadavg()[0]
    gaps = [b.time_s - a.time_s for a, b in itertools.pairwise(samples)]
    print(
        f"{len(samples)} samples in {seconds:.0f} s on {cores} loaded cores (load {load:.1f}, "
        f"burners at nice {niceness}): {timeline.lost} lost, longest gap {max(gaps):.3f} s",
        flush=True,
    )
    return [
        Figure("timeline_length", seconds, "s"),
        Figure("samples_taken", len(samples), "count"),
        Figure("samples_lost", timeline.lost, "count"),
        Figure("longest_gap", max(gaps), "s"),
        Figure("sampling_core_share", 100 * timeline.busy_s / seconds, "%"),
    ]


def overhead(pairs: int, block_s: float) -> list[Figure]:
    from tuner.results.calibration import calibrate

    with tempfile.TemporaryDirectory() as folder:
        found = calibrate(runs_dir=folder, pairs=pairs, block_s=block_s, say=print)
    print("\n".join(found.lines()), flush=True)
    return [
        Figure("metering_pairs", pairs, "count"),
        Figure("overhead", 100 * found.overhead.relative, "%"),
        Figure("overhead_low", 100 * found.overhead.low, "%"),
        Figure("overhead_high", 100 * found.overhead.high, "%"),
        Figure("metering_core_share", 100 * found.core_share, "%"),
        Figure("metering_samples_lost", found.lost, "count"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("metering: its cost, its losses, its error")
    parser.add_argument("--windows", type=int, default=1000, help="random windows; 0 skips")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the timeline; 0 skips")
    parser.add_argument("--nice", type=int, default=0, help="of the processes that load the cores")
    parser.add_argument("--pairs", type=int, default=40, help="with and without; 0 skips")
    parser.add_argument("--block-s", type=float, default=3.0, help="length of each half of a pair")
    options = parser.parse_args(argv)
    parts: list[tuple[bool, Callable[[], list[Figure]]]] = [
        (options.windows > 0, lambda: accuracy(options.windows)),
        (options.pairs > 0, lambda: overhead(options.pairs, options.block_s)),
        (options.seconds > 0, lambda: lost_samples(options.seconds, options.nice)),
    ]
    figures = [figure for wanted, part in parts if wanted for figure in part()]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
