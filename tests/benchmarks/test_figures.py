"""Help of the benchmarks: docs/develop/benchmarks.md says that it explains the figures."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import coverage
from benchmarks.figures import ROOT, Figure, arguments, explained, publish

TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in (ROOT / "benchmarks").rglob("*.py")
}
KNOWN = [name for table in explained().values() for name in table]


def patterns(node: ast.AST) -> Iterator[str]:
    """Yield the texts of a tree, with "*" for what is computed."""
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "*" for part in each.values)
            yield "".join(map(str, parts))
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def calls(name: str) -> Iterator[tuple[Path, ast.Call]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                yield path, node


def test_every_benchmark_shows_its_own_text_and_figures_as_help() -> None:
    shown = set()
    for path, call in calls("arguments"):
        text, benchmark = call.args
        parts = path.relative_to(ROOT / "benchmarks").with_suffix("").parts
        name = ".".join(part for part in parts if part != "__main__")
        assert (ast.unparse(text), ast.literal_eval(benchmark)) == ("__doc__", name)
        assert importlib.util.find_spec(f"benchmarks.{name}")
        shown.add(name)
    assert shown == {*explained()}
    found = arguments(coverage.__doc__, "coverage").format_help()
    assert "usage: python -m benchmarks.coverage " in found
    assert "  coverage_energy: share of the measured points whose 90 % interval holds" in found


def test_every_figure_of_the_code_is_explained_and_no_other() -> None:
    written = [next(patterns(call.args[0]), "*") for _, call in calls("Figure")]
    assert len(written) > 150
    assert [text for text in written if not any(agree(text, name) for name in KNOWN)] == []
    texts = {text for tree in TREES.values() for text in patterns(tree) if " " not in text}
    texts = {text for text in texts if "*" not in text or len(text.replace("*", "")) > 4}
    assert [name for name in KNOWN if not any(agree(name, text) for text in texts)] == []


@functools.cache
def agree(one: str, other: str) -> bool:
    """Return whether some text fits both patterns."""
    if not one or not other:
        return not (one + other).strip("*")
    if one[0] == "*":
        return agree(one[1:], other) or agree(one, other[1:])
    if other[0] == "*":
        return agree(other, one)
    return one[0] == other[0] and agree(one[1:], other[1:])


def test_a_figure_that_nothing_explains_is_printed_and_then_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    figures = [Figure("mutants", 200, "count"), Figure("mutants_of_x", 1 / 3, "ratio")]
    publish(figures[:1], file)
    with pytest.raises(SystemExit, match=r"does not say what these are: mutants_of_x$"):
        publish(figures, file)
    assert capsys.readouterr().out.splitlines()[-1] == "figure mutants_of_x 0.333333 ratio"
    assert json.loads(file.read_text())[1] == {
        "name": "mutants_of_x",
        "value": 1 / 3,
        "unit": "ratio",
    }
