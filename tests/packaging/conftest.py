"""A clone of the repository, the wheel made of it, and an environment that has the wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.packaging.environments import environment_with, pip

ROOT = Path(__file__).resolve().parents[2]
#: Names in a checkout that a clone does not have.
NOT_CLONED = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site")


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this checkout as a bare clone has them, links as links."""
    folder = tmp_path_factory.mktemp("clone") / "joulefront"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*NOT_CLONED))
    return folder


@pytest.fixture(scope="session")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, clone, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel."""
    return environment_with(tmp_path_factory.mktemp("installed") / "venv", wheel)
