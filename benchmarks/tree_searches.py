"""Searches by whatever tree is on PYTHONPATH: a script of `benchmarks.same_search --against`.

It uses the public `tuner.replay` and `tuner.optimize`, defaults, seeds, and the trace that a run
leaves, so that one script serves trees whose other interfaces differ. It takes searches as JSON
objects, one a line, and writes for each a line with its probes: the settings of each window in
order, with its step time and energy, or the error that ended the search.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tuner


def searched(search: dict[str, Any], runs_dir: str) -> Any:
    """Make a search; return its result."""
    settings = tuner.SearchSettings(seed=search["seed"], max_probes=search.get("max_probes"))
    options = {"runs_dir": runs_dir, "name": "run", "report": False, "progress": False}
    options |= {"search": settings, **search.get("options", {})}
    if "table" in search:
        return tuner.replay(search["table"], group=search["group"], **options)
    from tuner.executors.local import SimulatedExecutor
    from tuner.testing.studies import ModelRunner

    job, cluster = search["job"], search["cluster"]
    executor = SimulatedExecutor(ModelRunner(job, cluster))
    return tuner.optimize(job, cluster=cluster, executor=executor, **options)


def probes(search: dict[str, Any]) -> list[list[Any]]:
    """Return (settings, step time s, energy J) of each window of a search, in order."""
    with TemporaryDirectory() as runs_dir:
        result = searched(search, runs_dir)
        trace = Path(result.run_dir) / "trace" / "probes.jsonl"
        records = [json.loads(line) for line in trace.read_text().splitlines()]
    return [
        [
            {**record["request"]["launch"], **window["live"]},
            window["step_time_s"],
            window["energy_J"],
        ]
        for record in records
        for window in record["measurements"]
    ]


def main() -> None:
    for line in sys.stdin:
        search = json.loads(line)
        try:
            answer = {"name": search["name"], "probes": probes(search)}
        except Exception as error:  # of another tree, whose errors this one does not know
            answer = {"name": search["name"], "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
