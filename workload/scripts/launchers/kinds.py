"""Launchers of pasted commands: how each is recognised, read, and written back.

A launcher is a subclass of `Kind`. torchrun, deepspeed and accelerate are read by their own parsers
(`tuner.workload.scripts.launchers.vendor`), in the folder and environment that they would be
started in; srun by a table of ours. A changed command is written back as it came in, or started by
torchrun. Any other command that a package installs is its module: `litgpt pretrain` is started as
`python -m litgpt pretrain`. Nothing is imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.frameworks.settings import ask_interpreter
from tuner.workload.scripts.launchers import vendor
from tuner.workload.scripts.script_facts import ASSIGNMENT, Launcher, names_taken

PYTHON = re.compile(r"python[\d.]*")
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
        written_back: a changed command is its own again; else torchrun starts what it would.
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
    written_back = True
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

    def head(
        self, launcher: Launcher, world: int, today: int, *, hook: bool
    ) -> tuple[list[str], list[str]]:
        """Return its own words for `world` processes in place of today's, and what changed.

        With `hook` a script of ours comes first.
        """
        words = list(launcher.words)
        if hook:
            words = self.before_hook(words)
        return self.with_processes(words, launcher, world, today) if world != today else (words, [])

    def before_hook(self, words: list[str]) -> list[str]:
        """Return the words in front of a script where a module may have been."""
        at = self._name_at(words)
        return [*words[: at + 1], *(w for w in words[at + 1 :] if w not in ("-m", "--module"))]

    def with_processes(
        self, words: list[str], launcher: Launcher, world: int, today: int
    ) -> tuple[list[str], list[str]]:
        """Return the words for another number of processes, and what changed."""
        changes = [f"{world} processes instead of {today}"]
        # The least number of nodes with as many processes on each as today at most.
        nodes = -(-world // max(today // launcher.nodes, 1))
        if nodes != launcher.nodes:
            changes.append(f"{nodes} nodes instead of {launcher.nodes}")
            # Of each launcher among the words: srun may start torchrun.
            for option in dict.fromkeys(name for kind in KINDS for name in kind.nodes):
                if (at := place(words, (option,))) is not None:
                    words = with_value(words, at, nodes)
        counts = dict.fromkeys(self.of_all, world) | dict.fromkeys(self.of_node, world // nodes)
        written = False
        for name, count in counts.items():
            if (at := place(words, (name,), short=self.abbreviates)) is not None:
                words, written = with_value(words, at, count), True
        if not written:
            first, count = next(iter(counts.items()))
            words = self.added(words, f"{first}={count}")
        return words, changes

    def added(self, words: list[str], option: str) -> list[str]:
        """Return the words with an option after the launcher's name."""
        if place(words, (option.partition("=")[0],)) is not None:
            return words
        at = self._name_at(words)
        return [*words[: at + 1], option, *words[at + 1 :]]

    def _name_at(self, words: Sequence[str]) -> int:
        # The command alone may be `accelerate`, and a file's name too.
        names = {*self.commands, *self.modules} - ({*self.commands[:1]} if self.own else set())
        names |= {*self.own}
        return max(at for at, word in enumerate(words) if Path(word).name in names)


def place(words: Sequence[str], names: Sequence[str], *, short: bool = False) -> int | None:
    """Return the place of an option among words, or None; with `short` an abbreviation counts."""
    for at, word in enumerate(words):
        given = word.partition("=")[0]
        abbreviated = short and len(given) > 3 and given.startswith("--")
        if given in names or (abbreviated and any(name.startswith(given) for name in names)):
            return at
        if len(names[0]) == 2 and word.startswith(names[0]) and word[2:].isdigit():
            return at
    return None


def with_value(words: Sequence[str], at: int, value: Any) -> list[str]:
    """Return the words with the value of the option at a place replaced."""
    changed = list(words)
    name, equals, _ = changed[at].partition("=")
    if equals:
        changed[at] = f"{name}={value}"
    elif not name.startswith("--") and name[2:].isdigit():  # -n8
        changed[at] = f"{name[:2]}{value}"
    elif at + 1 < len(changed) and not changed[at + 1].startswith("--"):
        changed[at + 1] = str(value)
    else:  # a flag that stands for true
        changed.insert(at + 1, str(value))
    return changed


