"""Content and use of the wheel and the source archive, also of a clone without links."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environments import clean_environment, environment_with, run
from tests.support.commands import finished

SOURCE_ARCHIVE = "from setuptools import build_meta; build_meta.build_sdist({folder!r})"


def package_files(root: Path) -> set[str]:
    """Return the files of `tuner` in a checkout, with those its links lead to, but for the pages
    that tell a reader of the sources what an extra is."""
    return {
        path.relative_to(root).as_posix()
        for top in (root / "tuner", *(p for p in (root / "tuner").iterdir() if p.is_symlink()))
        for path in top.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "README.md"
    }


def test_the_wheel_holds_tuner_and_nothing_else(clone: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    assert not [entry for entry in entries if stat.S_ISLNK(entry.external_attr >> 16)]
    names = {entry.filename for entry in entries}
    held = {name for name in names if not name.startswith("joulefront-")}
    assert held == package_files(clone)
    assert {name.partition("/")[0].partition("-")[2] for name in names - held} == {
        f"{wheel.name.split('-')[1]}.dist-info"
    }
    # One of each kind, so that a comparison of two empty folders cannot pass.
    assert held > {
        "tuner/py.typed",
        "tuner/testing/meters.py",
        "tuner/templates/report.html",
        "tuner/search_spaces/data/jobs/tiny-gpt.toml",
        "tuner/search_spaces/data/models/tiny-gpt.json",
        "tuner/models/data/known_error.toml",
        "tuner/models/data/constants/cpu.toml",
        "tuner/workload/program/train.py",
    }


@pytest.mark.long
def test_the_source_archive_makes_the_same_wheel(clone: Path, wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-c", SOURCE_ARCHIVE.format(folder=str(tmp_path))], clone)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        assert not [member.name for member in opened if member.issym() or member.islnk()]
        names = {name.partition("/")[2] for name in opened.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert tops - {""} == {
        "LICENSE",
        "MANIFEST.in",
        "setup.py",
        "PKG-INFO",
        "README.md",
        "joulefront.egg-info",
        "pyproject.toml",
        "setup.cfg",
        "tuner",
    }
    folder = environment_with(tmp_path / "venv", archive)
    (packages,) = folder.glob("lib/*/site-packages")
    with zipfile.ZipFile(wheel) as opened_wheel:
        wanted = {name for name in opened_wheel.namelist() if name.startswith("tuner/")}
    assert package_files(packages) == wanted


SIMULATED = ("opt-350m", "--cluster", "h200-8", "--executor", "simulated")


@pytest.mark.slow
def test_the_installed_command_runs_without_the_repository(installed: Path, tmp_path: Path) -> None:
    tuner = installed / "bin" / "tuner"
    few = ("--max-probes", "3", "--no-verify", "--json")
    planned = json.loads(run([tuner, "optimize", *SIMULATED, "--name", "plan", *few], tmp_path))
    assert planned["points"]
    assert (tmp_path / "runs" / "plan" / "report.html").stat().st_size > 100_000
    run([installed / "bin" / "python", "-c", "import tuner.testing.meters"], tmp_path)
    # Also on a machine with nothing to tune, which exit code 1 says.
    doctor = finished([tuner, "doctor"], cwd=tmp_path, env=clean_environment(tmp_path), timeout=120)
    assert doctor.returncode in (0, 1), doctor.stderr
    assert "Traceback" not in doctor.stderr


def test_an_editable_install_of_a_clone_is_imported_through_its_links(
    clone: Path, tmp_path: Path
) -> None:
    folder = environment_with(tmp_path / "venv", "-e", clone)
    code = "import tuner.models.analytic.model as m; print(m.__file__)"
    found = Path(run([folder / "bin" / "python", "-c", code], tmp_path).strip())
    assert found == clone / "tuner/models/analytic/model.py"
    assert found.resolve() == clone / "models/analytic/model.py"


@pytest.mark.parametrize("name", ["models", "search_spaces", "workload", "tests", "benchmarks"])
def test_no_other_package_is_installed(installed: Path, tmp_path: Path, name: str) -> None:
    code = f"import importlib.util as u; print(u.find_spec({name!r}))"
    assert run([installed / "bin" / "python", "-c", code], tmp_path).strip() == "None"


# ---- a clone in which git made no links


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
