"""What a test needs and a machine may lack: it is left out, and the end of the run says for what.

    @pytest.mark.needs("cc", "numactl")

Programs are named by this mark alone. The marks `real`, `ray`, `root` and `traces`, by which runs
are selected too, need what they name. `--needs cc` runs the tests of a compiler alone, and
`--passed=FILE` those that have not passed elsewhere (in one word: pytest looks for options where a
file is that stands alone).
"""

from __future__ import annotations

import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.programs import SLURM
from tests.support import postgresql
from tests.support.browser import chromium
from tests.support.entry_points import require_parts
from tests.support.traces import TRACES
from tests.twin import compiler


@dataclass(frozen=True)
class Need:
    """Something that tests need.

    Attributes:
        missing: the sentence where it is missing.
        tests: which tests need it, after "tests".
        remedy: what brings it.
        here: whether this machine has it.
    """

    missing: str
    tests: str
    remedy: str
    here: Callable[[], object]


def _programs(*names: str) -> Callable[[], bool]:
    return lambda: all(map(shutil.which, names))


def _modules(*names: str) -> Callable[[], bool]:
    return lambda: all(map(find_spec, names))


NEEDS = {
    "cc": Need(
        "no C compiler (cc, gcc or clang)", "of the twin GPU node", "apt install gcc", compiler
    ),
    "g++": Need("no C++ compiler (g++)", "of compiled ops", "apt install g++", _programs("g++")),
    "numactl": Need(
        "no numactl", "of ranks that launchers bind", "apt install numactl", _programs("numactl")
    ),
    "chromium": Need(
        "no chromium or google-chrome",
        "that look at a page",
        "apt install chromium",
        chromium,
    ),
    "postgresql": Need(
        "no PostgreSQL or no psycopg2",
        "of a shared database",
        "apt install postgresql, pip install 'joulefront[postgresql]'",
        lambda: not postgresql.why_not(),
    ),
    "slurm": Need(
        "no Slurm",
        "of its scripts",
        "apt install slurm-wlm munge",
        _programs(*SLURM),
    ),
    "buildah": Need(
        "no buildah", "of container images", "apt install buildah", _programs("buildah")
    ),
    "namespaces": Need(
        "no ip or unshare",
        "on networks of their own",
        "apt install iproute2 util-linux",
        _programs("ip", "unshare"),
    ),
    "real": Need(
        "no DeepSpeed", "that train", "pip install 'joulefront[train]'", _modules("deepspeed")
    ),
    "ray": Need("no Ray", "of it", "pip install 'joulefront[ray]'", _modules("ray")),
    "root": Need(
        "not root",
        "that become another user or start daemons",
        "run as root",
        lambda: os.geteuid() == 0,
    ),
    "traces": Need(
        f"no folders {TRACES} and {TRACES.parent / 'published'}",
        "of recorded tables",
        "set JOULEFRONT_TRACES",
        lambda: TRACES.is_dir() and (TRACES.parent / "published").is_dir(),
    ),
}
#: Marks that select runs, each of which needs what it is called.
MARKS = ("real", "ray", "root", "traces")
#: Marks by which the Makefile finds the files of a part.
BY_FILE = ("quiet", "ray", "root")


def needs_of(item: pytest.Item) -> list[str]:
    """Return the names of what a test needs.

    Raises:
        pytest.UsageError: a mark names what is not known here.
    """
    names = [mark for mark in MARKS if item.get_closest_marker(mark)]
    names += [name for mark in item.iter_markers("needs") for name in mark.args]
    for name in names:
        if name not in NEEDS:
            raise pytest.UsageError(f"{item.nodeid} needs {name!r}; known: {', '.join(NEEDS)}")
    return list(dict.fromkeys(names))


def require(*names: str) -> None:
    """Skip the test that runs if something of these is missing here."""
    if missing := [NEEDS[name].missing for name in names if not NEEDS[name].here()]:
        pytest.skip("; ".join(missing))


def left_out(reasons: Iterable[str]) -> str:
    """Return one line on the tests that were skipped for these reasons; empty without any."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        counts.update(reason.removeprefix("Skipped: ").split("; "))
    said = []
    for need in NEEDS.values():
        if count := counts.pop(need.missing, 0):
            tests = f"{count} test{'s' if count > 1 else ''} {need.tests}"
            said.append(f"{need.missing}: {tests} left out ({need.remedy})")
    if rest := sum(counts.values()):
        said.append(f"{rest} left out for other reasons (pytest -rs)")
    line = "; ".join(said)
    return line[:1].upper() + line[1:]


def passed_in(file: Path) -> set[str]:
    """Return the tests that passed by a file of `--junitxml`, as `junit_name` names them.

    None have passed where there is no file: the other run could not be made.
    """
    if not file.exists():
        return set()
    return {
        f"{case.get('classname')}::{case.get('name')}"
        for case in ElementTree.parse(file).iter("testcase")
        if not any(case.find(end) is not None for end in ("failure", "error", "skipped"))
    }


def junit_name(nodeid: str) -> str:
    """Return how a file of `--junitxml` names a test: `tests.a.test_b.TestC::test_d[case]`."""
    test, bracket, case = nodeid.partition("[")
    path, *classes, name = test.split("::")
    module = path.removesuffix(".py").replace("/", ".")
    return f"{'.'.join([module, *classes])}::{name}{bracket}{case}"


def add_option(parser: pytest.Parser) -> None:
    """Add the options that select tests."""
    parser.addoption("--needs", metavar="NAMES", help="only tests that need one of these")
    parser.addoption(
        "--passed",
        type=Path,
        metavar="FILE",
        help="only tests that have not passed in the run of which --junitxml wrote this",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that need one of the named things, and that have not passed."""
    left = items[:]
    if chosen := config.getoption("--needs"):
        names = set(chosen.split(","))
        if unknown := names - set(NEEDS):
            raise pytest.UsageError(f"--needs takes {', '.join(NEEDS)}, not {sorted(unknown)[0]!r}")
        left = [item for item in left if names & set(needs_of(item))]
    if (file := config.getoption("--passed")) is not None:
        passed = passed_in(file)
        left = [item for item in left if junit_name(item.nodeid) not in passed]
    kept = set(left)
    if out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=out)
        items[:] = left


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a mark that names what is not known, or by which no file would be found."""
    needs_of(item)
    for name in BY_FILE:
        if item.get_closest_marker(name) and f"mark.{name}" not in _text(item.path):
            raise pytest.UsageError(
                f"{item.nodeid} has the mark {name!r}, which its file must name (mark.{name}): "
                "parts of the Makefile collect only the files that do"
            )


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what this machine lacks."""
    require(*needs_of(item))
    require_parts(*(name for mark in item.iter_markers("extra") for name in mark.args))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was left out for want of what."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [each.longrepr[2] for each in skipped if isinstance(each.longrepr, tuple)]
    if line := left_out(reasons):
        terminalreporter.write_line(line)
