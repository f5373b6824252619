"""The sampler that the README of the search benchmark shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from benchmarks.search.ask_tell import PEERS
from benchmarks.search.problems import Problem
from benchmarks.search.runner import run
from tests.support.studies import write_table

README = ROOT / "benchmarks" / "search" / "README.md"


def test_the_readme_has_a_sampler_of_twenty_lines_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = README.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    body = code[code.index("@peer") :]
    assert len(body.strip().splitlines()) <= 20
    monkeypatch.setitem(PEERS, "my-sampler", None)  # removed again after the test
    exec(compile(code, "README", "exec"), {})
    made = run(Problem(write_table(tmp_path / "table"), "made-up"), "my-sampler", seed=0)
    assert made.found
    assert made.launches < made.measurements