class Vendor(Kind):
    """Launcher that is read by its own parser."""

    @property
    def shown(self) -> str:
        """The command, for sentences."""
        return " ".join((self.commands or self.modules)[:1] + self.own)

    def read(self, typed: Typed) -> Read:
        """Read the arguments by the launcher's own parser; InputError if it refuses them."""
        words = typed.words
        read = _answer(self.name, words[typed.skip :], typed.cwd, typed.environment)
        if "refuse" in read:
            raise InputError(f"{self.shown}: {' '.join(str(read['refuse']).split())}")
        given = len(words) - int(read["given"])
        launcher = Launcher(
            self.name,
            words[:given],
            words[given:],
            int(read["processes"]),
            read["env"],
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

    def with_processes(
        self, words: list[str], launcher: Launcher, world: int, today: int
    ) -> tuple[list[str], list[str]]:
        if (at := place(words, ("--include", "-i"))) is not None:
            del words[at : at + (1 if "=" in words[at] else 2)]
        return super().with_processes(words, launcher, world, today)


class _Accelerate(Vendor):
    """`accelerate launch`, with its configuration file."""

    name = "accelerate"
    commands = ("accelerate", "accelerate-launch")
    modules = ("accelerate.commands.launch",)
    own = ("launch",)
    written_back = False


class _Trl(Vendor):
    """`trl COMMAND`, which starts a script of its own by accelerate."""

    name = "trl"
    commands = ("trl",)
    written_back = takes_hook = False


class _Starter(Kind):
    """Command `NAME train` that starts a module of its own by another launcher."""

    own = ("train",)
    written_back = takes_hook = False

    def command(self, given: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Return what it starts with the arguments given; InputError for one that is not read."""
        raise NotImplementedError

    def read(self, typed: Typed) -> Read:
        """Return what that launcher starts."""
        words, at = typed.words, typed.skip
        command = self.command(words[at:], typed.environment)
        script, launcher = read_words(command, typed.cwd, typed.environment)
        assert launcher is not None
        return script, replace(launcher, kind=self.name, words=words[:at], script=words[at:])


class _LlamaFactory(_Starter):
    """`llamafactory-cli train` (0.9.4): torchrun on NPROC_PER_NODE devices."""

    name = "llamafactory"
    commands = ("llamafactory-cli", "llamafactory", "lmf")

    def command(self, given: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        nodes, each = environment.get("NNODES") or 1, environment.get("NPROC_PER_NODE") or "gpu"
        start = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={each}"]
        return [*start, "-m", "llamafactory.launcher", *given]

    def read(self, typed: Typed) -> Read:
        """Return the same with what it sets for torch's DDP."""
        script, launcher = super().read(typed)
        if typed.environment.get("OPTIM_TORCH", "1").lower() in ("true", "y", "1"):
            allocator = "expandable_segments:True"
            env = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
            launcher = replace(launcher, env={**env, **launcher.env})
        return script, launcher


class _Axolotl(_Starter):
    """`axolotl train` (0.12): accelerate, whose arguments follow `--`."""

    name = "axolotl"
    commands = ("axolotl",)

    def command(self, given: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        at = given.index("--") if "--" in given else len(given)
        for option in (word.partition("=")[0] for word in given[:at]):
            if option in ("--launcher", "--num-processes", "--sweep", "--cloud"):
                raise InputError(
                    f"axolotl train {option} is not read; write what it starts, e.g. torchrun "
                    "--nproc-per-node 8 -m axolotl.cli.train FILE"
                )
        start = ["accelerate", "launch", *given[at + 1 :], "-m", "axolotl.cli.train"]
        return [*start, *given[:at]]


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


def read_command(words: Sequence[str], cwd: Path) -> tuple[tuple[str, ...], Launcher | None]:
    """Return the words that each rank runs, without the interpreter, and the launcher if any."""
    assigned, rest = assignments(words)
    require_visible_devices(assigned)
    script, launcher = read_words(rest, cwd, {**os.environ, **assigned})
    if launcher is None:
        if not assigned:
            return script, None
        launcher = Launcher("", (), script)
    return script, replace(launcher, env={**assigned, **launcher.env}, assigned=assigned)


def require_visible_devices(variables: Mapping[str, str]) -> None:
    """Raise InputError if the variables of a command hide GPUs that the meter would count."""
    if (visible := variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        raise InputError(
            "CUDA_VISIBLE_DEVICES goes before tuner, whose meter must see the same GPUs: "
            f"CUDA_VISIBLE_DEVICES={visible} tuner ..."
        )


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
        elif kind.own and not name.endswith(kind.own[0]):  # as accelerate-launch does
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
    return ("-m", entry.module.removesuffix(".__main__"), *words[1:])
