"""Layers of the import package: each part imports only those before it."""

import ast
from pathlib import Path

from benchmarks.size import LAYERS, Module, import_violations, production


def test_every_part_imports_only_those_before_it() -> None:
    assert import_violations(production()) == []


def test_every_part_has_its_place() -> None:
    assert {module.layer for module in production()} - {""} == set(LAYERS)


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
