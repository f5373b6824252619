"""Builds of the package, empty environments, and the interpreters that it names.

Everything is installed by the pip of this environment with its settings, into folders of its own.
Versions are those of constraints.txt where this interpreter runs, so that an index with several
builds of torch gives the one that CI has; other interpreters take the newest that fit.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Interpreters that the metadata names.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Extras, and the modules that each is for.
EXTRAS: dict[str, tuple[str, ...]] = {
    "train": ("torch", "deepspeed", "transformers"),
    "ray": ("ray",),
    "dashboard": ("optuna_dashboard",),
    "notebook": ("pandas",),
    "metrics": ("prometheus_client",),
    "terminal": ("rich", "shtab"),
    "postgresql": ("psycopg2",),
    "docs": ("mkdocs", "mkdocstrings"),
}
_NOT_CLONED = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site")
_BACKEND = "import sys; from setuptools import build_meta as b; print(b.build_{kind}(sys.argv[1]))"
#: Platform tags of wheels that a cluster's system takes (glibc 2.28: RHEL 8 and newer).
_GLIBC = ("2_28", "2_27", "2_24", "2_17")


@dataclass(frozen=True)
class Built:
    """The two archives of a release."""

    wheel: Path
    source: Path


@dataclass(frozen=True)
class Interpreter:
    """An interpreter that the metadata names.

    Attributes:
        version: such as "3.12".
        path: where it is, or None.
        why_not: the reason if there is none.
    """

    version: str
    path: Path | None
    why_not: str = ""


def _run(command: Sequence[str | Path], **more: object) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 900, "check": False, **more}
    return subprocess.run(list(map(str, command)), **options)  # type: ignore[call-overload,no-any-return]


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """Return why a command failed, shortened; empty if it did not."""
    if done.returncode == 0:
        return ""
    said = [line for line in (done.stderr or done.stdout).splitlines() if "WARNING" not in line]
    return f"exit code {done.returncode}: {' '.join(said)[-400:]}"


def build(folder: Path) -> Built:
    """Build the wheel and the source archive from a copy of this checkout.

    Args:
        folder: an empty folder.

    Raises:
        RuntimeError: the build failed.
    """
    copy = folder / "clone"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_CLONED))
    made = []
    for kind in ("sdist", "wheel"):
        done = _run([sys.executable, "-c", _BACKEND.format(kind=kind), folder], cwd=copy)
        if done.returncode:
            raise RuntimeError(f"the build failed: {_end(done)}")
        made.append(folder / done.stdout.split()[-1])
    return Built(wheel=made[1], source=made[0])


def packaging_errors(built: Built, folder: Path) -> str:
    """Return what `twine check --strict` says against the archives; empty if it accepts them.

    Args:
        built: the archives.
        folder: where twine is installed, unless this environment has it.
    """
    python = Path(sys.executable)
    if importlib.util.find_spec("twine") is None:
        python = empty_environment(folder / "twine")
        if why := install(python, "twine"):
            return f"twine cannot be installed: {why}"
    check = [python, "-m", "twine", "check", "--strict", built.wheel, built.source]
    return _end(_run(check))


def empty_environment(folder: Path, python: Path | None = None) -> Path:
    """Make a virtual environment without any package, and return its interpreter."""
    if python is None:
        venv.create(folder, symlinks=True)
    else:
        _run([python, "-m", "venv", "--without-pip", folder])
    return folder / "bin" / "python"


def install(python: Path, *requirements: str | Path, pinned: bool = True) -> str:
    """Install into an environment; return why it failed, or empty.

    Args:
        python: the interpreter of the environment.
        requirements: what to install.
        pinned: take the versions of constraints.txt.
    """
    pins = ["-c", ROOT / "constraints.txt"] if pinned else []
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    return _end(_run([*pip, "--python", python, "install", "--no-compile", *pins, *requirements]))


def _no_compiler(python: Path) -> dict[str, str]:
    """Return an environment whose PATH has the virtual environment's commands and no other."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JOULEFRONT"))}
    return {**kept, "PATH": str(python.parent), "PIP_NO_INDEX": "1"}


def core_works(python: Path, folder: Path) -> str:
    """Return what fails of the installed command without a compiler on the PATH; empty if nothing.

    It prints help and version, plans a job for a cluster, and reports.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tuner = python.parent / "tuner"
    # Without --brief, the exit code says that no training can start here, which is so.
    doctor = ("doctor", "--brief")
    plan = ("plan", "opt-350m", "--cluster", "h200-8", "--name", "plan")
    for words in (("--help",), ("--version",), (*plan, "--quiet"), ("show", "plan"), doctor):
        done = _run([tuner, *words], cwd=folder, env=_no_compiler(python))
        if why := _end(done):
            return f"tuner {words[0]}: {why}"
    if (folder / "runs" / "plan" / "report.html").stat().st_size < 100_000:
        return "the report is not whole"
    return ""


def extra_alone(extra: str, wheel: Path, folder: Path) -> str:
    """Install one extra of the wheel into an empty environment; return what fails, or empty.

    Its modules are imported, the requirements of every package are met, and the command answers.
    """
    python = empty_environment(folder / extra)
    if why := install(python, f"{wheel}[{extra}]"):
        return why
    found = "import importlib.util as u; " + "; ".join(
        f"assert u.find_spec({name!r}), {name!r}" for name in EXTRAS[extra]
    )
    checks = [
        [python, "-c", found],
        [python.parent / "tuner", "--version"],
        [sys.executable, "-m", "pip", "--python", python, "check"],
    ]
    return next((why for command in checks if (why := _end(_run(command)))), "")


def find_interpreters() -> list[Interpreter]:
    """Return each interpreter that the metadata names, or why it is missing.

    The PATH is searched, then the folder of pyenv.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = []
    for version in PYTHONS:
        name = f"python{version}"
        places = [shutil.which(name), *pyenv.glob(f"{version}.*/bin/{name}")]
        ask = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
        fits = (
            Path(place)
            for place in places
            if place and _run([place, "-c", ask]).stdout.strip() == version
        )
        path = next(fits, None)
        found.append(Interpreter(version, path, "" if path else f"no {name} on this machine"))
    return found


def core_requirements() -> list[str]:
    """Return what the core depends on, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def resolves(version: str, machine: str, folder: Path) -> str:
    """Return why the core has no wheels for an interpreter and a processor; empty if it has.

    pip resolves the requirements without installing them.

    Args:
        version: of Python, such as "3.14".
        machine: "x86_64" or "aarch64".
        folder: named as the target, where nothing is written.
    """
    tags = [word for glibc in _GLIBC for word in ("--platform", f"manylinux_{glibc}_{machine}")]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    options = ["--dry-run", "--ignore-installed", "--target", folder / "none"]
    options += ["--only-binary", ":all:", "--python-version", version, *tags]
    return _end(_run([*pip, *options, *core_requirements()]))
