"""Make a release and stop before the upload: sdist, wheel and notes in build/release.

usage: make release

Both archives are checked by twine and installed into empty environments: the wheel with every
Python that the metadata names and that is found here, the sdist with the lowest versions of the
dependencies. The installed command must plan and report there. The notes are the section of
CHANGELOG.md.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.packaging import builds  # noqa: E402

OUT = ROOT / "build" / "release"


def notes(changelog: str, version: str) -> str:
    """Return the notes of a version; SystemExit if the changelog has no section of it."""
    heading = rf"^## {re.escape(version)}(?![.\w])[^\n]*\n"
    found = re.search(rf"{heading}(.*?)(?=^## |\Z)", changelog, flags=re.M | re.S)
    if found is None or not found[1].strip():
        sys.exit(f"CHANGELOG.md has no section '## {version}'")
    return f"# joulefront {version}\n\n{found[1].strip()}\n"


def check(archive: Path, work: Path, python: Path | None = None, constraints: str = "") -> None:
    """Install an archive into an empty environment and use it; exit if anything fails."""
    work.mkdir()
    made = builds.empty_environment(work / "venv", python)
    pins = ["-c", ROOT / constraints] if constraints else []
    why = builds.install(made, *pins, archive, pinned=False) or builds.core_works(
        made, work / "used"
    )
    if why:
        sys.exit(f"{archive.name} with {work.name}: {why}")
    print(f"{archive.name} with {work.name}: installs, plans and reports", flush=True)


def main() -> None:
    """Make and check the files; exit with a sentence where something fails."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    text = notes(changelog, version)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="joulefront-release-") as name:
        work = Path(name)
        (work / "built").mkdir()
        built = builds.build(work / "built")
        if why := builds.packaging_errors(built, work):
            sys.exit(f"twine: {why}")
        for each in builds.find_interpreters():
            if each.path is None:
                print(f"not tried: Python {each.version}, {each.why_not}")
            else:
                check(built.wheel, work / f"Python {each.version}", each.path)
        lowest = f"the lowest versions on Python {sys.version_info[0]}.{sys.version_info[1]}"
        check(built.source, work / lowest, constraints="constraints-lowest.txt")
        for archive in (built.source, built.wheel):
            shutil.copy(archive, OUT)
    (OUT / "notes.md").write_text(text, encoding="utf-8")
    if f"## {version} (unreleased)" in changelog:
        print(f"before the upload: give '## {version} (unreleased)' in CHANGELOG.md its date")
    print(f"{', '.join(sorted(p.name for p in OUT.iterdir()))} are in {OUT.relative_to(ROOT)}")
    print("Nothing was uploaded.")


if __name__ == "__main__":
    main()
