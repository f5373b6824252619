"""Packages as a newcomer gets them: archives, extras in empty environments, interpreters.

A sample of the extras, interpreters and machines is tried: an environment with torch takes most of
a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from tests.packaging import builds

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Extras that others are made of, or that only this repository's own work needs.
NOT_ALONE = {"dev", "all"}


@pytest.fixture(scope="session")
def index() -> None:
    """Skip a test where pip finds no package to install."""
    words = ["--quiet", "install", "--dry-run", "--ignore-installed", "--no-deps", "packaging"]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("pip reaches no package index")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> builds.Built:
    return builds.build(tmp_path_factory.mktemp("dist"))


def test_the_metadata_names_the_interpreters_and_extras_that_are_tried() -> None:
    prefix = "Programming Language :: Python :: "
    named = {word.removeprefix(prefix) for word in PROJECT["classifiers"] if prefix in word}
    assert named - {"3"} == set(builds.PYTHONS)
    assert PROJECT["requires-python"] == f">={builds.PYTHONS[0]}"
    extras = PROJECT["optional-dependencies"]
    assert set(extras) - NOT_ALONE == set(builds.EXTRAS)
    assert PROJECT["name"] + "[" + ",".join(builds.EXTRAS) + "]" in extras["all"]


def test_the_version_is_that_of_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    latest = next(line for line in changelog.splitlines() if line.startswith("## "))
    assert latest.split()[1] == PROJECT["version"]


@pytest.mark.long
@pytest.mark.usefixtures("index")
def test_the_archives_pass_twine(built: builds.Built, tmp_path: Path) -> None:
    assert builds.packaging_errors(built, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("version", "machine"),
    [
        pytest.param(builds.PYTHONS[0], "aarch64", marks=pytest.mark.long),
        (builds.PYTHONS[-1], "x86_64"),
    ],
)
def test_the_core_has_wheels(version: str, machine: str, tmp_path: Path) -> None:
    assert builds.resolves(version, machine, tmp_path) == ""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("extra", ["postgresql", "terminal"])
def test_an_extra_installs_alone(extra: str, built: builds.Built, tmp_path: Path) -> None:
    assert builds.extra_alone(extra, built.wheel, tmp_path) == ""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("index")
def test_the_core_runs_on_the_newest_interpreter_here(built: builds.Built, tmp_path: Path) -> None:
    newest = [each for each in builds.find_interpreters() if each.path is not None][-1]
    python = builds.empty_environment(tmp_path / "environment", newest.path)
    assert builds.install(python, built.wheel, pinned=False) == ""
    assert builds.core_works(python, tmp_path / "work") == ""
