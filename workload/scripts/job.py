"""Jobs as a node starts them, for a search and the launch files.

A `job` elsewhere is a `TrainingJob`: what is trained. `launchable` returns how it is started: a
user's script (`tuner.workload.scripts.script_job`) is both, and a job of which only the sizes are
known can be predicted (`ModelledJob`), and is trained by the built-in program, an extra.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import Knob, check_knobs, with_baseline
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.plugins import not_installed, shipped_module
from tuner.search_spaces.rules import unrunnable
from tuner.search_spaces.space import SearchSpace, default_configuration
from tuner.workload.scripts.command import Script, Start
from tuner.workload.scripts.declared_knobs import program_knobs
from tuner.workload.scripts.script_facts import Framework, Launcher
from tuner.workload.scripts.secrets import require


@dataclass(frozen=True)
class UserCommand:
    """A user's command: the words of a rank, its folder, its variables, and its framework."""

    words: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    framework: Framework | None


class LaunchableJob(ABC):
    """A job whose ranks a node can start; by default its command has nothing of its own."""

    @property
    @abstractmethod
    def facts(self) -> TrainingJob:
        """Batch, lengths and knobs, as study.toml keeps them."""

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """The knobs that the user declares."""
        return self.facts.knobs

    @property
    def steps(self) -> int | None:
        """Number of optimizer steps to the solution; None if unknown."""
        return self.facts.steps

    # ---- what it is today

    @abstractmethod
    def today(self) -> Configuration:
        """Return the user's present configuration."""

    @property
    def today_name(self) -> str:
        """Source of today's configuration; "" if it is a default."""
        return ""

    @property
    def ranks_today(self) -> int:
        """Number of ranks that it is started on today."""
        return self.today().world_size

    @property
    @abstractmethod
    def shown(self) -> str:
        """The command of each rank, for people."""

    @abstractmethod
    def about(self, configuration: Configuration) -> tuple[str, ...]:
        """Return sentences on the program, for people who read the file that starts it."""

    # ---- what can be set on it

    @property
    @abstractmethod
    def searched_knobs(self) -> tuple[Knob, ...]:
        """The declared knobs; InputError if the program cannot take one."""

    @abstractmethod
    def refused(self, configuration: Configuration) -> list[str]:
        """Return a phrase for each reason against running a configuration; empty if none."""

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """Return the space with knobs that cannot be set fixed at present values."""
        return space

    def sentences(self, searched: Collection[str]) -> tuple[str, ...]:
        """Return which knobs an inspection found and why not others; empty without one."""
        return ()

    # ---- how its ranks start

    @abstractmethod
    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Write the files of a configuration to a folder, and return the start of its ranks.

        InputError if it cannot be started so; OSError if a file cannot be written.
        """

    def inspection_start(self, configuration: Configuration, folder: Path, *, alter: bool) -> Start:
        """Return the start of a look at the program, until its first steps."""
        return self.start(configuration, folder)

    def node_environment(self, configuration: Configuration) -> Mapping[str, str]:
        """Return the variables of ranks on this node alone; InputError if it lacks something."""
        return {}

    def binding(self, configuration: Configuration) -> str:
        """Return the rule by which ranks are bound (`tuner.workload.node.vendor_binding`)."""
        return self.launcher.binding if self.launcher is not None else ""

    @property
    def as_it_stands(self) -> bool:
        """True if each probe starts the user's whole command, and nothing is forked."""
        return False

    @property
    def launcher(self) -> Launcher | None:
        """The launcher of the user's command."""
        return None

    @property
    def taken(self) -> tuple[str, ...]:
        """Variables of the command whose values are not kept."""
        return ()

    def require_secrets(self) -> None:
        """Raise InputError if one of these variables has no value."""
        require(self.taken, {})

    @property
    @abstractmethod
    def needed_modules(self) -> Sequence[str]:
        """The modules without which no rank starts."""

    def why_not_here(self) -> str:
        """Return why the installed releases cannot run its program, a sentence; "" if they can."""
        return ""

    def unsupported_values(self) -> Sequence[tuple[str, str, Callable[[str, Value], bool]]]:
        """Return gaps of the installed releases: a phrase, the reason, and a test of knob
        values."""
        return ()

    @property
    def imported_modules(self) -> Sequence[str]:
        """Further modules that are worth importing once for all ranks."""
        return ()

    @property
    def imported_packages(self) -> Collection[str] | None:
        """The packages that are imported once for all ranks; None for all that may be of use."""
        return None

    @property
    def needs_hook(self) -> bool:
        """True if the program needs the hook outside a probe, too."""
        return False

    @property
    def hook_on_cores(self) -> bool:
        """True if the program needs the hook wherever a core is a device."""
        return False

    @property
    def threads_today(self) -> int:
        """Threads of a rank where a core is a device, as far as each has cores for them."""
        return 1

    # ---- other commands

    @property
    def user_command(self) -> UserCommand | None:
        """The user's command; None if the program is a built-in one."""
        return None

    @abstractmethod
    def with_program(self, script: Script) -> LaunchableJob:
        """Return this job with a command of the user's that trains; InputError if it cannot."""

    def as_typed_line(self, configuration: Configuration, folder: Path) -> Start | None:
        """Return the start of the user's whole command under a configuration.

        None if it came without a launcher and was not observed, or starts another number of ranks.
        """
        return None


