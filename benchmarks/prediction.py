"""Predictions: their speed, the coverage of their intervals, and avoided out-of-memory failures.

Speed: 100,000 configurations on one core, including reading them (target: 1 s), a plan of the 72B
model on JUPITER and a study over 1,024 GPUs with 16 probes in flight on simulated time (target: one
minute each). Coverage: the share of held-out figures inside 90 % intervals (target: 85 to 95 %), on
recorded tables, on simulated clusters, and from 8 GPUs to 64 and 512. Memory: the number of probes
that run out of memory, with and without what the study learns about memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.validation import coverage, out_of_memory, scale_out
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space

REPOSITORY = Path(__file__).resolve().parent.parent
COUNT = 100_000
#: Nodes of four that make 1,024 GPUs, and probes in flight there.
NODES, IN_FLIGHT = 256, 16


def speed() -> list[Figure]:
    """Every launch of the full space of a 7B model on 32 H100, each at several clocks, in the
    enumeration's order as a study would; then a launch of its own for every configuration."""
    job, cluster = load_job("qwen2.5-7b"), load_cluster("h100-32")
    launches = load_space("full").candidates(job, cluster).launches
    lives = [
        Settings(clock_MHz=clock) for clock in cluster.clocks_MHz[:: len(cluster.clocks_MHz) // 24]
    ]
    configurations = [Configuration(launch, live) for launch in launches for live in lives][:COUNT]
    used = len({configuration.launch for configuration in configurations})
    seconds = []
    for _ in range(5):
        model = AnalyticModel(job, cluster)
        began = time.perf_counter()
        model.predict(configurations)
        seconds.append(time.perf_counter() - began)
    print(f"{len(configurations):,} configurations of {used:,} launches, five times")
    apart = [Configuration(launch) for launch in launches]
    model = AnalyticModel(job, cluster)
    began = time.perf_counter()
    model.predict(apart)
    each = (time.perf_counter() - began) / len(apart)
    return [
        Figure("predict_100000_s", min(seconds), "s"),
        Figure("predict_100000_worst_s", max(seconds), "s"),
        Figure("predict_100000_launches_s", 1e5 * each, "s"),
    ]


def studies() -> list[Figure]:
    """A plan of lmm-72b on JUPITER, and a study over 1,024 GPUs, both with their report."""
    from tuner.api import optimize
    from tuner.executors.local import SimulatedExecutor
    from tuner.models.simulated import SimulatedRunner

    found = []
    jupiter = load_cluster("jupiter-32")
    large = replace(jupiter, nodes=NODES)
    runner = SimulatedRunner(load_job("lmm-7b"), large)
    for name, job, cluster, executor in (
        ("plan_jupiter_72b", "lmm-72b", jupiter, "simulated"),
        ("study_1024_gpus", "lmm-7b", large, SimulatedExecutor(runner, capacity=IN_FLIGHT)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            began, used = time.perf_counter(), time.process_time()
            result = optimize(job, cluster=cluster, executor=executor, runs_dir=folder)
            wall, cpu = time.perf_counter() - began, time.process_time() - used
        print(
            f"{job} on {cluster.devices} x {cluster.device.name}: {result.spent.probes} probes, "
            f"{result.about['candidates']} configurations, {wall:.1f} s ({cpu:.1f} s of processor)"
        )
        found += [Figure(f"{name}_wall_s", wall, "s"), Figure(f"{name}_cpu_s", cpu, "s")]
    return found


def _printed(made: tuple[list[str], list[Figure]]) -> list[Figure]:
    lines, figures = made
    print("\n".join(lines), flush=True)
    return figures


def main() -> None:
    parser = arguments("how fast, how sure and how careful the predictions are")
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared")
    parser.add_argument("--seeds", type=int, default=2, help="repeats of each held-out split")
    parts: dict[str, tuple[str, Callable[[], list[Figure]]]] = {
        "speed": ("predicting 100,000 configurations", speed),
        "studies": ("studies on simulated time", studies),
        "coverage": (
            "90 % intervals of the surrogates, held-out points",
            lambda: _printed(coverage.compare(options.shared, seeds=options.seeds)),
        ),
        "scale_out": (
            "90 % intervals from 8 GPUs to more, on clusters that the models misjudge",
            lambda: _printed(scale_out.compare()),
        ),
        "out_of_memory": (
            "probes that run out of memory on clusters whose memory the models misjudge",
            lambda: _printed(out_of_memory.compare(seeds=options.seeds)),
        ),
    }
    parser.add_argument("--only", choices=parts, help="one part")
    options = parser.parse_args()
    figures = []
    for name, (title, part) in parts.items():
        if options.only in (None, name):
            print(f"\n== {title}\n", flush=True)
            figures += part()
    publish(figures, options.json)


if __name__ == "__main__":
    main()
