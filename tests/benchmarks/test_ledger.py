"""Owners of files: which rule decides, what is a mistake, and that no line is lost."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from benchmarks.ledger import Ledger, fits
from benchmarks.size import (
    core_imports_extras,
    extras_walked,
    lines_of_modes,
    lines_of_parts,
    rows_of_ledger,
)
from benchmarks.source import Module, production
from benchmarks.walk import Entered, Walk

TABLE = """
[core]
space = "what can be chosen"
[extra]
plans = "what is predicted"
[tests]
tests = "tests of several"
[modes]
energy = '\\bhas_energy\\b'

[[capability]]
name = "space"
room = "space"
files = ["tuner/space.py", "search_spaces/"]
tests = ["tests/space/"]

[[capability]]
name = "plan"
room = "plans"
files = ["tuner/plan*.py"]
parts = ["tuner/space.py::forecast,Forecast"]
tests = ["tests/space/test_plan.py"]
"""
FILES = {
    "tuner/space.py": "import os\n\n\ndef choose():\n    has_energy = has_energy or 1\n\n\n"
    "def forecast():\n    from tuner.plan_text import f\n\n\nclass Forecast:\n    x = 1\n",
    "tuner/plan_text.py": "import tuner.space\nhas_energy_too = 1\n",
    "search_spaces/deep/down.py": "x = 1\n",
    "search_spaces/deep/page.html": "<p>\n",
    "search_spaces/data/facts.toml": "a = 1\n",
    "tests/space/test_space.py": "a\nb\n",
    "tests/space/test_plan.py": "a\n",
}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tuner" / "search_spaces").symlink_to("../search_spaces")
    (tmp_path / "ledger.toml").write_text(TABLE)
    return Ledger.read(tmp_path / "ledger.toml", tmp_path)


@pytest.mark.parametrize(
    ("path", "pattern", "fit"),
    [
        ("tuner/a.py", "tuner/a.py", True),
        ("tuner/a.py", "tuner/*.py", True),
        ("tuner/b/a.py", "tuner/*.py", False),  # a star is no folder
        ("tuner/b/a.py", "tuner/", True),
        ("tuners/a.py", "tuner/", False),
        ("tuner/ab.py", "tuner/a", False),
        ("tuner/[a].py", "tuner/a.py", False),
    ],
)
def test_a_path_fits_a_pattern(path: str, pattern: str, fit: bool) -> None:
    assert fits(path, pattern) is fit


def test_a_name_comes_before_patterns_and_a_longer_pattern_before_a_shorter(ledger: Ledger) -> None:
    owners = {path: getattr(ledger.owner(path), "name", None) for path in ledger.code()}
    assert owners == {
        "search_spaces/deep/down.py": "space",
        "search_spaces/deep/page.html": "space",
        "tuner/plan_text.py": "plan",
        "tuner/space.py": "space",
    }
    tests = [getattr(ledger.owner_of_test(path), "name", None) for path in ledger.tests()]
    assert tests == ["plan", "space"]


def test_the_tests_of_one_extra_or_a_part_of_the_core_are_named(ledger: Ledger) -> None:
    assert ledger.tests_of("plans") == ["tests/space/test_plan.py"]
    assert ledger.tests_of("space") == ["tests/space/test_space.py"]
    allowed = "EXTRA is one of plans, or a part of the core (space)"
    for room, begin in (("plan", "no extra is called 'plan'"), ("", "no extra is named")):
        with pytest.raises(ValueError, match=rf"^{re.escape(f'{begin}: {allowed}')}$"):
            ledger.tests_of(room)
    with pytest.raises(ValueError, match="no extra is called 'tests'"):
        ledger.tests_of("tests")  # tests of more than one capability are no extra's


def test_no_line_is_lost_and_a_part_counts_for_its_owner(ledger: Ledger) -> None:
    assert ledger.lines() == {"space": (5 + 1, 2), "plan": (2 + 4 + 4, 1)}
    assert lines_of_parts(ledger) == {
        "production_lines": 16,
        "core_lines": 6,
        "extra_lines": 10,
        "test_lines": 3,
    }


def test_a_file_without_owner_and_a_pattern_without_file_are_mistakes(ledger: Ledger) -> None:
    assert ledger.mistakes() == []
    (ledger.root / "tuner" / "new.py").touch()
    (ledger.root / "tests" / "test_new.py").touch()
    (ledger.root / "tuner" / ".hidden.py").touch()
    (ledger.root / "search_spaces" / "deep" / "down.py").unlink()
    (ledger.root / "search_spaces" / "deep" / "page.html").unlink()
    space = ledger.root / "tuner" / "space.py"
    space.write_text(space.read_text().replace("class Forecast", "class Gone"))
    where = "has no owner: name it in a row of benchmarks/data/ledger.toml"
    assert ledger.mistakes() == [
        f"tuner/new.py {where}",
        f"tests/test_new.py {where}",
        "space: no file fits search_spaces/; delete it",
        "plan: tuner/space.py has no Forecast; delete it",
    ]


def test_a_pattern_of_two_rows_is_a_mistake(ledger: Ledger) -> None:
    table = ledger.root / "ledger.toml"
    table.write_text(TABLE.replace('"tuner/plan*.py"', '"tuner/plan*.py", "search_spaces/"'))
    found = Ledger.read(table, ledger.root).mistakes()
    assert found == ["search_spaces/ is named 2 times: keep one"]


def test_an_import_of_an_extra_in_the_core_is_found_inside_a_function(ledger: Ledger) -> None:
    modules = [
        Module(f"tuner.{name}", ledger.root / "tuner" / f"{name}.py")
        for name in ("space", "plan_text")
    ]
    assert core_imports_extras(modules, ledger) == ["tuner.space imports tuner.plan_text (plan)"]


def test_files_of_extras_that_a_request_passes_are_named(ledger: Ledger) -> None:
    files = ("tuner/space.py", "tuner/plan_text.py", "tuner/gone.py")
    walk = Walk([Entered(file, "f", 1, True, 1) for file in files])
    assert extras_walked(walk, ledger) == ["tuner/plan_text.py (plan)"]


def test_lines_that_ask_for_a_mode_are_counted_by_whole_names(ledger: Ledger) -> None:
    assert ledger.mode("energy") == {"tuner/space.py": 1}
    assert lines_of_modes(ledger) == {"mode_lines.energy": 1, "mode_files.energy": 1}


def test_the_projects_own_table_counts_every_line_and_names_every_mode() -> None:
    ledger = Ledger.read()
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(ledger.tests()) >= {path for path in listed if path.startswith("tests/")}
    assert lines_of_parts(ledger)["production_lines"] == sum(each.lines for each in production())
    assert set(ledger.modes) == {"energy", "basis", "baseline", "stages", "length", "gpu"}
    names = [each.name for each in ledger.capabilities]
    assert len(names) == len(set(names))
    rooms = {room for each in ledger.rooms.values() for room in each}
    assert {each.room for each in ledger.capabilities} == rooms
    rows = "\n".join(rows_of_ledger(ledger))
    assert all(name in rows for name in names)
