"""Layers of the import package: each part imports only those before it."""

import ast
import importlib
from pathlib import Path

from benchmarks.size import LAYERS, Module, import_cycles, import_violations


def test_every_part_imports_only_those_before_it(production_modules: list[Module]) -> None:
    assert import_violations(production_modules) == []


def test_every_part_has_its_place(production_modules: list[Module]) -> None:
    assert {module.layer for module in production_modules} - {""} == set(LAYERS)


def test_an_import_upwards_and_a_bare_folder_are_found(tmp_path: Path) -> None:
    path = tmp_path / "pareto.py"
    path.write_text(
        "import models\nfrom tuner import study\n\ndef f():\n    import tuner.display.live\n"
    )
    assert import_violations([Module("tuner.pareto", path)]) == [
        "tuner.pareto imports models",
        "tuner.pareto imports tuner.study",
        "tuner.pareto imports tuner.display.live",
    ]
    assert isinstance(Module("tuner.pareto", path).tree, ast.Module)


def test_results_and_what_shows_them_do_not_import_each_other(
    production_modules: list[Module],
) -> None:
    """A result's methods find plots, pages and choices when they are called."""
    for group in import_cycles(production_modules):
        assert not [name for name in group if name.startswith(("tuner.results", "tuner.display"))]
    called = {
        (node.args[0].value, node.args[1].value)
        for module in production_modules
        if module.name.startswith("tuner.results.")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "built_on_results"
    }
    assert len(called) > 10
    for name, function in called:  # no tool follows a name in a string
        assert callable(getattr(importlib.import_module(name), function)), (name, function)
