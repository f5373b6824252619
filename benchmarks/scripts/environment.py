"""Where the scripts of other projects run: their sources and an environment with their packages.

Everything lies in one cache folder: `environment` (a virtual environment over the packages of the
project's, so that torch stays the pinned build), `sources` (checkouts at pinned commits) and
`inputs` (`benchmarks.scripts.inputs`). Nothing of it becomes part of the repository.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import ROOT

_LIMIT_S = 900.0


class Unavailable(RuntimeError):
    """A source or a package that cannot be had here, with the reason."""


def cache_folder() -> Path:
    """Return the folder that the benchmark keeps between its runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "joulefront" / "benchmark-scripts"


def make_environment(
    folder: Path, packages: Sequence[str], without_dependencies: Sequence[str]
) -> Path:
    """Return the interpreter of an environment that has these packages beside the project's.

    Args:
        folder: made if it does not exist; the packages are installed once.
        packages: requirements such as "trl==1.16.0", resolved within constraints.txt.
        without_dependencies: requirements that pin another torch than the project's.

    Raises:
        Unavailable: pip fails, for instance without a registry.
    """
    python = folder / "bin" / "python"
    wanted = "\n".join([*packages, *without_dependencies])
    mark = folder / "installed.txt"
    if mark.is_file() and mark.read_text() == wanted:
        return python
    if not python.exists():
        venv.create(folder, with_pip=True)
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(site) / "project.pth").write_text("\n".join([*paths, str(ROOT)]) + "\n")
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    _pip(python, *constraints, *packages)
    if without_dependencies:
        _pip(python, "--no-deps", *without_dependencies)
    _declare_operators(Path(site) / "torchvision" / "extension.py")
    _share_programs(folder / "bin")
    mark.write_text(wanted)
    return python


def _declare_operators(extension: Path) -> None:
    """Declare the operators that torchvision's build for GPUs cannot load beside torch for CPUs."""
    if extension.is_file() and "qnms" not in extension.read_text():
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        declared = [
            f'    torch.library.define("torchvision::{o}", "{boxes}")' for o in ("nms", "qnms")
        ]
        with extension.open("a") as file:
            file.write("\n".join(["if not _has_ops():", *declared, ""]))


def _share_programs(folder: Path) -> None:
    """Write the project's own console programs (torchrun, ...) for this environment's Python."""
    head = f"#!{sys.prefix}/bin/python".encode()
    for program in (Path(sys.prefix) / "bin").iterdir():
        copy = folder / program.name
        if program.is_file() and not program.is_symlink() and not copy.exists():
            text = program.read_bytes()
            if text.startswith(head):
                copy.write_bytes(f"#!{folder}/python".encode() + text[len(head) :])
                copy.chmod(0o755)


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--retries", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"pip cannot install them: {' '.join(lines[-1:]) or done.stderr[-200:]}")


def checkout(
    repository: str,
    commit: str,
    part: str,
    folder: Path,
    sources: Path | None,
    without: Sequence[str] = (),
) -> Path:
    """Return a folder with a part of a public repository at a commit, by its path there.

    Args:
        repository: OWNER/NAME on GitHub.
        commit: 40 hexadecimal digits.
        part: the folder of the repository that is needed; "." for all.
        folder: takes the files.
        sources: folder that holds OWNER/NAME as git repositories; None to fetch from GitHub.
        without: files that are left out.

    Raises:
        Unavailable: the repository, the commit or the folder is not there.
    """
    tree = folder / f"{repository.replace('/', '-')}-{commit[:12]}"
    # Another script of the repository may have needed a folder within this one.
    complete = tree / f".complete-{part.replace('/', '-')}"
    if complete.is_file():
        return tree
    tree.mkdir(parents=True, exist_ok=True)
    store = _store(repository, sources) if sources else _bare(repository, commit, folder)
    left_out = [f":(exclude){part}/{file}" for file in without]
    packed = _git(store, "archive", "--format=tar", commit, part, *left_out)
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(tree, filter="data")
    complete.touch()
    return tree


def _store(repository: str, sources: Path) -> Path:
    """Return a repository in a folder of them: OWNER/NAME, or a mirror OWNER+NAME/repo."""
    mirror = sources / repository.replace("/", "+") / "repo"
    for store in (sources / repository, mirror / ".git", mirror):
        if store.exists():
            return store
    raise Unavailable(f"{sources / repository} does not exist")


def _bare(repository: str, commit: str, folder: Path) -> Path:
    """Return a repository that knows one commit and fetches its files when they are read."""
    store = folder / f"{repository.replace('/', '-')}.git"
    if not store.exists():
        store.mkdir(parents=True)
        _git(store, "init", "--quiet", "--bare")
        _git(store, "remote", "add", "origin", f"https://github.com/{repository}")
    _git(store, "fetch", "--quiet", "--depth", "1", "--filter=blob:none", "origin", commit)
    return store


def _git(store: Path, *arguments: str) -> bytes:
    done = subprocess.run(
        ["git", *arguments], cwd=store, capture_output=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise Unavailable(f"git {arguments[0]} {store.name}: {' '.join(reason)}")
    return done.stdout
