"""Missing permissions and parts of a machine, each with the lines that an administrator runs.

Only what can be had here is missing: a virtual machine without energy counters lacks nothing that
anyone could permit, so its energy is estimated and it is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tuner.search_spaces.extras import install_command
from tuner.workload.node.clocks.base import CoreGovernor
from tuner.workload.node.clocks.clock_backends import shipped_ways
from tuner.workload.node.host import why_few_cores, why_shm_is_small


@dataclass(frozen=True)
class Program:
    """Program of the system that joulefront, or a training below it, starts.

    Attributes:
        brings: what it is for, a clause.
        line: what installs it on Debian and Ubuntu.
    """

    name: str
    brings: str
    line: str


#: The programs whose lack takes something away. Any other that a command line names is its own.
PROGRAMS = (
    Program(
        "g++",
        "with which DeepSpeed compiles its optimizer for offload, and torch.compile its kernels",
        "apt-get install g++",
    ),
    Program("ninja", "with which DeepSpeed compiles its operations", "pip install ninja"),
    Program("bash", "which starts a command line in quotes", "apt-get install bash"),
)
#: The packages without which nothing trains.
NEEDED = ("torch", "deepspeed", "transformers")
#: Those whose versions a study keeps besides.
USED = ("optuna", "ray", *NEEDED)


@dataclass(frozen=True)
class MissingItem:
    """One thing that is not permitted or not there.

    Attributes:
        lines: what an administrator runs; each line serves by itself unless it says "then".
    """

    subject: str
    lines: tuple[str, ...] = ()

    def text(self) -> list[str]:
        """Return the thing and its lines as text."""
        return [f"missing   {self.subject}", *(f"          {line}" for line in self.lines)]


def missing_clocks(environ: Mapping[str, str], *, slurm: bool = False) -> MissingItem:
    """Return the lines that permit clocks of GPUs to a user without root."""
    lines = [line for way in shipped_ways() for line in way.installation()]
    if slurm or environ.get("SLURM_JOB_ID"):
        lines.append("slurm:  one clock for a whole job: srun --gpu-freq=MHZ")
    return MissingItem("permission to set the clocks and power limits of the GPUs", tuple(lines))


def missing_of_cores(governor: CoreGovernor, energy_grant: str) -> Iterator[MissingItem]:
    """Return the obstacles to metering the cores' energy and setting their clocks."""
    for line, subject in (
        (energy_grant, "permission to read the energy of the processor"),
        (governor.clock_grant, "permission to set the clocks of the cores"),
        (governor.limit_grant, "permission to cap the power of the processor"),
    ):
        if line:
            yield MissingItem(subject, (line,))


def missing_parts(
    packages: Mapping[str, str | None],
    programs: Mapping[str, str | None],
    *,
    gpus: int,
    cores: float,
    shm_bytes: int,
    why_not_torch: str = "",
    import_errors: Mapping[str, str] | None = None,
) -> Iterator[MissingItem]:
    """Return the obstacles to training here, with the commands that remove them."""
    for name, why in (import_errors or {}).items():
        yield MissingItem(f"{name} {packages[name]} that can be imported: {why}")
    if lacking := [name for name in NEEDED if not packages.get(name)]:
        line = install_command("train")
        if not gpus and "torch" in lacking:
            line += " (before it torch's CPU build, or pip installs CUDA's, of 6 GB)"
        yield MissingItem(", ".join(lacking), (line,))
    if why_not_torch:
        yield MissingItem(f"a torch that can use the GPUs: {why_not_torch}")
    if why := why_few_cores(cores, gpus):
        yield MissingItem(f"cores: {why}")
    if gpus and (why := why_shm_is_small(shm_bytes, gpus)):
        yield MissingItem(f"shared memory: {why}")
    for program in PROGRAMS:
        if not programs.get(program.name):
            yield MissingItem(f"{program.name}, {program.brings}", (program.line,))
