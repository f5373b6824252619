"""A build from a clone in which git made no links."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environments import clean_environment
from tests.support.commands import finished

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools import build_meta; build_meta.build_wheel({folder!r})"


def git(*words: str | Path, cwd: Path) -> None:
    author = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *author, *words], cwd=cwd, check=True, capture_output=True)


def test_every_link_leads_to_a_file_of_the_repository() -> None:
    """One that a test once made led to a folder of its author, which others may not read."""
    words = ["git", "-c", "safe.directory=*", "ls-files", "--stage"]
    listed = finished(words, cwd=ROOT).stdout
    links = [ROOT / line.split("\t")[1] for line in listed.splitlines() if line[:6] == "120000"]
    for link in links or [ROOT / "tuner" / "models"]:  # an archive without a history
        assert not link.readlink().is_absolute(), link
        assert link.resolve().is_relative_to(ROOT), link
        assert link.exists(), link


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
        return finished(
            [sys.executable, "-c", BUILD.format(folder=str(tmp_path / "wheels"))],
            cwd=without,
            env=clean_environment(tmp_path),
            timeout=280,
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
