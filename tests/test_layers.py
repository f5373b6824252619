"""Layers of the import package: each part imports only those before it."""

import ast
from pathlib import Path

from benchmarks.size import LAYERS, import_violations, workload_violations
from benchmarks.source import Module


def test_every_part_imports_only_those_before_it(production_modules: list[Module]) -> None:
    assert import_violations(production_modules) == []


def test_every_part_has_its_place(production_modules: list[Module]) -> None:
    assert {module.layer for module in production_modules} - {""} == set(LAYERS)


def test_an_import_upwards_and_a_bare_folder_are_found(tmp_path: Path) -> None:
    path = tmp_path / "pareto.py"
    path.write_text(
        "import models\nfrom tuner import study\n\ndef f():\n    import tuner.display.progress\n"
    )
    assert import_violations([Module("tuner.pareto", path)]) == [
        "tuner.pareto imports models",
        "tuner.pareto imports tuner.study",
        "tuner.pareto imports tuner.display.progress",
    ]
    assert isinstance(Module("tuner.pareto", path).tree, ast.Module)


def test_an_answer_does_not_import_what_shows_it_not_even_in_a_method(tmp_path: Path) -> None:
    path = tmp_path / "answer.py"
    path.write_text("class A:\n    def f(self):\n        import tuner.display.text\n")
    assert import_violations([Module("tuner.answer.answer", path)]) == [
        "tuner.answer.answer imports tuner.display.text"
    ]
    assert import_violations([Module("tuner.result", path)]) == []


def test_an_import_against_the_order_inside_workload_is_found(tmp_path: Path) -> None:
    path = tmp_path / "probe.py"
    path.write_text("from tuner.workload.node import agent\nimport tuner.workload.hook.link\n")
    assert workload_violations([Module("tuner.workload.records.probe", path)]) == [
        "tuner.workload.records.probe imports tuner.workload.node",
        "tuner.workload.records.probe imports tuner.workload.hook.link",
    ]
