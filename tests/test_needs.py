"""A test that needs what is missing is left out, and the end of the run says for want of what."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ledger import Ledger
from benchmarks.source import production
from tests.support.commands import finished

ROOT = Path(__file__).parents[1]
CASES = """
import pytest

@pytest.mark.needs("cc")
@pytest.mark.parametrize("n", range(3))
def test_of_the_twin(n): assert False
@pytest.mark.needs("cc", "numactl")
def test_needs_two(): assert False
@pytest.mark.needs("here")
def test_of_what_is_here(): pass
def test_skips_itself(): pytest.skip("no reason of ours")
def test_runs(): pass
"""
CONFTEST = """
from dataclasses import replace
from tests import needs
from tests.needs import pytest_itemcollected, pytest_runtest_setup, pytest_terminal_summary
for name in ("cc", "numactl"):
    needs.NEEDS[name] = replace(needs.NEEDS[name], here=lambda: None)
needs.NEEDS["here"] = replace(needs.NEEDS["cc"], here=lambda: "/bin/true")
"""


def run(
    folder: Path, cases: str, *options: str, conftest: str = CONFTEST
) -> subprocess.CompletedProcess[str]:
    (folder / "test_cases.py").write_text(cases)
    (folder / "conftest.py").write_text(conftest)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return finished(
        [*command, "--rootdir", str(folder), str(folder)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/bin", "HOME": str(folder)},
    )


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "workers"])
def test_one_line_says_what_was_left_out_and_what_brings_it(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    done = run(tmp_path, CASES, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "left out" in line]
    assert said == [
        "No C compiler (cc, gcc or clang): 4 tests of the twin GPU node left out (apt install gcc);"
        " no numactl: 1 test of ranks that launchers bind left out (apt install numactl);"
        " 1 left out for other reasons (pytest -rs)"
    ]
    assert "2 passed, 5 skipped" in done.stdout


def test_a_mark_by_which_a_file_is_found_stands_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "marks.py").write_text("import pytest\nALONE = pytest.mark.ray\n")
    cases = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from marks import ALONE
@ALONE
def test_it(): pass
"""
    done = run(tmp_path, cases)
    assert done.returncode not in (0, 5)
    assert "test_it has the mark 'ray', which its file must name" in done.stdout + done.stderr


def test_no_test_skips_by_looking_for_a_program_itself() -> None:
    """`needs` is the one way, so that the line at the end is whole."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "tests").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"^(?!\s+if).*skipif\(.*(which\(|geteuid)", line)
    ]
    assert found == []


def test_what_has_passed_elsewhere_does_not_run_again(tmp_path: Path) -> None:
    cases = """
import os, pytest
@pytest.mark.parametrize("n", ["a.b/c", "::x[1]", "\\x00"])
def test_many(n): pass
class TestOther:
    class TestWithin:
        def test_one(self): pass
def test_skips(): os.path.exists("here") or pytest.skip("nothing is here")
def test_fails(): assert os.path.exists("here")
"""
    conftest = CONFTEST + "from tests.needs import add_option as pytest_addoption\n"
    conftest += "from tests.needs import pytest_collection_modifyitems\n"
    passed = tmp_path / "passed.xml"
    first = run(tmp_path, cases, f"--passed={passed}", "--junitxml", str(passed), conftest=conftest)
    assert "1 failed, 4 passed, 1 skipped" in first.stdout, first.stdout
    second = run(tmp_path, cases, "-vv", f"--passed={passed}", conftest=conftest)
    again = [
        line.split()[0].partition("::")[2] for line in second.stdout.splitlines() if "%]" in line
    ]
    assert again == ["test_skips", "test_fails"]
    # Two words that name a file are an option and a place, beside which no conftest.py has options.
    assert re.findall(r"--passed(.)\$\(PASSED\)", (ROOT / "Makefile").read_text()) == ["="]


def test_every_part_that_a_test_goes_through_is_a_module_of_an_extra() -> None:
    """A name that is misspelled would leave the test out everywhere."""
    ledger, named = Ledger.read(), set()
    for path in {*(ROOT / "tests").rglob("test_*.py")} - {Path(__file__)}:
        marks = re.findall(r"mark\.extra\(([^)*]*)\)", path.read_text(encoding="utf-8"))
        named |= {name for mark in marks for name in re.findall(r'"([\w.]+)"', mark)}
    assert named
    files = {each.name: each.path.relative_to(ROOT).as_posix() for each in production()}
    for name in sorted(named):
        owner = ledger.owner(files.get(name, ""))
        assert owner is not None, name
        assert owner.part == "extra", name


def test_a_test_that_goes_through_an_extra_is_left_out_without_it(tmp_path: Path) -> None:
    cases = """
import pytest
@pytest.mark.extra("tuner.planner.plan", "tuner.no_such_part")
def test_both(): assert False
@pytest.mark.extra("tuner.planner.plan")
def test_one(): pass
"""
    done = run(tmp_path, cases, "-rs")
    assert "1 passed, 1 skipped" in done.stdout
    assert "this checkout has no tuner.no_such_part" in done.stdout
