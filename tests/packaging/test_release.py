"""`make release`: notes of the changelog, and the files that it makes before an upload."""

from __future__ import annotations

import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.by_path import module_at
from tests.support.commands import finished

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
#: Lines of a screen on which the notes of a release are read, and their width.
LINES, WIDTH = 40, 120


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return module_at(ROOT / ".ci" / "release.py")


def test_the_notes_are_one_section_of_the_changelog(release: ModuleType) -> None:
    changelog = (
        "# Changelog\n\n## 0.1.0.1\nnot\n\n## 0.1.0 (x)\n\n- one\n\n### two\n\n## 0.0.9\nold\n"
    )
    assert release.notes(changelog, "0.1.0") == "# joulefront 0.1.0\n\n- one\n\n### two\n"
    for missing in ("0.2.0", "0.1"):
        with pytest.raises(SystemExit, match=f"no section '## {missing}'"):
            release.notes(changelog, missing)


def test_the_notes_of_this_version_are_one_screen(release: ModuleType) -> None:
    text = release.notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), VERSION)
    wrapped = [part for line in text.splitlines() for part in textwrap.wrap(line, WIDTH) or [""]]
    assert 10 < len(wrapped) <= LINES


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_release_is_made_and_nothing_is_uploaded(release: ModuleType) -> None:
    done = finished([sys.executable, ROOT / ".ci" / "release.py"], timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("Nothing was uploaded.\n")
    assert "the lowest versions" in done.stdout
    made = {path.suffix for path in release.OUT.iterdir()}
    assert made == {".gz", ".whl", ".md"}
