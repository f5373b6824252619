"""How long a plan takes and how much memory."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish

JOB, CLUSTER = "qwen2.5-7b", "h100-32"
#: Numbers of GPUs of the large plan.
SIZES = (8, 16, 32, 64, 128, 256)
#: The space of the large plan: launches as in `full`, more clocks and limits.
LARGE = """
what = "every launch of the space full, with more clocks and power limits"

[knobs]
data_parallel = "auto"
tensor_parallel = "auto"
pipeline_parallel = "auto"
sequence_parallel = "auto"
expert_parallel = "auto"
micro_batch = { max = 64 }
zero_stage = [0, 1, 2, 3]
optimizer_offload = ["none", "cpu", "async"]
activation_checkpointing = ["none", "every_2", "full"]
parameter_offload = ["none", "cpu"]
activation_offload = ["none", "sync", "async"]
clock_MHz = { count = 48, lowest_share = 0.3 }
power_limit_W = { count = 7 }
"""


def _one(space: str, gpus: Sequence[int]) -> dict[str, float]:
    """Make one plan in this process; its seconds, its size and the peak of its memory."""
    import resource

    from tuner.planner.plan import plan_table
    from tuner.search_spaces.cluster import load_cluster
    from tuner.search_spaces.job import load_job
    from tuner.search_spaces.space import default_configuration, load_space

    job, cluster = load_job(JOB), load_cluster(CLUSTER)
    baseline = default_configuration(job, cluster)
    started, processor = time.perf_counter(), time.process_time()
    table = plan_table(job, cluster, load_space(space).same_training(), baseline, gpus=gpus)
    return {
        "seconds": time.perf_counter() - started,
        "processor_s": time.process_time() - processor,
        "configurations": table.configurations,
        "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _apart(space: str, gpus: Sequence[int] = ()) -> dict[str, float]:
    """Make one plan in a process of its own, so that its peak is its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planning", "--one", space, *map(str, gpus)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = arguments(__doc__, "planning")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--no-large", action="store_true", help="leave out the large plan")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(_one(args.one[0], [int(n) for n in args.one[1:]])))
        return
    small = _apart("full")
    print(
        f"{small['configurations']:,.0f} configurations in {small['seconds']:.2f} s "
        f"({small['processor_s']:.2f} s of processor time)",
        flush=True,
    )
    per_100k = small["seconds"] * 1e5 / small["configurations"]
    figures = [
        Figure("plan_100k_s", per_100k, "s"),
        Figure("plan_100k_processor_s", small["processor_s"] * 1e5 / small["configurations"], "s"),
    ]
    if not args.no_large:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "large.toml"
            path.write_text(LARGE)
            large = _apart(str(path), SIZES)
        print(
            f"{large['configurations']:,.0f} configurations in {large['seconds']:.1f} s "
            f"({large['processor_s']:.1f} s of processor time), peak {large['peak_MiB']:.0f} MiB",
            flush=True,
        )
        per_5m = 5e6 / large["configurations"]
        figures += [
            Figure("plan_5m_s", large["seconds"] * per_5m, "s"),
            Figure("plan_5m_processor_s", large["processor_s"] * per_5m, "s"),
            Figure("plan_5m_peak_MiB", large["peak_MiB"], "MiB"),
        ]
    publish(figures, args.json)


if __name__ == "__main__":
    main()
