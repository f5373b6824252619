"""Metering: its overhead and its lost samples; `benchmarks.twin` has the error of its energy.

(1) Real training steps with and without metering alternately: the overhead with its interval.
(2) The power timeline at 100 ms for ten minutes while every core is loaded: samples lost.
Targets: under 0.1 % overhead, no sample lost.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from scipy.stats import ttest_1samp

from benchmarks.figures import Figure, arguments, publish
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import default_configuration
from tuner.workload.node.measure.window import Conductor
from tuner.workload.node.meters.base import Timeline
from tuner.workload.node.platforms import detect_cluster, platform_of
from tuner.workload.node.probe_run import Probe
from tuner.workload.node.rank_launch import ProbeNode
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRequest, WindowPolicy

#: Keeps one core busy until it is ended, or its parent is gone.
BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))\n"


def lost_samples(seconds: float) -> list[Figure]:
    """The real timeline of this machine's meter at 100 ms while every core is busy."""
    cores = len(os.sched_getaffinity(0))
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(cores)]
    meter = platform_of(cluster := detect_cluster()).open_meter(cluster)
    try:
        timeline = Timeline(meter)
        time.sleep(seconds)
        samples = timeline.stop()
    finally:
        meter.close()
        for burner in burners:
            burner.kill()
            burner.wait()
    gaps = [b.time_s - a.time_s for a, b in itertools.pairwise(samples)]
    print(
        f"{len(samples)} samples in {seconds:.0f} s on {cores} loaded cores: {timeline.lost} lost, "
        f"longest gap {max(gaps):.3f} s",
        flush=True,
    )
    return [
        Figure("timeline_length", seconds, "s"),
        Figure("samples_taken", len(samples), "count"),
        Figure("samples_lost", timeline.lost, "count"),
        Figure("longest_gap", max(gaps), "s"),
        Figure("sampling_core_share", 100 * timeline.busy_s / seconds, "%"),
    ]


class MeteredInTurn(Probe):
    """Probe of `pairs` of blocks, with metering and without, in random order as drift may fall."""

    def __init__(
        self, node: ProbeNode, request: ProbeRequest, pairs: int, block_s: float, found: list[float]
    ) -> None:
        super().__init__(node, request)
        self._pairs, self._block_s, self._found = pairs, block_s, found

    def measure(
        self, conductor: Conductor, timeline: Timeline, step_time_s: float, notes: Sequence[str]
    ) -> None:
        super().measure(conductor, timeline, step_time_s, notes)
        timeline.stop()
        steps = max(1, round(self._block_s / step_time_s))
        order = random.Random(self.request.probe_id)
        for _ in range(self._pairs):
            took_s = {}
            for metered in order.sample((True, False), 2):
                timeline = Timeline(self.meter) if metered else timeline
                took_s[metered] = sum(conductor.run(steps))
                timeline.stop()
            self._found.append(math.log(took_s[True] / took_s[False]))


def overhead(pairs: int, block_s: float) -> list[Figure]:
    """Return what metering costs the steps of the built-in program, by a paired t-test."""
    job, cluster = load_job(), detect_cluster()
    found: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(LocalRunner(job, cluster, run_dir=folder, announce=print)) as runner,
    ):
        runner.prepare()
        request = ProbeRequest(
            "metering",
            default_configuration(job, cluster).launch,
            window=WindowPolicy(),
            time_limit_s=120.0 + 4 * pairs * block_s,
        )
        kind = partial(MeteredInTurn, pairs=pairs, block_s=block_s, found=found)
        record = runner.run(request, kind)
    if record.failure is not None:
        raise RuntimeError(f"the probe failed: {record.failure.message}")
    interval = ttest_1samp(found, 0.0).confidence_interval(0.95)
    low, cost, high = (100 * math.expm1(x) for x in sorted((statistics.fmean(found), *interval)))
    return [
        Figure("overhead", cost, "%"),
        Figure("overhead_low", low, "%"),
        Figure("overhead_high", high, "%"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("metering: its cost and its losses")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the timeline; 0 skips")
    parser.add_argument("--pairs", type=int, default=40, help="at least 2; 0 skips")
    parser.add_argument("--block-s", type=float, default=3.0, help="length of each half of a pair")
    options = parser.parse_args(argv)
    figures = overhead(options.pairs, options.block_s) if options.pairs else []
    figures += lost_samples(options.seconds) if options.seconds else []
    publish(figures, options.json)


if __name__ == "__main__":
    main()
