"""Launch time of a probe: from the request to the first measured step.

The first probe pays for interpreter, imports and op builds; later ones fork from a process that has
paid already. The same probes with a fresh interpreter per rank run beside them. The launch includes
building the model, `deepspeed.initialize`, the first step and the warm-up steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time

from benchmarks.figures import Figure, arguments, publish
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRecord, ProbeRequest, WindowPolicy

QUICK = WindowPolicy(min_s=0.5, min_steps=3, max_s=1.0)


def kinds(ranks: int) -> list[Configuration]:
    """Launch settings that differ in what they import and build."""
    return [
        Configuration.of(data_parallel=ranks, micro_batch=4),
        Configuration.of(data_parallel=1, micro_batch=4),
        Configuration.of(data_parallel=ranks, micro_batch=4, zero_stage=1),
        Configuration.of(data_parallel=ranks, micro_batch=4, zero_stage=3),
        Configuration.of(data_parallel=ranks, micro_batch=4, activation_checkpointing="full"),
    ]


def run(runner: LocalRunner, configuration: Configuration, name: str) -> ProbeRecord:
    record = runner.run(ProbeRequest(name, configuration.launch, window=QUICK))
    if record.failure is not None:
        raise SystemExit(f"{configuration.key}: {record.failure.message}")
    warm = record.launch_s
    print(f"{name:12} {configuration.key:68} {warm:6.2f} s", flush=True)
    return record


def main() -> None:
    parser = arguments(__doc__, "launch")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cluster = detect_cluster()
    ranks = min(2, cluster.devices_per_node)
    job = load_job()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        print("launch: from the request to the first measured step")
        runner = LocalRunner(job, cluster, run_dir=folder, announce=print)
        began = time.monotonic()
        first = run(runner, kinds(ranks)[0], "first")
        figures += [Figure("first_probe_s", first.launch_s, "s")]
        later = [
            run(runner, configuration, f"later{number}").launch_s
            for number in range(options.rounds)
            for configuration in kinds(ranks)
        ]
        figures += [
            Figure("later_probes_median_s", statistics.median(later), "s"),
            Figure("later_probes_worst_s", max(later), "s"),
        ]
        runner.close()
        print(f"({time.monotonic() - began:.0f} s so far)")
        fresh = LocalRunner(job, cluster, run_dir=folder, new_interpreter=True)
        fresh.prepare()
        new = [run(fresh, c, f"fresh{n}").launch_s for n, c in enumerate(kinds(ranks))]
        fresh.close()
    figures += [
        Figure("fresh_interpreter_median_s", statistics.median(new), "s"),
        Figure("forked_over_fresh", statistics.median(later) / statistics.median(new), "ratio"),
    ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
