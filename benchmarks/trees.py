"""Searches of this tree and of another one, such as the commit before a change of the planner.

Each tree makes the same searches with its own code in a process of its own
(`benchmarks.tree_searches`). A search is the same if it measures the same settings in the same
order, and if its figures agree to `DIGITS`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.figures import ROOT
from tuner.workload.table import load_table

#: Relative difference of figures that are the same but for their last digits.
DIGITS = 1e-9
#: Jobs whose searches use the analytic models as a prior, with their clusters.
JOBS = (("tiny-gpt", "cpu-2"), ("opt-350m", "a100-8"), ("olmoe-1b-7b", "h100-32"))
#: Probes of such a search.
JOB_PROBES = 8


def searches_of_trees(tables: Sequence[Path], seeds: int) -> list[dict[str, Any]]:
    """Return searches of recorded tables and of jobs, as `benchmarks.tree_searches` takes them.

    Args:
        tables: folders; each is searched by each seed, and by the first one also with two probes
            in flight and with a deadline.
        seeds: number of seeds of each table and job.
    """
    found: list[dict[str, Any]] = []
    for folder in tables:
        table = load_table(folder)
        group = table.groups[0].name
        of_table = {"table": str(folder.resolve()), "group": group}
        ways: list[tuple[str, int, dict[str, Any]]] = [
            *(("", seed, {}) for seed in range(seeds)),
            ("two in flight", 0, {"in_flight": 2}),
            ("slowdown", 0, {"max_slowdown": "30%"}),
        ]
        for way, seed, options in ways:
            name = f"{folder.name} seed {seed} {way}".strip()
            found.append({"name": name, "seed": seed, "options": options, **of_table})
    for job, cluster in JOBS:
        for seed in range(seeds):
            of_job = {"job": job, "cluster": cluster, "max_probes": JOB_PROBES}
            found.append({"name": f"{job} on {cluster} seed {seed}", "seed": seed, **of_job})
    return found


def made_in(tree: Path, searches: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the answer of each search, made with the code of a tree.

    Raises:
        RuntimeError: the tree cannot make searches at all.
    """
    script = ROOT / "benchmarks" / "tree_searches.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script)],
        input="".join(json.dumps(search) + "\n" for search in searches),
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) != len(searches):
        raise RuntimeError(f"{tree}: made {len(answers)} of {len(searches)} searches")
    return {answer["name"]: answer for answer in answers}


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Return how two answers differ, in a few words; empty if they are the same.

    An error on either side is a difference: it hides whether the searches are the same.
    """
    for tree, answer in (("this tree", here), ("the other", there)):
        if "error" in answer:
            return f"{tree} ended with {answer['error']}"
    ours, theirs = here["probes"], there["probes"]
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine[0] != other[0]:
            return f"window {number} of {len(ours)} measures other settings"
        figures = zip(mine[1:], other[1:], strict=True)
        if not all(math.isclose(a, b, rel_tol=DIGITS) for a, b in figures):
            return f"window {number} of {len(ours)} has other figures"
    if len(ours) != len(theirs):
        return f"{len(ours)} windows instead of {len(theirs)}"
    return ""


def differing_from(other: Path, searches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Print how each search that differs from the other tree's does; return their names."""
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(made_in, (ROOT, other), (searches, searches))
    found = []
    for name, answer in here.items():
        if words := difference(answer, there[name]):
            found.append(name)
            print(f"{name}: {words}", flush=True)
    return found
