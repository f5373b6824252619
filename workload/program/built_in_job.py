"""The built-in training program as a job, and a user's own program in its place."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.safe_files import write_text
from tuner.workload.scripts.command import Script, Start
from tuner.workload.scripts.declared_knobs import environment
from tuner.workload.scripts.deepspeed_config import render_deepspeed_config
from tuner.workload.scripts.installed import (
    PRELOAD,
    cannot_compile,
    extensions_dir,
    installed_version,
    release_of,
)
from tuner.workload.scripts.job import LaunchableJob, ModelledJob
from tuner.workload.scripts.secrets import revealed

# Releases of packages that the built-in program needs, as a whole and for values of its knobs.
#
# Scripts of users are tuned from the releases on that pyproject.toml declares. Each row was looked
# up in the releases themselves: the first that has what the program imports, or does.


@dataclass(frozen=True)
class Need:
    """First release of a package that supports a value of a knob.

    Attributes:
        knob: name of a knob; empty for the whole program.
    """

    package: str
    since: str
    knob: str = ""

    def concerns(self, knob: str, value: Value | None) -> bool:
        """Return True if a value of a knob needs the release: any but the default."""
        return knob == self.knob and value != KNOBS[knob].default

    def why_not(self) -> str:
        """Return a phrase if an older release is installed, else ""."""
        here = installed_version(self.package)
        if here is None or release_of(here) >= release_of(self.since):
            return ""
        return f"needs {self.package} {self.since} or later, and {here} is installed"


#: Before transformers 5 `_init_weights` leaves buffers and some norms of a model that was built
#: without weights as they are, so that its losses are not a number.
PROGRAM = Need("transformers", "5.0")
#: For deepspeed.runtime.sequence_parallel.parallel_state_sp.
NEEDS = (Need("deepspeed", "0.17", "sequence_parallel"),)


def why_not_program() -> str:
    """Return one sentence if the installed packages cannot run the built-in program, else ""."""
    why = PROGRAM.why_not()
    return why and f"the built-in program {why}; update it, or tune a script of your own"


def why_not(configuration: Configuration) -> list[str]:
    """Return why the installed packages cannot run a configuration, a phrase each."""
    concerned = (need for need in NEEDS if need.concerns(need.knob, configuration.get(need.knob)))
    return [f"{need.knob} {why}" for need in concerned if (why := need.why_not())]


def unsupported_values() -> list[tuple[str, str, Callable[[str, Value], bool]]]:
    """Return unsupported knobs: the name, the reason, and a test of a value."""
    return [(need.knob, why, need.concerns) for need in NEEDS if (why := need.why_not())]


#: The binding of the built-in program's ranks under offload: each has cores of its own, of those
#: nearest to its GPU, and its memory is allocated there because it runs there.
OFFLOAD_RULE = "numa:exclusive"
_OFFLOAD = ("optimizer_offload", "parameter_offload", "activation_offload")
#: More steps than any window needs: the agent ends the program.
_ENDLESS = 1_000_000_000


def training_program() -> Path:
    """Return the file of the built-in training program."""
    return Path(__file__).with_name("train.py")


def training_arguments(configuration: Configuration) -> tuple[str, ...]:
    """Return the arguments of the built-in training program, which change the model itself."""
    arguments: list[str] = []
    for name, knob in KNOBS.items():
        value = configuration.get(name)
        if knob.argument and value != knob.default:
            arguments += [f"--{name}", str(value)]
    return tuple(arguments)


@dataclass(frozen=True)
class BuiltInJob(ModelledJob):
    """Job that the built-in program trains, on a cluster if that is known."""

    program: Path = field(default_factory=training_program)

    @property
    def needed_modules(self) -> Sequence[str]:
        """The modules without which no rank starts."""
        return PRELOAD

    def why_not_here(self) -> str:
        """Return why the installed releases cannot run it."""
        return why_not_program()

    def unsupported_values(self) -> Sequence[tuple[str, str, Callable[[str, Value], bool]]]:
        """Return the parts that the installed releases lack."""
        return unsupported_values()

    @property
    def shown(self) -> str:
        """The command of each rank."""
        return f"python {shlex.quote(str(self.program))} (synthetic data, no checkpoints)"

    def binding(self, configuration: Configuration) -> str:
        """Return the rule by which ranks that offload are bound, or "".

        On a node with several sockets a rank that offloads works on memory of its processor; where
        it runs then changes the step time by a third (DeepSpeed, pull request 7474).
        """
        offloads = any(configuration.get(name) != KNOBS[name].default for name in _OFFLOAD)
        binds = self.cluster is None or self.cluster.device.is_gpu
        return OFFLOAD_RULE if offloads and binds else ""

    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Write the job and its DeepSpeed JSON; a training is given its number of steps later."""
        config = self._write_config(configuration, folder)
        job = self.facts.at(configuration)
        write_text(folder / "job.json", json.dumps(job.to_json(), indent=2) + "\n")
        words = (
            *(str(self.program), "--job", "job.json", "--deepspeed_config", "ds_config.json"),
            *training_arguments(configuration),
            *(("--steps", str(_ENDLESS)) if probe else ()),
        )
        env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env |= environment(configuration, self.knobs)
        return Start(words, str(folder), {}, config, env, steps=None if probe else job.steps)

    def about(self, configuration: Configuration) -> tuple[str, ...]:
        """Return the requirements on a user's own program in place of this one."""
        return (
            "PUT YOUR OWN PROGRAM HERE: this is joulefront's built-in one (synthetic tokens).",
            "Yours must read ds_config.json, and apply the settings that it cannot contain:",
            configuration.short,
        )

    def node_environment(self, configuration: Configuration) -> Mapping[str, str]:
        """Return the variables of a program that compiles its model on this node."""
        if reasons := [*filter(None, [why_not_program()]), *why_not(configuration)]:
            raise InputError("; ".join(reasons))
        kind = configuration.get("compilation")
        if kind == KNOBS["compilation"].default or self.cluster is None:
            return {}
        if why := cannot_compile():
            raise InputError(f"compilation {kind}: {why}")
        env = {"TORCHINDUCTOR_CACHE_DIR": str(Path(extensions_dir(), "inductor"))}
        if not self.cluster.device.is_gpu:
            env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a rank has one core
        return {name: value for name, value in env.items() if name not in os.environ}

    def with_program(self, script: Script) -> LaunchableJob:
        """Return this job trained by a program of the user's; InputError if it has a launcher."""
        if script.launcher:
            raise InputError(
                "the built-in job was tuned without a launcher, so its ranks start without one; "
                "give the script and its own arguments alone"
            )
        words = tuple(revealed(word, script.secrets) for word in script.words)
        return OwnProgram(self.facts, self.cluster, words=words, folder=script.cwd)

    def _write_config(self, configuration: Configuration, folder: Path) -> dict[str, object]:
        config = render_deepspeed_config(
            configuration,
            self.facts,
            nvme_path=self.cluster.nvme_path if self.cluster else "",
            on_cuda=self.cluster is not None and self.cluster.device.is_gpu,
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "ds_config.json", json.dumps(config, indent=2) + "\n")
        return config


