"""Searches that change with the CPU: the same seeds on the numerical kernels of four kinds of CPU.

With `--against FOLDER`, searches that change with the tree instead: the same seeds by this tree and
by another checkout, such as the commit before a change of the planner (`benchmarks.trees`).

The last bits of a matrix product or of an exponential depend on the CPU: OpenBLAS, NumPy and the C
library each choose their code by what it can do. A search has to make the same probes on each, in
the same order, and to end for the same reason. All searches are made once for each kind of CPU
(`CPUS`), each time in a process with the code for it and one thread. A kind that this CPU cannot
run is named and left out.

The searches: of the table in tests/data, of made-up tables whose settings are symmetric and
therefore tie, of simulated clusters without and with the analytic models, and of tables named on
the command line. Most end by the product's own rule; some are asked a question, or have two probes
in flight, and end at its answer or when the front is found.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from threadpoolctl import threadpool_info

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.search.names import OURS
from benchmarks.search.own_stop import own_search
from benchmarks.search.problems import Problem
from benchmarks.search.question import QUESTIONS, truth_of_question
from benchmarks.search.runner import ProblemSearch
from benchmarks.search.samplers import WITH_MODELS
from benchmarks.simulated_tables import PROBLEMS, record
from benchmarks.trees import differing_from, searches_of_trees
from tuner.workload.table import load_table

#: OpenBLAS's name of a kind of CPU -> features that NumPy and the C library may not use. OpenBLAS
#: has five sets of kernels for x86-64; Nehalem's are left out, and Zen has Haswell's.
CPUS = {
    "Prescott": ("X86_V3 X86_V4", "-AVX2,-FMA,-AVX512F"),
    "Sandybridge": ("X86_V3 X86_V4", "-AVX2,-FMA,-AVX512F"),
    "Haswell": ("X86_V4", "-AVX512F"),
    "SkylakeX": ("", ""),
}
RECORDED = ROOT / "tests/data/cpu-tiny-gpt"
#: Jackknifed tables of the recorded one, made-up tables, and simulated clusters of each problem
#: with the launches that each keeps.
JACKKNIFED, MADE_UP, SIMULATED, LAUNCHES = 14, 8, 3, 6
#: Measurements at most of a search that does not end by its own rule.
MOST = 16


@dataclass(frozen=True)
class Search:
    """One search of a recorded table.

    Attributes:
        problem: what is searched.
        seed: of the sampler and of the noise.
        sampler: one of the benchmark's samplers.
        question: of `benchmarks.search.question`; None for the front.
        in_flight: number of probes in flight.
    """

    problem: Problem
    seed: int = 0
    sampler: str = OURS
    question: str | None = None
    in_flight: int = 1

    @property
    def name(self) -> str:
        """Name of the search, the same in every process."""
        table = f"{self.problem.folder.name}/{self.problem.group} {self.problem.jackknife}"
        return f"{table} {self.seed} {self.sampler} {self.question} {self.in_flight}"

    def probes(self) -> list[str]:
        """Return the configurations in the order of their probes, and why the search ended."""
        if self.question is None and self.in_flight == 1:
            records, stop = own_search(self.problem, self.seed, self.sampler)
            return [*(c.key for each in records for c in each.request.configurations()), stop.kind]
        search = ProblemSearch(self.problem, OURS, self.seed, self.in_flight, False, None)
        if self.question is not None:
            search.ask(truth_of_question(self.problem, self.question).question)
        search.run(MOST)
        return [configuration.key for configuration in search.measured]


def made_up_table(folder: Path, seed: int) -> Path:
    """Write a table of batch sizes by power limits that follow a formula drawn by the seed."""
    dynamic_W, fixed_s, slope = np.random.default_rng(seed).uniform((20, 500, 0.4), (50, 4000, 1))
    folder.mkdir(parents=True)
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["batch_size", "power_limit_W", "time_s", "power_W"])
        for batch in (16, 32, 64, 128, 256):
            for limit_W in (100, 150, 200, 250):
                power_W = min(limit_W, 60 + dynamic_W * batch**0.3)
                time_s = (80 + fixed_s / batch + batch / 10) * (250 / power_W) ** slope
                writer.writerow([batch, limit_W, f"{time_s:.9g}", f"{power_W:.9g}"])
    (folder / "table.toml").write_text(
        f'name = "made up {seed}"\nlaunch_knobs = ["batch_size"]\n'
        'live_knobs = ["power_limit_W"]\ntime_s = "time_s"\npower_W = "power_W"\n'
        'energy_scope = "gpu"\n[noise]\ntime_cv = 0\npower_cv = 0\n'
        "[cost]\nlaunch_s = 30\nsettle_s = 2\nwindow_s = 5\n"
    )
    return folder


def searches(folder: Path, tables: Sequence[Path] = ()) -> Iterator[Search]:
    """Return all searches; the tables that are made are written into a folder if it lacks them.

    Args:
        folder: of the tables that are made.
        tables: recorded tables, each group of which is searched once, as recorded.
    """
    for seed in range(JACKKNIFED):
        yield Search(Problem(RECORDED, load_table(RECORDED).groups[0].name, seed), seed)
    for seed in range(MADE_UP):
        table = folder / f"made-up-{seed}"
        if not table.is_dir():
            made_up_table(table, seed)
        problem = Problem(table, load_table(table).groups[0].name)
        yield Search(problem, seed)
        yield Search(problem, seed, question=QUESTIONS[seed % len(QUESTIONS)])
        yield Search(problem, seed, in_flight=2)
    for job, cluster, space in PROBLEMS:
        for seed in range(SIMULATED):
            table = folder / f"{job}-{seed}"
            if not table.is_dir():
                drawn = {"spread": 0.2, "of_values": 0.05, "error": 0.03}
                record(table, job, cluster, space, most=LAUNCHES, seed=seed, **drawn)
            problem = Problem(table, load_table(table).groups[0].name)
            yield Search(problem, seed)
            yield Search(problem, seed, WITH_MODELS)
    for table in tables:
        for group in load_table(table).groups:
            yield Search(Problem(table, group.name))


def probes_on(cpu: str, command: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the probes of every search by a process with this CPU's code; None if it cannot run.

    Args:
        cpu: one of `CPUS`.
        command: arguments of this module that make it write the probes of each search as JSON.
    """
    without_numpy, without_libc = CPUS[cpu]
    environment = {
        **os.environ,
        "OPENBLAS_CORETYPE": cpu,
        "NPY_DISABLE_CPU_FEATURES": without_numpy,
        "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={without_libc}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.same_search", *command],
        env=environment,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    # An instruction that this CPU lacks ends the process by a signal.
    if done.returncode < 0:
        print(f"{cpu}: this CPU cannot run its kernels")
        return None
    done.check_returncode()
    kernels, probes = json.loads(done.stdout.splitlines()[-1])
    print(f"{cpu}: kernels {', '.join(kernels)}", flush=True)
    return dict(probes)


