"""Install by the Makefile: the interpreter it takes, and pins that every Python 3.11 can have."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.commands import finished, write_program

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path, *words: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run make on a copy of the Makefile, with this PATH alone."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    command = [shutil.which("make") or "make", *words]
    return finished(command, cwd=folder, env={"PATH": path})


def interpreter(folder: Path, name: str, code: int) -> None:
    """Make a stand-in for a Python that answers the Makefile's question with an exit code."""
    write_program(folder / name, f"#!/bin/sh\nexit {code}\n")


def test_the_first_interpreter_that_fits_is_taken(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    interpreter(programs, "python3.11", 1)  # without its venv module, as on Debian
    interpreter(programs, "python3.12", 0)
    interpreter(programs, "python3", 0)
    done = make(tmp_path, "--dry-run", "run", path=f"{programs}:/bin")
    assert "python3.12 -m venv .venv" in done.stdout


def test_without_one_that_fits_a_sentence_says_what_is_needed(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python3.11", "python3.12", "python3.13", "python3.14", "python3"):
        interpreter(programs, name, 1)
    done = make(tmp_path, "run", path=f"{programs}:/bin")
    assert done.returncode == 2
    assert "this needs Python 3.11 or newer" in done.stderr
    assert "make PYTHON=/path/to/python3" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_search_installs_less_than_the_tests(tmp_path: Path) -> None:
    run = make(tmp_path, "--dry-run", "PYTHON=python3", "run", path="/usr/bin:/bin").stdout
    test = make(tmp_path, "--dry-run", "PYTHON=python3", "test", path="/usr/bin:/bin").stdout
    assert "'.[train,ray,dashboard,terminal]'" in run
    assert "dev" not in run
    assert "'.[all,dev]'" in test


@pytest.mark.parametrize("target", ["install", "run"])
def test_what_pip_builds_with_is_pinned_too(target: str, tmp_path: Path) -> None:
    program = tmp_path / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    write_program(
        program, '#!/bin/sh\necho "$PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT" > pinned; exit 1\n'
    )
    make(tmp_path, "PYTHON=python3", target, path="/usr/bin:/bin")
    assert (tmp_path / "pinned").read_text().split() == ["constraints.txt"] * 2
    assert "setuptools==" in (tmp_path / "constraints.txt").read_text()


def test_what_ci_and_its_schedule_run_are_targets_of_the_makefile() -> None:
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = set(" ".join(rules).split())
    ci = (ROOT / ".ci" / "run").read_text()
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in steps.values() for step in job["steps"] if "run" in step]
    scheduled = [words for words in commands if words.startswith(".ci/run ")]
    parts = " ".join([*re.findall(r"^ *run (.+)$", ci, re.MULTILINE), *scheduled]).split()
    assert {"everyday-shared", "slow-shared", "long"} <= set(parts)
    assert set(parts) - {".ci/run", "from_debian", "mmdebstrap"} <= targets


@pytest.mark.parametrize("line", (ROOT / "constraints.txt").read_text().split())
def test_every_pin_can_be_installed_on_every_python_3_11(line: str) -> None:
    name, _, version = line.partition("==")
    try:
        found = distribution(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed here")
    if found.version.partition("+")[0] != version:
        pytest.skip(f"{name} {found.version} is installed here")
    assert SpecifierSet(found.metadata.get("Requires-Python") or "").contains("3.11.2"), (
        "Debian 12 has Python 3.11.2"
    )


def test_the_lowest_releases_that_are_tried_are_those_that_are_promised():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = [line for line in (ROOT / "constraints-lowest.txt").read_text().split() if "==" in line]
    pins = {
        canonicalize_name(name): Version(version)
        for name, version in (p.split("==") for p in tried)
    }
    extras = project["optional-dependencies"]
    names = ("train", "ray", "terminal", "dashboard", "notebook", "metrics")
    for text in chain(project["dependencies"], *(extras[name] for name in names)):
        requirement = Requirement(text)
        for bound in requirement.specifier:
            if bound.operator == ">=":
                # The first patch release that can be tried here may be a later one.
                pin, lowest = pins[canonicalize_name(requirement.name)], Version(bound.version)
                assert pin.release[: len(lowest.release)] == lowest.release, text
