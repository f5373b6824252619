"""How long it takes to predict 100,000 configurations on one core, reading them included.

Aim: a second. The configurations are every launch of the full space of a 7B model on 32 H100, each
at several clocks, taken in the enumeration's order as a study would.
"""

from __future__ import annotations

import time

from benchmarks.figures import Figure, arguments, publish
from models.analytic import AnalyticModel
from search_spaces.cluster import load_cluster
from search_spaces.configuration import Configuration, Settings
from search_spaces.job import load_job
from search_spaces.space import load_space

COUNT = 100_000


def main() -> None:
    options = arguments("predicting 100,000 configurations").parse_args()
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
    figures = [
        Figure("predict_100000_s", min(seconds), "s"),
        Figure("predict_100000_worst_s", max(seconds), "s"),
    ]
    # The hardest case: a launch of its own for every configuration.
    apart = [Configuration(launch) for launch in launches]
    model = AnalyticModel(job, cluster)
    began = time.perf_counter()
    model.predict(apart)
    each = (time.perf_counter() - began) / len(apart)
    figures.append(Figure("predict_100000_launches_s", 1e5 * each, "s"))
    publish(figures, options.json)


if __name__ == "__main__":
    main()
