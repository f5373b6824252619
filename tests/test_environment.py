"""The tests' environment is stated: nothing that a shell, an editor or CI sets reaches a test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.environment import STATED, stated
from tests.support.commands import finished

ROOT = Path(__file__).parents[1]
#: What the shells, editors, sites and images of people set, and what would change an outcome.
LEAKS = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": "/opt/site/packages",
    "PYTHONOPTIMIZE": "2",
    "PYTHONWARNINGS": "error",
    "PYTHONUTF8": "0",
    "PYTHONHASHSEED": "7",
    "PYTHONSAFEPATH": "1",
    "VIRTUAL_ENV": "/opt/env",
    "CONDA_PREFIX": "/opt/conda",
    "LC_ALL": "de_DE.ISO-8859-1",
    "LANGUAGE": "de",
    "COLUMNS": "60",
    "NO_COLOR": "1",
    "FORCE_COLOR": "1",
    "CI": "true",
    "GITHUB_ACTIONS": "true",
    "OPENBLAS_CORETYPE": "Prescott",
    "OPENBLAS_NUM_THREADS": "9",
    "MKL_NUM_THREADS": "9",
    "CUDA_VISIBLE_DEVICES": "",
    "CUDA_HOME": "/usr/local/cuda",
    "TORCH_EXTENSIONS_DIR": "/opt/ops",
    "NCCL_DEBUG": "INFO",
    "MASTER_ADDR": "node1",
    "WORLD_SIZE": "8",
    "RANK": "3",
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "RAY_ADDRESS": "auto",
    "HF_HOME": "/opt/hub",
    "HF_TOKEN": "secret",
    "WANDB_API_KEY": "secret",
    "WANDB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "http://tracking",
    "JOULEFRONT_RUNS": "/opt/runs",
    "JOULEFRONT_STORAGE": "sqlite://",
    "JOULEFRONT_METER": "own:Meter",
    "XDG_CACHE_HOME": "/opt/cache",
    "XDG_RUNTIME_DIR": "/run/user/7",
    "LD_PRELOAD": "libjemalloc.so.2",
    "LD_LIBRARY_PATH": "/opt/lib",
    "MAKEFLAGS": "-j8",
    "PIP_TARGET": "/opt/target",
    "PIP_USER": "1",
    "PIP_REQUIRE_VIRTUALENV": "1",
    "BASH_ENV": "/opt/rc",
    "GIT_DIR": "/opt/git",
}


def own(tmp_path: Path, **inherited: str) -> dict[str, str]:
    return stated(inherited, tmp_path / "home", tmp_path / "programs")


def test_this_very_test_has_what_is_stated() -> None:
    assert STATED.items() <= os.environ.items()
    assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    # What a library or another test sets is its own.
    assert not {name for name in LEAKS if os.environ.get(name) == LEAKS[name]}
    assert not os.environ["HOME"].startswith(("/root", "/home"))


def test_nothing_leaks(tmp_path: Path) -> None:
    assert own(tmp_path, **LEAKS) == own(tmp_path)
    bare = own(tmp_path)
    assert set(bare) == {*STATED, "PATH", "HOME"}


SEEN = """
import os, subprocess, sys
from pathlib import Path
def test_seen():
    mode = Path("made").touch() or oct(Path("made").stat().st_mode & 0o777)
    env = subprocess.run(["env"], capture_output=True, text=True).stdout
    names = [line.partition("=")[0] for line in env.splitlines()]
    told = [names, os.environ["HOME"], sys.flags.optimize, mode]
    Path(os.environ["TMPDIR"], "seen").write_text(repr(told))
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "workers"])
def test_a_run_of_pytest_begins_with_it(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_seen.py").write_text(SEEN)
    conftest = (
        "from tests import environment\n"
        "HOME = environment.begin(())\n"
        "def pytest_unconfigure(): environment.end(HOME)\n"
    )
    (tmp_path / "conftest.py").write_text(conftest)
    leaks = {name: value for name, value in LEAKS.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-E", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "]
    command[-1] += "import pytest; sys.exit(pytest.main())"
    command += ["-q", "-p", "no:cacheprovider", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    done = finished(
        command,
        cwd=tmp_path,
        env={**leaks, "PATH": "/bin", "HOME": "/nowhere", "TMPDIR": str(tmp_path)},
        umask=0o077,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names, home, optimize, mode = eval((tmp_path / "seen").read_text())
    left = {name for name in names if not name.startswith("PYTEST_")}
    assert left == {*STATED, "PATH", "HOME", "TMPDIR"}  # as a child has them
    assert (optimize, mode) == (0, "0o644")
    assert home.startswith(str(tmp_path))
    assert not Path(home).exists()
