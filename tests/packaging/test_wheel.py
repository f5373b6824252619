"""Content of the wheel and of the source archive, and their use without the repository beside."""

from __future__ import annotations

import json
import stat
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
