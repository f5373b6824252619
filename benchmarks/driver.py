"""The driver's own time: plan, record and answer, without any training."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import tuner
from benchmarks.figures import Figure, arguments, publish
from tests.support.studies import LONG_JOB, FormulaRunner
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.settings import SearchSettings
from tuner.workload.records.trace import read_trace


def cpu_s_of_search(seed: int, probes: int = 8) -> float:
    """Return the processor's seconds of a search whose probes a model answers at once."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        result = tuner.optimize(
            LONG_JOB,
            cluster="cpu-2",
            executor=SimulatedExecutor(FormulaRunner()),
            search=SearchSettings(seed=seed, max_probes=probes),
            runs_dir=folder,
            report=False,
            progress=False,
        )
        spent_s = time.process_time() - began
        made = len(read_trace(Path(result.run_dir) / "trace" / "probes.jsonl").records)
    if made != probes:
        raise RuntimeError(f"the search made {made} probes instead of {probes}")
    return spent_s


def main() -> None:
    parser = arguments(__doc__, "driver")
    parser.add_argument("--searches", type=int, default=5, help="searches of eight probes")
    options = parser.parse_args()
    cpu_s_of_search(seed=0, probes=2)  # imports, and tables that are read once
    searches_s = [cpu_s_of_search(seed) for seed in range(options.searches)]
    print(f"CPU seconds of searches of eight probes: {' '.join(f'{s:.2f}' for s in searches_s)}")
    publish([Figure("driver_cpu_s_8_probes", statistics.median(searches_s), "s")], options.json)


if __name__ == "__main__":
    main()
