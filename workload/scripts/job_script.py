"""Job scripts of the shell: their requests to Slurm, and the lines that start ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.search_spaces.cluster import Cluster

_ENDINGS = (".sh", ".bash", ".sbatch", ".slurm", ".job")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
#: Options of sbatch by what they ask for; the value follows "=" or a space (man sbatch).
_RESOURCE_OPTIONS = {
    "nodes": re.compile(r"(?:--nodes[= ]|-N ?)(\d+)"),
    "tasks": re.compile(r"(?:--ntasks[= ]|-n ?)(\d+)"),
    "tasks a node": re.compile(r"--ntasks-per-node[= ](\d+)"),
    "GPUs a node": re.compile(r"(?:--gpus-per-node[= ]|--gres[= ]gpu:)(?:\w+:)?(\d+)"),
    "GPUs": re.compile(r"(?:--gpus[= ]|-G ?)(?:\w+:)?(\d+)"),
}


@dataclass(frozen=True)
class JobScript:
    """Script of the shell that a command starts, and the arguments that it gets."""

    path: Path
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str], folder: Path) -> JobScript | None:
        """Return the script that a command starts as `bash FILE`, `sbatch FILE` or `FILE`."""
        first = Path(words[0]).name if words else ""
        after = 0
        if first in (*_SHELLS, "sbatch"):
            files = (at for at, word in enumerate(words) if at and (folder / word).is_file())
            after = next(files, 0)
            options = all(word.startswith("-") and word != "-c" for word in words[1:after])
            if not after or (first != "sbatch" and not options):
                return None
        elif not words or not is_job_script(folder / words[0]):
            return None
        return cls(folder / words[after], tuple(words[after + 1 :]))

    @property
    def command(self) -> str:
        """The line that runs it here, as Slurm would on its first node."""
        return shlex.join(["bash", str(self.path), *self.arguments])

    def lines(self) -> list[str]:
        """Return its lines; none if it cannot be read."""
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []

    def requested_resources(self) -> dict[str, int]:
        """Return the resources that its #SBATCH lines request."""
        text = "\n".join(line for line in self.lines() if line.startswith("#SBATCH"))
        return {
            name: int(found[1])
            for name, each in _RESOURCE_OPTIONS.items()
            if (found := each.search(text))
        }

    def differences(self, cluster: Cluster) -> str:
        """Return how its #SBATCH lines differ from the machines here, one sentence, or ""."""
        requested_resources, here = self.requested_resources(), cluster.devices_per_node
        gpus = here if cluster.device.is_gpu else 0
        has = {"nodes": cluster.nodes, "GPUs a node": gpus, "GPUs": gpus * cluster.nodes}
        other = [
            f"{requested_resources[name]} {name}"
            for name in has
            if requested_resources.get(name, has[name]) != has[name]
        ]
        if not other:
            return ""
        nodes = f"{cluster.nodes} node{'s' * (cluster.nodes != 1)}"
        return (
            f"{self.path.name} asks Slurm for {', '.join(other)}; here it runs on {nodes} of "
            f"{here} {cluster.device.plural}"
        )

    def ran(self, log: Path, ranks_began_s: float, first_step_s: float) -> str:
        """Return which of its lines started the ranks, a sentence, or "" if that is unknown.

        Args:
            log: what `hook/entry/bash_env` has written: time, file and number of each line.
            ranks_began_s: when the first rank began, seconds since the epoch.
            first_step_s: seconds from the start of the command to its first step.
        """
        try:
            entries = [line.split(" ", 2) for line in log.read_text().splitlines()]
            own = [
                (float(at), int(number))
                for at, number, file in entries
                if Path(file).name == self.path.name
            ]
        except (OSError, ValueError):
            return ""
        before = [entry for entry in own if entry[0] <= ranks_began_s]
        if not before:
            return ""
        (began_s, _), (started_s, number) = before[0], before[-1]
        others = len({line for _, line in before} - {number})
        text = self.lines()[number - 1].strip() if number <= len(self.lines()) else ""
        spent = ""
        if others:
            lines = f"{others} other line{'s' * (others != 1)}"
            spent = f"{lines} ran before it, in {started_s - began_s:.1f} s; "
        return (
            f"line {number} of {self.path.name} started the ranks ({text[:80]}); {spent}the first "
            f"step came after {first_step_s:.1f} s"
        )


def is_job_script(path: Path) -> bool:
    """Return True if a file is a script of the shell, by its ending or its first line."""
    if not path.is_file():
        return False
    if path.suffix in _ENDINGS:
        return True
    with path.open("rb") as file:
        first = file.read(100).split(b"\n")[0].decode(errors="replace")
    return first.startswith("#!") and Path(first.split()[-1]).name in _SHELLS
