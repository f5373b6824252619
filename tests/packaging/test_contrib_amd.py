"""AMD's GPUs are a distribution of their own, which pip installs beside the package."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.commands import finished

ROOT = Path(__file__).parents[2]
#: Doctor on a node of two made-up GPUs of AMD.
DOCTOR = """
import sys, time
sys.path.insert(0, sys.argv[1])
from amdsmi_stub import Stub, StubGpu
sys.modules["amdsmi"] = Stub([StubGpu(), StubGpu()], lambda: 100.0 + time.monotonic()).module()
from tuner.cli.main import main
main(["doctor", "--brief"])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip has installed the distribution, without a network."""
    folder = tmp_path_factory.mktemp("amd")
    source = shutil.copytree(
        ROOT / "contrib" / "amd", folder / "source", ignore=shutil.ignore_patterns("__pycache__")
    )
    words = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target"]
    run([sys.executable, "-m", "pip", "install", *words, str(folder / "site"), str(source)])
    return folder / "site"


def run(command: Sequence[str], site: Path | None = None) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if site is not None:
        environ |= {"PYTHONPATH": str(site)}
        environ.pop("CUDA_VISIBLE_DEVICES", None)
    done = finished(command, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_passes_the_contract_of_its_socket(installed: Path) -> None:
    tests = str(ROOT / "contrib" / "amd" / "tests")
    words = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tests, tests]
    assert " passed" in run([sys.executable, "-m", "pytest", *words], installed)


def test_doctor_finds_it(installed: Path) -> None:
    stub = str(ROOT / "contrib" / "amd" / "tests")
    said = run([sys.executable, "-c", DOCTOR, stub], installed)
    assert "2 x AMD Instinct MI300X" in said
    assert "amdsmi" in said


def test_without_it_the_package_knows_nothing_of_amd() -> None:
    said = run(
        [sys.executable, "-c", "from tuner.cli.main import main; main()", "doctor", "--brief", "-v"]
    )
    assert "amdsmi" not in said
    assert "left out" not in said