@dataclass(frozen=True)
class OwnProgram(BuiltInJob):
    """A user's own program, started with a DeepSpeed JSON in place of the built-in one.

    Attributes:
        folder: where it starts; None for the folder of its DeepSpeed JSON.
    """

    words: tuple[str, ...] = ()
    folder: Path | None = None

    def why_not_here(self) -> str:
        """Return "": it need not be built from the built-in program's layers."""
        return ""

    def unsupported_values(self) -> Sequence[tuple[str, str, Callable[[str, Value], bool]]]:
        """Return nothing, for the same reason."""
        return ()

    @property
    def shown(self) -> str:
        """The command of each rank."""
        return shlex.join(self.words)

    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Write the DeepSpeed JSON, which the program is given by its last argument."""
        config = self._write_config(configuration, folder)
        path = "ds_config.json" if self.folder is None else str(folder / "ds_config.json")
        return Start(
            (*self.words, "--deepspeed_config", path),
            str(self.folder or folder),
            {},
            config,
            environment(configuration, self.knobs),
        )

    def about(self, configuration: Configuration) -> tuple[str, ...]:
        """Return the program's arguments."""
        return ("Your own program. joulefront gives it the DeepSpeed JSON and nothing else.",)

    def node_environment(self, configuration: Configuration) -> Mapping[str, str]:
        """Return nothing: how it compiles is the program's."""
        return {}
