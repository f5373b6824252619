"""The tests' environment is stated: nothing that a shell, an editor or CI sets reaches a test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.environment import KERNEL as ASKED_KERNEL
from tests.environment import LONGEST_BUILD_S, LOOPBACK, STATED, remove_old_locks, stated

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
NETWORK = {
    "https_proxy": "http://proxy:3128",
    "PIP_INDEX_URL": "https://mirror/simple",
    "SSL_CERT_FILE": "/etc/own.crt",
    "TMPDIR": "/scratch",
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


def test_where_packages_come_from_is_kept_and_this_machine_is_no_proxys(tmp_path: Path) -> None:
    found = own(tmp_path, **NETWORK, **LEAKS)
    assert NETWORK.items() <= found.items()
    assert found["no_proxy"] == found["NO_PROXY"] == ",".join(LOOPBACK)
    beside = own(tmp_path, **NETWORK, NO_PROXY="mirror")
    assert beside["no_proxy"] == ",".join(["mirror", *LOOPBACK])
    assert "no_proxy" not in own(tmp_path)


def test_what_the_home_says_of_packages_is_kept_without_the_home(tmp_path: Path) -> None:
    user = tmp_path / "user"
    settings = user / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    settings.touch()
    (user / ".cache" / "pip").mkdir(parents=True)
    (user / ".pyenv").mkdir()
    found = own(tmp_path, HOME=str(user))
    assert found["PIP_CONFIG_FILE"] == str(settings)
    assert found["PIP_CACHE_DIR"] == str(user / ".cache" / "pip")
    assert found["PYENV_ROOT"] == str(user / ".pyenv")
    assert found["HOME"] == str(tmp_path / "home")
    chosen = own(tmp_path, HOME=str(user), PIP_CONFIG_FILE="/etc/own.conf")
    assert chosen["PIP_CONFIG_FILE"] == "/etc/own.conf"


def test_make_other_cpu_asks_for_kernels(tmp_path: Path) -> None:
    found = own(tmp_path, **{ASKED_KERNEL: "Prescott"})
    assert found["OPENBLAS_CORETYPE"] == "Prescott"
    assert f"{ASKED_KERNEL}=Prescott $(PYTEST)" in (ROOT / "Makefile").read_text()


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
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**leaks, "PATH": "/bin", "HOME": "/nowhere", "TMPDIR": str(tmp_path)},
        umask=0o077,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names, home, optimize, mode = eval((tmp_path / "seen").read_text())
    left = {name for name in names if not name.startswith("PYTEST_")}
    assert left == {*STATED, "PATH", "HOME", "TMPDIR"}  # as a child has them
    assert (optimize, mode) == (0, "0o644")
    assert home.startswith(str(tmp_path))
    assert not Path(home).exists()


def test_the_lock_of_a_compilation_that_was_killed_goes(tmp_path: Path) -> None:
    locks = [tmp_path / "torch_extensions" / "py311_cpu" / name / "lock" for name in ("a", "b")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    killed, living = locks
    long_ago = time.time() - LONGEST_BUILD_S - 1
    os.utime(killed, (long_ago, long_ago))
    remove_old_locks(tmp_path)
    assert not killed.exists()
    assert living.exists()
