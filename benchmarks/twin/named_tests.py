"""Tests that are named for a finding: its key is in the name or docstring of the function.

The key is `finding_N` for the first audit, `second_day_N` for the second, `third_day_N` for the
third.

They are run in one pytest process; a test that is skipped says nothing about its finding, and one
that is marked slow is not looked at.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.figures import ROOT

_NAMED = re.compile(r"((?:finding|second_day|third_day)_\d+)")


@dataclass(frozen=True)
class Outcome:
    """What the tests of one finding say.

    Attributes:
        passed: number of test cases that passed.
        failed: names of those that failed.
    """

    passed: int = 0
    failed: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """Why the finding is open; "" if it is mended."""
        if self.failed:
            return f"failed: {', '.join(self.failed)}"
        return "" if self.passed else "no test of it passed"


def named_tests(tests: Path = ROOT / "tests") -> dict[str, set[str]]:
    """Return the findings that each test function is named for, by pytest's id of it."""
    return {
        name: keys
        for path in sorted(tests.rglob("test_*.py"))
        for name, keys in _in_file(path, tests.parent)
    }


def _in_file(path: Path, root: Path) -> Iterator[tuple[str, set[str]]]:
    tree = ast.parse(path.read_text())
    scopes = [("", tree.body)]
    scopes += [
        (f"{node.name}::", node.body) for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    for prefix, body in scopes:
        for node in body:
            if isinstance(node, ast.FunctionDef) and _is_quick_test(node):
                text = f"{node.name} {ast.get_docstring(node) or ''}"
                if found := set(_NAMED.findall(text)):
                    yield f"{path.relative_to(root)}::{prefix}{node.name}", found


def _is_quick_test(node: ast.FunctionDef) -> bool:
    marks = [ast.unparse(each) for each in node.decorator_list]
    return node.name.startswith("test_") and "pytest.mark.slow" not in marks


def run_named_tests(
    *, tests: Path = ROOT / "tests", limit_s: float = 600.0
) -> Mapping[str, Outcome]:
    """Run the tests of a folder and return what they say about each finding.

    Raises:
        TimeoutExpired: they take longer than the limit.
    """
    named = named_tests(tests)
    if not named:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *named],
            cwd=ROOT,
            timeout=limit_s,
            stdout=subprocess.DEVNULL,
        )
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes: dict[str, Outcome] = {}
    for case in cases:
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        test = _id_of(case, named)
        for key in named.get(test, ()):
            was = outcomes.get(key, Outcome())
            if case.find("failure") is not None or case.find("error") is not None:
                outcomes[key] = Outcome(was.passed, (*was.failed, name))
            elif case.find("skipped") is None:
                outcomes[key] = Outcome(was.passed + 1, was.failed)
    return outcomes


def _id_of(case: ElementTree.Element, tests: Mapping[str, set[int]]) -> str:
    """Return the id of the test of a case: its class name is "tests.folder.test_file[.Class]"."""
    where, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
    for test in tests:
        path, *inner = test.split("::")
        dotted = ".".join([path.removesuffix(".py").replace("/", "."), *inner[:-1]])
        if inner[-1] == name and dotted == where:
            return test
    return ""
