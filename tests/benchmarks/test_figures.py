"""Help of the benchmarks: docs/develop/benchmarks.md says that it explains the figures."""

from __future__ import annotations

import ast

from benchmarks import coverage
from benchmarks.figures import ROOT, arguments


def test_every_benchmark_shows_its_own_text_as_help() -> None:
    calls = []
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "arguments":
                calls.append((path.name, ast.unparse(node.args[0])))
    assert len(calls) >= 25
    assert [each for each in calls if each[1] != "__doc__"] == []
    shown = arguments(coverage.__doc__).format_help()
    assert "- `coverage_energy`, `coverage_time`: share of the measured points" in shown
