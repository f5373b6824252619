"""A test that takes more CPU seconds than an everyday test may is named, unless it is marked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_limit import LIMIT_S, MARGIN, REFERENCE_S, excess, slowness

ROOT = Path(__file__).parents[1]
CASES = """
import subprocess, sys, time
import pytest

def work(seconds):
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass

def test_works(): work(0.6)
def test_waits(): time.sleep(0.6)
def test_lets_a_child_work():
    code = "import time\\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
def test_imports_first(): work(0.6); import plotly
def test_fails(): work(0.6); assert False
@pytest.fixture(scope="module")
def shared(): work(0.6)
def test_uses_what_is_shared(shared): pass
@pytest.mark.slow
def test_is_marked(): work(0.6)
"""


def outcomes(folder: Path, *options: str) -> dict[str, str]:
    """Run the cases with a limit, and return each one's outcome."""
    (folder / "test_cases.py").write_text(CASES)
    (folder / "plotly.py").touch()  # in the place of a package that takes seconds to import
    (folder / "conftest.py").write_text("from tests.cpu_limit import *\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)],
        env={"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (line.split() for line in done.stdout.splitlines() if "::test_" in line)
    found = {words[1].partition("::test_")[2]: words[0] for words in lines if len(words) > 1}
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_test_and_its_children_work_counts_and_nothing_else(tmp_path: Path) -> None:
    limited = outcomes(tmp_path, "--cpu-limit", "0.05", "--above-cpu-limit", "fail")
    assert limited == {
        "works": "FAILED",
        "waits": "PASSED",
        "lets_a_child_work": "FAILED",
        "imports_first": "PASSED",
        "fails": "FAILED",
        "uses_what_is_shared": "PASSED",
        "is_marked": "PASSED",
    }
    warned = outcomes(tmp_path, "--cpu-limit", "0.05")
    assert [name for name, outcome in warned.items() if outcome == "FAILED"] == ["fails"]


def test_a_busy_or_slower_machine_has_a_higher_limit_and_a_faster_one_no_lower() -> None:
    assert slowness([REFERENCE_S / 2] * 9) == 1
    assert slowness([3 * REFERENCE_S] * 9) == pytest.approx(3)
    assert excess(LIMIT_S * MARGIN + 0.1, 1.0, LIMIT_S)
    assert not excess(LIMIT_S * MARGIN + 0.1, 1.3, LIMIT_S)
    assert not excess(1000.0, 1.0, 0.0)
