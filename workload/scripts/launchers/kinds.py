"""Launchers of pasted commands: how each is recognised, read, and written back.

A launcher is a subclass of `Kind`. torchrun, deepspeed and accelerate are read by their own parsers
(`tuner.workload.scripts.launchers.vendor`), in the folder and environment that they would be
started in; those of `trainers` and `slurm` by tables and code of ours. Any other command that a
package installs is its module: `litgpt pretrain` is started as `python -m litgpt pretrain`, if its
source says that this starts the same function. Nothing is imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.key_files import check_plain, read_text
from tuner.workload.scripts.frameworks.settings import ask_interpreter
from tuner.workload.scripts.launchers import vendor
from tuner.workload.scripts.launchers.writing import (
    Rewriting,
    load,
    place,
    text_of,
    value_at,
    with_value,
)
from tuner.workload.scripts.script_facts import ASSIGNMENT, Launcher, names_taken

PYTHON = re.compile(r"python[\d.]*")
_GUARD = re.compile(r"""__name__\s*==\s*["']__main__["']""")
#: Starters of ranks that are not read.
UNREAD = ("mpirun", "mpiexec", "horovodrun", "jsrun", "aprun", "colossalai", "composer")
#: Words that each rank runs, and the launcher in front of them.
Read = tuple[tuple[str, ...], Launcher]


@dataclass(frozen=True)
class Typed:
    """Command that begins with a launcher, whose arguments follow `skip` words."""

    words: tuple[str, ...]
    skip: int
    cwd: Path
    environment: Mapping[str, str]


#: Every launcher that is read.
KINDS: list[Kind] = []


class Kind:
    """Launcher that starts ranks of a script of the user's.

    Attributes:
        commands, modules: names that it is started by; the first is for sentences.
        own: words between that name and its arguments.
        of_all, of_node: options for the number of processes, of all nodes and of each; the first
            is written where none was given.
        abbreviates: its parser takes the beginning of an option for the option.
        takes_hook: the hook can stand in front of the script.
        numbers_tasks: it sets Slurm's variables of a task for each rank.
    """

    name = ""
    commands: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    of_all: tuple[str, ...] = ()
    of_node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    abbreviates = False
    takes_hook = True
    numbers_tasks = False

    def __init_subclass__(cls) -> None:
        if cls.commands or cls.modules:
            KINDS.append(cls())

    def read(self, typed: Typed) -> Read:
        """Return what a command starts; InputError if it is refused, or cannot be honoured."""
        raise NotImplementedError

    def reaches_nodes(self, launcher: Launcher) -> bool:
        """Return True if it is started once and starts the ranks of all nodes itself."""
        return False

    def with_arguments(self, made: Rewriting, words: Sequence[str]) -> tuple[list[str], bool]:
        """Set what the script's framework takes itself; True if that is all the hook would set."""
        if made.job.frame.owner != "transformers":
            return list(words), False
        found, changes = list(words), []
        for name, today, value in made.wanted("trl"):  # whose arguments are the Trainer's
            at = place(found, spellings(name))
            if at is None or value_at(found, at) != text_of(today):
                return list(words), False
            found = with_value(found, at, value)
            changes.append(f"{name} is {text_of(value)}")
        made.changes += changes
        return found, True

    def head(self, made: Rewriting, *, hook: bool) -> list[str]:
        """Return the launcher's words as changed; with `hook` a script of ours comes first."""
        words = list(made.launcher.words)
        if hook:
            words = self.before_hook(words)
        words = self.with_config(made, words)
        return self.with_processes(made, words) if made.other_world else words

    def before_hook(self, words: list[str]) -> list[str]:
        """Return the words in front of a script where a module may have been."""
        at = self._name_at(words)
        return [*words[: at + 1], *(w for w in words[at + 1 :] if w not in ("-m", "--module"))]

    def with_config(self, made: Rewriting, words: list[str]) -> list[str]:
        """Return the words that name a changed copy of the launcher's configuration file."""
        return words

    def with_processes(self, made: Rewriting, words: list[str]) -> list[str]:
        """Return the words for another number of processes."""
        made.changes.append(f"{made.world} processes instead of {made.job.baseline.world_size}")
        if made.nodes != made.launcher.nodes:
            made.changes.append(f"{made.nodes} nodes instead of {made.launcher.nodes}")
            # Of each launcher among the words: srun may start torchrun.
            for option in dict.fromkeys(name for kind in KINDS for name in kind.nodes):
                if (at := place(words, (option,))) is not None:
                    words = with_value(words, at, made.nodes)
        counts = dict.fromkeys(self.of_all, made.world)
        counts |= dict.fromkeys(self.of_node, made.world // made.nodes)
        written = False
        for name, count in counts.items():
            if (at := place(words, (name,), short=self.abbreviates)) is not None:
                words, written = with_value(words, at, count), True
        config = Path(made.job.cwd) / made.launcher.config
        if written or (config.is_file() and "num_processes" in load(config)):
            return words
        first, count = next(iter(counts.items()))
        return self.added(words, f"{first}={count}")

    def added(self, words: list[str], option: str) -> list[str]:
        """Return the words with an option after the launcher's name."""
        if place(words, spellings(option.partition("=")[0].lstrip("-"))[:2]) is not None:
            return words
        at = self._name_at(words)
        return [*words[: at + 1], option, *words[at + 1 :]]

    def _name_at(self, words: Sequence[str]) -> int:
        # The command alone may be `accelerate`, and a file's name too.
        names = {*self.commands, *self.modules} - ({*self.commands[:1]} if self.own else set())
        names |= {*self.own}
        return max(at for at, word in enumerate(words) if Path(word).name in names)


def spellings(name: str) -> tuple[str, ...]:
    """Return the options of a name, and the name as it is."""
    return f"--{name}", f"--{name.replace('_', '-')}", name


class Vendor(Kind):
    """Launcher that is read by its own parser."""

    @property
    def shown(self) -> str:
        """The command, for sentences."""
        return " ".join((self.commands or self.modules)[:1] + self.own)

    def read(self, typed: Typed) -> Read:
        """Read the arguments by the launcher's own parser; InputError if it refuses them."""
        words, arguments = typed.words, list(typed.words[typed.skip :])
        for option, file in pairwise(arguments):
            if option in ("--config_file", "--config-file", "--config", "--accelerate_config"):
                check_config(f"{self.shown} {option}", file, typed.cwd)
        read = _answer(self.name, arguments, typed.cwd, typed.environment)
        if "refuse" in read:
            raise InputError(f"{self.shown}: {' '.join(str(read['refuse']).split())}")
        if read["config"]:
            check_config(f"{self.shown}'s configuration", read["config"], typed.cwd)
        given = len(words) - int(read["given"])
        launcher = Launcher(
            self.name,
            words[:given],
            words[given:],
            int(read["processes"]),
            read["env"],
            config=read["config"],
            notes=tuple(f"{self.shown}: {note}" for note in read["notes"]),
            nodes=int(read["nodes"]),
            binding=str(read.get("binding", "")),
        )
        return tuple(read["script"]), launcher


class _Torchrun(Vendor):
    """torchrun, which is `python -m torch.distributed.run`."""

    name = "torchrun"
    commands = ("torchrun",)
    modules = ("torch.distributed.run",)
    of_node = ("--nproc-per-node", "--nproc_per_node")
    nodes = ("--nnodes",)
    abbreviates = True


class _Deepspeed(Vendor):
    """DeepSpeed's launcher."""

    name = "deepspeed"
    commands = ("deepspeed", "ds", "deepspeed.pt")
    modules = ("deepspeed", "deepspeed.launcher.runner")
    of_node = ("--num_gpus", "--num_accelerators")
    nodes = ("--num_nodes",)
    abbreviates = True

    def reaches_nodes(self, launcher: Launcher) -> bool:
        """Return True if it reaches several nodes by ssh."""
        return launcher.nodes > 1 and "--no_ssh" not in launcher.words

    def before_hook(self, words: list[str]) -> list[str]:
        """Return the words without the rank in the command, which the hook reads elsewhere."""
        return self.added(super().before_hook(words), "--no_local_rank")

    def with_processes(self, made: Rewriting, words: list[str]) -> list[str]:
        if (at := place(words, ("--include", "-i"))) is not None:
            del words[at : at + (1 if "=" in words[at] else 2)]
        return super().with_processes(made, words)


class _Accelerate(Vendor):
    """`accelerate launch`, with its configuration file."""

    name = "accelerate"
    commands = ("accelerate", "accelerate-launch")
    modules = ("accelerate.commands.launch",)
    own = ("launch",)
    of_all = ("--num_processes", "--num-processes")
    nodes = ("--num_machines", "--num-machines")

    def with_config(self, made: Rewriting, words: list[str]) -> list[str]:
        if not made.launcher.config:
            return words
        path = Path(made.job.cwd) / made.launcher.config
        keys: dict[str, Any] = {}
        if made.other_world and "num_processes" in load(path):
            keys["num_processes"] = made.world
        if made.nodes != made.launcher.nodes and "num_machines" in load(path):
            keys["num_machines"] = made.nodes
        keys |= made.deepspeed_keys(path)
        if not keys:
            return words
        written = made.copy(path, keys)
        made.changes += [f"{key} is {text_of(value)}" for key, value in keys.items()]
        at = place(words, ("--config_file", "--config-file"))
        if at is not None:
            return with_value(words, at, written)
        return self.added(words, f"--config_file={written}")

    def with_processes(self, made: Rewriting, words: list[str]) -> list[str]:
        if made.world == 1:
            words = [word for word in words if word not in ("--multi_gpu", "--multi-gpu")]
        return super().with_processes(made, words)


def _answer(
    name: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    given = {name: text for name, text in environment.items() if not names_taken([text])}
    question = {"launcher": name, "arguments": list(arguments)}
    answer, why = ask_interpreter([vendor.__file__], question, vendor.MARK, cwd, given)
    # argparse says what is wrong in its last line and ends the process.
    why = why.partition("error: ")[2] or why or "it answered this command with its help"
    return {"refuse": why} if answer is None else answer


def assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split off the variables in front of a command; InputError if `env` has an option."""
    rest = list(words)
    if rest and Path(rest[0]).name == "env":
        rest = rest[1:]
        if rest and rest[0].startswith("-"):
            raise InputError(f"env {rest[0]} is not read; write NAME=VALUE before the command")
    assigned = {}
    while rest and (found := ASSIGNMENT.fullmatch(rest[0])):
        assigned[found[1]] = found[2]
        rest = rest[1:]
    return assigned, rest


def without_python(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command without Python in front of it."""
    rest = list(words)
    while rest and PYTHON.fullmatch(Path(rest[0]).name):
        rest = rest[1:]
        while rest and rest[0] in ("-u", "-B", "-O"):
            rest = rest[1:]
    return tuple(rest)


def check_config(option: str, file: str, cwd: Path | None) -> None:
    """Refuse a configuration file from which a changed one could not be written."""
    if file == "-" or file.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/")):
        raise InputError(
            f"{option} is read from standard input, which is there only once; write it to a file"
        )
    path = (cwd or Path.cwd()) / file
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return  # of another format, or the launcher's own parser says that it is missing
    check_plain(read_text(path), path)


def read_command(words: Sequence[str], cwd: Path) -> tuple[tuple[str, ...], Launcher | None]:
    """Return the words that each rank runs, without the interpreter, and the launcher if any."""
    assigned, rest = assignments(words)
    if "CUDA_VISIBLE_DEVICES" in assigned:
        raise InputError(
            "CUDA_VISIBLE_DEVICES goes before tuner, whose meter must see the same GPUs: "
            f"CUDA_VISIBLE_DEVICES={assigned['CUDA_VISIBLE_DEVICES']} tuner ..."
        )
    script, launcher = read_words(rest, cwd, {**os.environ, **assigned})
    if launcher is None:
        if not assigned:
            return script, None
        launcher = Launcher("", (), script)
    return script, replace(launcher, env={**assigned, **launcher.env}, assigned=assigned)


def kind_of(launcher: Launcher) -> Kind | None:
    """Return what starts a launcher's ranks and writes it back; None for variables alone."""
    return next((kind for kind in KINDS if kind.name == launcher.kind), None)


def read_words(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], Launcher | None]:
    """Return the same of a command without variables in front."""
    bare = without_python(words)
    name = Path(bare[0]).name if bare else ""
    if name in UNREAD:
        raise InputError(
            f"{name} starts ranks itself, which is joulefront's part here; give the script and its "
            'own arguments alone, e.g. --script "train.py --data DIR"'
        )
    if bare[:2] == ("-m", "torch.distributed.launch"):
        raise InputError("torch.distributed.launch is deprecated; write torchrun in its place")
    skip = len(words) - len(bare) + 1
    for kind in KINDS:
        if name == "-m" and bare[1:2] and bare[1] in kind.modules:
            skip += 1
        elif name not in kind.commands:
            continue
        elif kind.own and name == kind.commands[0]:
            if bare[1 : 1 + len(kind.own)] != kind.own:
                shown = " ".join((name, *kind.own))
                raise InputError(f"of {name}'s commands only `{shown}` trains")
            skip += len(kind.own)
        return kind.read(Typed(tuple(words), skip, cwd, environment))
    return (_as_module(bare, cwd) if len(bare) == len(words) else bare), None


def _as_module(words: Sequence[str], cwd: Path) -> tuple[str, ...]:
    name = words[0] if words else ""
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("-") or (cwd / name).is_file():
        return tuple(words)
    (*_, entry) = (None, *importlib.metadata.entry_points(group="console_scripts", name=name))
    if entry is None:
        return tuple(words)
    module = entry.module.removesuffix(".__main__")
    if not _starts(entry, module):
        raise InputError(
            f"{name} calls {entry.value}, which python -m {module} does not; write a script that "
            "calls it"
        )
    return ("-m", module, *words[1:])


def _starts(entry: importlib.metadata.EntryPoint, module: str) -> bool:
    if entry.dist is None or module != entry.module:
        return True
    at = Path(*module.split("."))
    package = Path(str(entry.dist.locate_file(at)))
    if (package / "__init__.py").is_file():
        return (package / "__main__.py").is_file()
    try:
        return bool(_GUARD.search(package.with_suffix(".py").read_text("utf-8", "replace")))
    except OSError:
        return True
