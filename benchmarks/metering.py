"""Overhead of metering, in real training steps; `benchmarks.twin` has the error of its energy."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from scipy.stats import ttest_1samp

from benchmarks.figures import Figure, arguments, publish
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import default_configuration
from tuner.workload.node.measure.window import Conductor
from tuner.workload.node.meters.base import Timeline
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.probe_run import Probe
from tuner.workload.node.rank_launch import ProbeNode
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRequest, WindowPolicy


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
    parser = arguments(__doc__, "metering")
    parser.add_argument("--pairs", type=int, default=40, help="at least 2 (default: 40)")
    parser.add_argument("--block-s", type=float, default=3.0, help="length of each half of a pair")
    options = parser.parse_args(argv)
    publish(overhead(options.pairs, options.block_s), options.json)


if __name__ == "__main__":
    main()