@dataclass(frozen=True)
class ModelledJob(LaunchableJob):
    """Job of which the sizes are known, and that no program here trains.

    Attributes:
        cluster: where it trains; None for GPUs of any kind.
    """

    job: TrainingJob
    cluster: Cluster | None = None

    @property
    def facts(self) -> TrainingJob:
        """Batch, lengths and knobs, as study.toml keeps them."""
        return self.job

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def searched_knobs(self) -> tuple[Knob, ...]:
        """The declared knobs; InputError if the built-in program cannot take one."""
        return program_knobs(check_knobs(self.knobs))

    @property
    def needed_modules(self) -> Sequence[str]:
        """Nothing: no rank starts."""
        return ()

    def why_not_here(self) -> str:
        """Return what to install, or a command to give."""
        without = not_installed(f"a search of {self.name} without a command", "built-in program")
        return f"{without}, or tune a command of your own: tuner optimize -- COMMAND"

    @property
    def shown(self) -> str:
        """The absence of a command."""
        return f"{self.name}, for which no program is installed here"

    def today(self) -> Configuration:
        """Return a plain data-parallel configuration, as a careful user would run it."""
        assert self.cluster is not None
        return with_baseline(default_configuration(self.facts, self.cluster), self.knobs)

    def refused(self, configuration: Configuration) -> list[str]:
        """Return why the built-in program cannot run a configuration yet, a phrase each."""
        return unrunnable(configuration, self.facts)

    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Raise InputError: nothing starts it."""
        raise InputError(self.why_not_here())

    def about(self, configuration: Configuration) -> tuple[str, ...]:
        return ()

    def with_program(self, script: Script) -> LaunchableJob:
        """Raise InputError: the built-in program's DeepSpeed JSON is what another one reads."""
        raise InputError(self.why_not_here())


#: The program that trains a job without a command, an extra.
_PROGRAM = "tuner.workload.program.built_in_job"


def launchable(
    job: TrainingJob, cluster: Cluster | None = None, program: Path | None = None
) -> LaunchableJob:
    """Return a job as a node starts it.

    Args:
        cluster: where the built-in program trains; None for GPUs of any kind.
        program: in place of the built-in program's file.
    """
    if isinstance(job, LaunchableJob):  # a script's, which starts itself
        return job
    module = shipped_module(_PROGRAM)
    if module is None:
        return ModelledJob(job, cluster)
    started: LaunchableJob = module.BuiltInJob(job, cluster, program or module.training_program())
    return started


def why_not_built_in() -> str:
    """Return why the installed releases cannot run the built-in program; "" if it is left away."""
    module = shipped_module(_PROGRAM)
    return str(module.why_not_program()) if module is not None else ""
