"""Environments that have this package as pip installs it, and commands in them."""

from __future__ import annotations

import os
import sys
import sysconfig
import venv
from pathlib import Path

from tests.support.commands import finished


def clean_environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a user to whom this checkout is unknown."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_TARGET"))}
    pip = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1"}
    return {**kept, "HOME": str(home), **pip}


def run(command: list[str | Path], cwd: Path, *, timeout: float = 280) -> str:
    """Return the standard output of a command, which must succeed."""
    done = finished(command, cwd=cwd, env=clean_environment(cwd), timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def pip(*words: str | Path, cwd: Path) -> None:
    """Run pip with the build tools of this environment and without the network."""
    run([sys.executable, "-m", "pip", "--quiet", *words], cwd)


def environment_with(folder: Path, *package: str | Path) -> Path:
    """Return a new environment that has a package of ours, and the others of this environment."""
    venv.create(folder, symlinks=True)
    # The .pth files there, and with them that of an editable install, are not read through this.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    # joulefront is among the others, too: without the last option pip would find it installed.
    options = ("--no-deps", "--no-build-isolation", "--ignore-installed")
    pip("--python", folder / "bin" / "python", "install", *options, *package, cwd=folder)
    return folder