def differing(by_cpu: Mapping[str, Mapping[str, list[str]]]) -> list[str]:
    """Print each search that is not the same on all CPUs, with its first difference; return them.

    Args:
        by_cpu: CPU -> search -> its probes.
    """
    first, *others = by_cpu
    found = []
    for name, probes in by_cpu[first].items():
        different = {cpu: by_cpu[cpu][name] for cpu in others if by_cpu[cpu][name] != probes}
        if not different:
            continue
        found.append(name)
        print(f"{name}: {len(probes) - 1} steps")
        for cpu, there in different.items():
            same = [a == b for a, b in zip(probes, there, strict=False)]
            print(f"  {cpu} differs from {first} from step {[*same, False].index(False)} on")
    return found


def tables_to_compare(folder: Path, tables: Sequence[Path]) -> list[Path]:
    """Return the folders of recorded, made-up and simulated tables, two of each kind that is made.

    Args:
        folder: of the tables that are made.
        tables: further recorded tables.
    """
    kinds: dict[str, list[Path]] = {}
    for search in searches(folder):
        made = kinds.setdefault(search.problem.folder.name.rpartition("-")[0], [])
        if search.problem.folder not in made and len(made) < 2:
            made.append(search.problem.folder)
    return [*itertools.chain(*kinds.values()), *tables]


def against_a_tree(options: argparse.Namespace) -> None:
    """Compare the searches of this tree with those of another one."""
    with TemporaryDirectory() as folder:
        tables = tables_to_compare(Path(folder), options.tables)
        made = searches_of_trees(tables, options.seeds)
        found = differing_from(options.against.resolve(), made)
    publish(
        [
            Figure("searches", len(made), "count"),
            Figure("searches_that_differ", len(found), "count"),
        ],
        options.json,
    )


def main() -> None:
    parser = arguments("searches that change with the CPU")
    add = parser.add_argument
    add("tables", nargs="*", type=Path, metavar="TABLE_DIR", help="more recorded tables to search")
    add("--write-probes", type=Path, metavar="DIR", help="only make the searches here, with "
        "tables in this folder, and write their probes as JSON")  # fmt: skip
    add("--against", type=Path, metavar="FOLDER", help="compare with the tree in this folder "
        "instead of CPU with CPU")  # fmt: skip
    add("--seeds", type=int, default=2, help="seeds of each search of --against (default: 2)")
    options = parser.parse_args()
    if options.against is not None:
        if not (options.against / "tuner" / "__init__.py").is_file():
            parser.error(f"{options.against} is not a checkout of this repository")
        against_a_tree(options)
        return
    tables = [table.resolve() for table in options.tables]
    if options.write_probes is not None:
        probes = {each.name: each.probes() for each in searches(options.write_probes, tables)}
        kernels = sorted(
            {one["architecture"] for one in threadpool_info() if "openblas" in one["prefix"]}
        )
        print(json.dumps([kernels, probes]))
        return
    with TemporaryDirectory() as folder:
        names = [each.name for each in searches(Path(folder), tables)]
        command = [*map(str, tables), "--write-probes", folder]
        by_cpu = {cpu: probes for cpu in CPUS if (probes := probes_on(cpu, command)) is not None}
    found = differing(by_cpu)
    publish(
        [
            Figure("searches", len(names), "count"),
            Figure("kinds_of_cpu", len(by_cpu), "count"),
            Figure("searches_that_differ", len(found), "count"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
