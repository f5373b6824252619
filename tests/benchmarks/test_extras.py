"""Checkouts without extras: what is deleted, what is left out, and what is found to fail."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.extras import Checkout, extras_that_import, folder_of, outcome_without
from benchmarks.ledger import Ledger
from benchmarks.source import production

TABLE = """
[core]
core = "what every study runs"
[extra]
more = "what some run"
[tests]
tests = "tests of several"
[modes]

[[capability]]
name = "core"
room = "core"
files = ["tuner/"]
tests = ["tests/"]
[[capability]]
name = "ray"
room = "more"
files = ["tuner/ray/"]
tests = ["tests/test_ray.py"]
[[capability]]
name = "report"
room = "more"
files = ["tuner/report.py"]
tests = ["tests/test_report.py"]
[[capability]]
name = "page"
room = "more"
files = ["tuner/page.py"]
tests = []
[[capability]]
name = "everything"
room = "tests"
files = []
tests = ["tests/test_all.py"]
"""
FILES = {
    "tuner/__init__.py": "",
    "tuner/core.py": "def runs():\n    return 1\n",
    "tuner/late.py": "def report():\n    import tuner.report\n",
    "tuner/ray/__init__.py": "",
    "tuner/ray/nodes.txt": "two\n",
    "tuner/report.py": "import tuner.core\n",
    "tuner/page.py": "def show():\n    from tuner import report\n",
    "tests/__init__.py": "",
    "tests/helper.py": "import benchmarks.pages\n",
    "benchmarks/__init__.py": "",
    "benchmarks/pages.py": "from tuner import report\n",
    "tests/test_core.py": "from tuner.core import runs\n\ndef test_it():\n    assert runs() == 1\n",
    "tests/test_helped.py": "from tests import helper\n\ndef test_it():\n    pass\n",
    "tests/test_ray.py": "import tuner.ray\n",
    "tests/test_report.py": (
        "import pytest\n\ndef test_it():\n    assert False\n\n"
        "def test_marked():\n    pytest.skip('this checkout has no tuner.ray')\n\n"
        "def test_skipped():\n    pytest.skip('no zsh here')\n"
    ),
    "tests/test_all.py": "def test_it():\n    assert False\n",
}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    root = tmp_path / "checkout"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for folder in ("search_spaces", "workload", "models"):
        (root / folder).mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".gitignore").write_text("*.log\n")
    (root / "tuner" / "old.log").write_text("")
    table = tmp_path / "ledger.toml"
    table.write_text(TABLE)
    return Ledger.read(table, root)


def test_what_imports_an_extra_goes_with_it(ledger: Ledger) -> None:
    assert extras_that_import(ledger, production(ledger.root)) == {
        "ray": set(),
        "report": {"page"},
        "page": set(),
    }


def test_a_checkout_lacks_the_files_of_an_extra_its_data_and_its_tests(
    ledger: Ledger, tmp_path: Path
) -> None:
    made = Checkout(tmp_path / "made", ledger, {"ray"})
    left = {p.relative_to(made.folder).as_posix() for p in made.folder.rglob("*")}
    gone = {"tuner/ray/__init__.py", "tuner/ray/nodes.txt", "tests/test_ray.py"}
    assert {*FILES} - left == gone
    assert not any("old.log" in each or each == "tuner/ray" for each in left)


def test_what_misses_an_extra_is_named_and_no_module_is_taken_from_elsewhere(
    ledger: Ledger, tmp_path: Path
) -> None:
    (ledger.root / "tuner/core.py").write_text("import tuner.report\n\ndef runs():\n    return 1\n")
    made = Checkout(tmp_path / "made", ledger, {"report", "page"})
    assert made.import_faults() == ["tuner.report is missed by tuner.core"]
    # That this checkout has it does not help.
    done = made.run("-c", "import tuner.cli.main")
    assert "No module named 'tuner.cli'" in done.stderr


def test_tests_that_import_what_is_deleted_are_left_out(ledger: Ledger, tmp_path: Path) -> None:
    made = Checkout(tmp_path / "made", ledger, {"report", "page"})
    assert made.tests() == (["tests/test_core.py", "tests/test_ray.py"], ["tests/test_helped.py"])


def test_a_test_that_fails_is_a_fault(ledger: Ledger, tmp_path: Path) -> None:
    made = Checkout(tmp_path / "made", ledger, {"ray"})
    chosen, left_out = made.tests()
    assert (chosen, left_out) == (
        ["tests/test_core.py", "tests/test_helped.py", "tests/test_report.py"],
        [],
    )
    faults, last, skipped = made.test_faults(chosen)
    assert len(faults) == 1
    assert faults[0].startswith("FAILED tests/test_report.py::test_it")
    assert "1 failed, 2 passed, 2 skipped" in last
    assert skipped == 1


@pytest.mark.slow
def test_the_core_alone_searches_a_script_and_answers(tmp_path: Path) -> None:
    found = outcome_without(
        tmp_path / "made",
        Ledger.read(),
        set(extras_that_import(Ledger.read(), production())),
        quick=True,
    )
    assert found.faults == []


def test_each_checkout_has_a_folder_that_can_hold_an_environment() -> None:
    assert folder_of("online: clocks while training") == "online-clocks-while-training"
    folders = [folder_of(extra) for extra in extras_that_import(Ledger.read(), production())]
    assert len(set(folders)) == len(folders)
