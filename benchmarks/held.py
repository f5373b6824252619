"""What is held: the faults that reviews, reports and adversaries found, and the tests of each.

    python -m benchmarks.held
    python -m benchmarks.held -- -q

The table is `benchmarks/data/held.toml`. A fault of which a test is named that does not exist is
printed, and counts as one without a test. The last line runs the named tests alone, with options of
pytest: a minute's proof that nothing which was found once is back.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.figures import ROOT, Figure, arguments, publish

TABLE = ROOT / "benchmarks" / "data" / "held.toml"


@dataclass(frozen=True)
class Fault:
    """A fault that was found and mended.

    Attributes:
        found: by whom.
        what: went wrong.
        tests: functions that fail if it comes back.
    """

    found: str
    what: str
    tests: tuple[str, ...]


def faults(table: Path = TABLE) -> list[Fault]:
    rows = tomllib.loads(table.read_text(encoding="utf-8"))["fault"]
    return [Fault(row["found"], row["what"], tuple(row["tests"])) for row in rows]


def functions_of_tests(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Return the test functions by their names, each with the addresses that pytest takes."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        file = path.relative_to(folder.parent).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        bodies = [("", tree.body), *((f"{each.name}::", each.body) for each in classes)]
        for within, body in bodies:
            for node in body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    found[node.name].append(f"{file}::{within}{node.name}")
    return dict(found)


def without_a_test(listed: Iterable[Fault], known: Mapping[str, object]) -> list[Fault]:
    """Return the faults that name no test, or one that is not known."""
    return [fault for fault in listed if not fault.tests or set(fault.tests) - set(known)]


def failed_tests(addresses: Iterable[str]) -> set[str]:
    """Run tests, and return the names of the functions that failed, of whatever parameters."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-E", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        environ = {**os.environ, "LC_ALL": "C.UTF-8"}  # as `make test` has it
        done = subprocess.run(
            [*command, f"--junitxml={report}", *sorted(addresses)],
            cwd=ROOT, check=False, stdout=subprocess.DEVNULL, env=environ,
        )  # fmt: skip
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}")
        cases = ElementTree.parse(report).iter("testcase")
        return {
            case.get("name", "").partition("[")[0]
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        }


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = arguments(__doc__, "held").parse_args(sys.argv[1:at])
    listed, known = faults(), functions_of_tests()
    if sys.argv[at + 1 :]:
        named = sorted({each for fault in listed for test in fault.tests for each in known[test]})
        command = [sys.executable, "-m", "pytest", *sys.argv[at + 1 :], *named]
        sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
    for found, count in Counter(fault.found for fault in listed).items():
        print(f"{count:4} {found}")
    open_ = without_a_test(listed, known)
    for fault in open_:
        print(f"without a test: {fault.what} ({fault.found})")
    publish(
        [
            Figure("faults_listed", len(listed), "count"),
            Figure("without_a_test", len(open_), "count"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
