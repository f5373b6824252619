"""The table of results, and the sampler that the README shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from benchmarks.search.__main__ import main
from benchmarks.search.ask_tell import PEERS
from benchmarks.search.problems import Problem
from benchmarks.search.results import BEGIN, END
from benchmarks.search.runner import run
from tuner.testing.studies import write_table

README = ROOT / "benchmarks" / "search" / "README.md"


def test_the_results_replace_those_between_the_comments(tmp_path: Path) -> None:
    folder, file = write_table(tmp_path / "table"), tmp_path / "README.md"
    file.write_text(f"before\n\n{BEGIN}\nold\n{END}\nafter\n")
    options = ["--samplers", "hill-climb", "tpe", "--jackknife", "2", "--seeds", "0"]
    main([str(folder), *options, "--results", str(file)])
    text = file.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "made-up; 2 jackknifed tables of each group" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    assert [cell.strip() for cell in rows[0]] == ["sampler", "kind", "held-out groups (1)"]
    scores = [float(row[2].split("(")[0]) for row in rows[2:]]
    assert len(scores) == 3
    assert scores == sorted(scores)
    kinds = {row[0].strip(): row[1].strip() for row in rows[2:]}
    assert kinds == {
        "**joulefront**": "this project's",
        "hill-climb": "sweeps launches",
        "tpe": "a launch a point",
    }


def test_a_file_without_the_comments_is_refused(tmp_path: Path) -> None:
    folder, file = write_table(tmp_path / "table"), tmp_path / "README.md"
    file.write_text("nothing")
    options = ["--samplers", "random", "--jackknife", "1", "--seeds", "0"]
    with pytest.raises(ValueError, match="the results go between them"):
        main([str(folder), *options, "--results", str(file)])


def test_the_readme_has_the_comments_and_a_sampler_of_twenty_lines_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = README.read_text()
    assert BEGIN in text
    assert END in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    body = code[code.index("@peer") :]
    assert len(body.strip().splitlines()) <= 20
    monkeypatch.setitem(PEERS, "my-sampler", None)  # removed again after the test
    exec(compile(code, "README", "exec"), {})
    made = run(Problem(write_table(tmp_path / "table"), "made-up"), "my-sampler", seed=0)
    assert made.found
    assert made.launches < made.measurements
