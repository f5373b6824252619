"""A build from a clone in which git made no links."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environments import clean_environment

BUILD = "from setuptools import build_meta; build_meta.build_wheel({folder!r})"


def git(*words: str | Path, cwd: Path) -> None:
    author = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *author, *words], cwd=cwd, check=True, capture_output=True)


@pytest.mark.long
def test_a_build_without_links_fails_in_a_sentence(clone: Path, tmp_path: Path) -> None:
    """The sentence's own command then repairs the clone."""
    origin, without = tmp_path / "origin", tmp_path / "without"
    git("init", "-q", origin, cwd=tmp_path)
    git("--work-tree", clone, "add", "--force", ".", cwd=origin)
    git("commit", "-q", "-m", "tree", cwd=origin)
    git("clone", "-q", "-c", "core.symlinks=false", origin, without, cwd=tmp_path)
    assert (without / "tuner" / "models").read_text() == "../models"

    def build() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", BUILD.format(folder=str(tmp_path / "wheels"))],
            cwd=without,
            env=clean_environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    failed = build()
    assert failed.returncode != 0
    assert not list(tmp_path.glob("wheels/*.whl"))
    said = failed.stderr.strip().splitlines()[-1]
    assert said.startswith("joulefront cannot be built from this tree: tuner/models must be a link")
    assert "Traceback" not in failed.stderr
    command = said.split("`")[1]
    assert command == "git config core.symlinks true && git checkout -- tuner"
    subprocess.run(command, shell=True, cwd=without, check=True, capture_output=True)
    assert build().returncode == 0
