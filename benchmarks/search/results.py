"""Table of results in a Markdown file, rewritten from the runs on jackknifed tables."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.figures import ROOT
from benchmarks.search.jackknife import Jackknife, matched_kJ
from benchmarks.search.names import OURS, STOCK
from benchmarks.search.problems import SPLITS, load_problem
from benchmarks.search.samplers import SWEEPING

#: Comments between which the table stands.
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def _commit() -> str:
    """Return the short commit of the working tree, with "+" if it has changes; "" outside git."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _kind(name: str) -> str:
    if name in SWEEPING:
        return "sweeps launches"
    return "a launch a point" if name in STOCK else "this project's"


def results_table(made: Jackknife) -> str:
    """Return the results as Markdown: joules over the oracle's, the best on the last split first.

    In brackets are the joules until each point of the front is matched.
    """
    splits = [split for split in SPLITS if made.groups(split)]
    head = [
        "sampler",
        "kind",
        *(f"{s.replace('_', '-')} groups ({len(made.groups(s))})" for s in splits),
    ]
    order = sorted(made.samplers, key=lambda name: made.mean_over_oracle(splits[-1], name))
    rows = []
    for name in order:
        cells = [
            f"{made.mean_over_oracle(split, name):.2f} "
            f"({made.mean_over_oracle(split, name, matched_kJ):.2f})"
            for split in splits
        ]
        rows.append([f"**{name}**" if name == OURS else name, _kind(name), *cells])
    problems = [problem for problems in made.groups().values() for problem in problems]
    tables = ", ".join(dict.fromkeys(load_problem(problem).name for problem in problems))
    count = len({problem.jackknife for problem in problems})
    commit = _commit()
    said = f"{tables}; {count} jackknifed tables of each group" + (commit and f"; commit {commit}")
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"{said}.", "", *(f"| {' | '.join(line)} |" for line in lines)])


def write_results(made: Jackknife, file: Path) -> None:
    """Replace what stands between `BEGIN` and `END` in a file by the results.

    Raises:
        ValueError: the file lacks one of the comments.
    """
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file} has no {BEGIN} and {END}; the results go between them")
    made_of = f"{before}{BEGIN}\n\n{results_table(made)}\n\n{END}{after}"
    file.write_text(made_of, encoding="utf-8")
