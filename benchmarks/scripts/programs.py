"""Programs of other projects at pinned versions, and what each trains: `scripts.toml`.

A program starts unmodified, in a fresh folder, on tiny models and data (`inputs`). What it trains
(`today`) was read from its source by hand, so it owes nothing to the code that is judged by it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import ROOT
from benchmarks.scripts.environment import Unavailable, checkout

LIST = Path(__file__).with_name("scripts.toml")


@dataclass(frozen=True)
class Program:
    """One program of the list.

    Attributes:
        name: for tables.
        command: as its project documents it, made small, with $INPUTS for the folder of inputs.
        today: ranks, micro-batch, accumulation and global batch that it trains; 0 if no number is
            right. Empty if it does not train here.
        error: regular expression for what the answer must say if it does not train here (the
            program's own last words, or the way out).
        turns: True if its own arguments or its framework carry a knob that keeps the training; it
            may be answered by that nothing can be turned otherwise.
        short: True if its whole training takes a second or less, so that nothing is measured.
        source: package and version; "" for a repository.
        repository, commit, folder: OWNER/NAME, the pinned commit, and the folder that it starts in.
        links: names in that folder, and the inputs that they lead to.
        path: folder for PYTHONPATH, from the program's.
        whole: True if it imports other parts of its repository.
        without: files of the repository that are left out, because links replace them.
        before: command that prepares its data, in the same folder.
    """

    name: str
    command: str
    today: Sequence[int] = ()
    error: str = ""
    turns: bool = False
    short: bool = False
    source: str = ""
    repository: str = ""
    commit: str = ""
    folder: str = "."
    links: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    whole: bool = False
    without: Sequence[str] = ()
    before: str = ""

    @property
    def slug(self) -> str:
        return "-".join(self.name.lower().split())

    @property
    def origin(self) -> str:
        """Source and version, for tables."""
        return self.source or f"{self.repository}@{self.commit[:7]}"

    def words(self, cache: Path) -> list[str]:
        """Return the command with the inputs of a cache folder."""
        return shlex.split(self.command.replace("$INPUTS", str(cache / "inputs")))


def listed() -> tuple[list[str], list[str], list[Program]]:
    """Return the packages, those without dependencies, and the programs of the list."""
    table = tomllib.loads(LIST.read_text(encoding="utf-8"))
    programs = [
        Program(**{**row, "command": " ".join(row["command"].split())}) for row in table["program"]
    ]
    return table["packages"], table["without_dependencies"], programs


def prepare(program: Program, cache: Path, sources: Path | None) -> Path:
    """Return the folder that a program starts in, fresh, with links to its inputs.

    Raises:
        Unavailable: its repository is not there, or its data cannot be prepared.
    """
    work = cache / "work" / program.slug
    shutil.rmtree(work, ignore_errors=True)
    part = "." if program.whole else program.folder
    if program.repository:
        tree = checkout(
            program.repository, program.commit, part, cache / "sources", sources, program.without
        )
        shutil.copytree(tree / part, work / part)
    folder = work / program.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in program.links.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(cache / "inputs" / target)
    if program.before:
        done = subprocess.run(
            shlex.split(program.before),
            cwd=folder,
            env=environment_of(program, folder, cache),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Unavailable(f"{program.before}: {done.stderr.strip()[-200:]}")
    return folder


def environment_of(program: Program, folder: Path, cache: Path) -> dict[str, str]:
    """Return the environment in which a program starts: it downloads nothing."""
    paths = [str((folder / program.path).resolve())] if program.path else []
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    programs = [str(cache / "environment" / "bin"), os.environ["PATH"]]
    found = {**os.environ, **offline, "WANDB_MODE": "disabled", "PATH": os.pathsep.join(programs)}
    # torchtitan is given the module of this benchmark that makes it train on cores.
    found["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT)])
    return found
