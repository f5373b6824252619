"""Launchers of pasted commands: how each is recognised, read, and written back.

torchrun, deepspeed, accelerate and trl are read by their own parsers
(`tuner.workload.scripts.launchers.vendor`), in the folder and environment that they would be
started in. LLaMA-Factory and Axolotl start torchrun or accelerate with a module of theirs, which is
written out here after their sources. srun is in `tuner.workload.scripts.launchers.slurm`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.key_files import check_plain, read_text
from tuner.workload.scripts.launchers import vendor
from tuner.workload.scripts.launchers.launcher import ASSIGNMENT, Launcher, names_taken
from tuner.workload.scripts.launchers.writing import (
    Rewriting,
    load,
    place,
    text_of,
    value_at,
    with_value,
)

PYTHON = re.compile(r"python[\d.]*")
#: A vendor's parser imports torch, at most this long, seconds.
_LIMIT_S = 180.0
#: Words that each rank runs, and the launcher in front of them.
Read = tuple[tuple[str, ...], Launcher]


@dataclass(frozen=True)
class Typed:
    """Command that begins with a launcher.

    Attributes:
        skip: the number of words up to the launcher's arguments.
    """

    words: tuple[str, ...]
    skip: int
    cwd: Path
    environment: Mapping[str, str]
    again: Callable[[Sequence[str], Mapping[str, str]], tuple[tuple[str, ...], Launcher | None]]


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

    def __init_subclass__(cls) -> None:
        if cls.commands or cls.modules:
            KINDS.append(cls())

    def read(self, typed: Typed) -> Read:
        """Return what a command starts.

        Raises:
            InputError: the launcher refuses it, or it cannot be honoured.
        """
        raise NotImplementedError

    def reaches_nodes(self, launcher: Launcher) -> bool:
        """Return True if it is started once and starts the ranks of all nodes itself."""
        return False

    def with_arguments(self, made: Rewriting, words: Sequence[str]) -> tuple[list[str], bool]:
        """Set what the script's framework takes by itself in its arguments.

        Returns:
            The words, and whether they set all that the hook would set.
        """
        if made.job.frame.owner != "transformers":
            return list(words), False
        found, changes = list(words), []
        for name, today, value in made.wanted("trl"):  # whose arguments are the Trainer's
            at = place(found, _spellings(name))
            if at is None or value_at(found, at) != text_of(today):
                return list(words), False
            found = with_value(found, at, value)
            changes.append(f"{name} is {text_of(value)}")
        made.changes += changes
        return found, True

    def head(self, made: Rewriting, *, hook: bool) -> list[str]:
        """Return the launcher's words as changed.

        Args:
            hook: a script of ours stands before the user's, which the launcher starts instead.
        """
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
        return self._added(words, f"{first}={count}")

    def _added(self, words: list[str], option: str) -> list[str]:
        """Return the words with an option after the launcher's name."""
        if place(words, _spellings(option.partition("=")[0].lstrip("-"))[:2]) is not None:
            return words
        at = self._name_at(words)
        return [*words[: at + 1], option, *words[at + 1 :]]

    def _name_at(self, words: Sequence[str]) -> int:
        names = (*self.commands, *self.modules, *self.own)
        return max(at for at, word in enumerate(words) if Path(word).name in names)


def _spellings(name: str) -> tuple[str, ...]:
    return f"--{name}", f"--{name.replace('_', '-')}", name


class Vendor(Kind):
    """Launcher that is read by its own parser."""

    reader = ""

    @property
    def shown(self) -> str:
        """The command, for sentences."""
        return " ".join((self.commands or self.modules)[:1] + self.own)

    def read(self, typed: Typed) -> Read:
        """Let the launcher's own parser read its arguments.

        Raises:
            InputError: it refuses them, or what it says cannot be honoured.
        """
        words, arguments = typed.words, list(typed.words[typed.skip :])
        for option, file in pairwise(arguments):
            if option in ("--config_file", "--config-file", "--config", "--accelerate_config"):
                _check_config(f"{self.shown} {option}", file, typed.cwd)
        reader = self.reader or self.name
        read = _answer(reader, arguments, typed.cwd, typed.environment)
        if "refuse" in read:
            raise InputError(f"{self.shown}: {' '.join(str(read['refuse']).split())}")
        if read["config"]:
            _check_config(f"{self.shown}'s configuration", read["config"], typed.cwd)
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


def _answer(
    name: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    question = json.dumps({"launcher": name, "arguments": list(arguments)})
    try:
        done = subprocess.run(
            [sys.executable, "-P", vendor.__file__],
            input=question,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            env={name: text for name, text in environment.items() if not names_taken([text])},
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"refuse": f"its parser did not answer within {_LIMIT_S:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(vendor.MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(vendor.MARK))
            return answer
    # argparse says what is wrong in its last line and ends the process.
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = lines[-1].partition("error: ")[2] or lines[-1] if lines else ""
    return {"refuse": said or "it answered this command with its help"}


class Torchrun(Vendor):
    """torchrun, which is `python -m torch.distributed.run`."""

    name = "torchrun"
    commands: tuple[str, ...] = ("torchrun",)
    modules: tuple[str, ...] = ("torch.distributed.run",)
    of_node = ("--nproc-per-node", "--nproc_per_node")
    nodes = ("--nnodes",)
    abbreviates = True


class Launch(Torchrun):
    """The older `python -m torch.distributed.launch`, which tells the rank in the command."""

    reader = "launch"
    commands: tuple[str, ...] = ()
    modules = ("torch.distributed.launch",)

    def before_hook(self, words: list[str]) -> list[str]:
        """Return the words with the rank in the environment, where the hook reads it."""
        return self._added(super().before_hook(words), "--use-env")


class Deepspeed(Vendor):
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
        return self._added(super().before_hook(words), "--no_local_rank")

    def with_processes(self, made: Rewriting, words: list[str]) -> list[str]:
        """Return the words without a choice of devices, beside their number."""
        if (at := place(words, ("--include", "-i"))) is not None:
            del words[at : at + (1 if "=" in words[at] else 2)]
        return super().with_processes(made, words)


class Accelerate(Vendor):
    """`accelerate launch`, with its configuration file."""

    name = "accelerate"
    commands = ("accelerate", "accelerate-launch")
    modules = ("accelerate.commands.launch",)
    own = ("launch",)
    of_all = ("--num_processes", "--num-processes")
    nodes = ("--num_machines", "--num-machines")

    def with_config(self, made: Rewriting, words: list[str]) -> list[str]:
        """Return the words that name the file with the changed keys."""
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
        return self._added(words, f"--config_file={written}")

    def with_processes(self, made: Rewriting, words: list[str]) -> list[str]:
        """Return the words without several GPUs where one process is left."""
        if made.world == 1:
            words = [word for word in words if word not in ("--multi_gpu", "--multi-gpu")]
        return super().with_processes(made, words)


class Framework(Kind):
    """Launcher of a framework that trains by transformers' Trainer, with arguments of its own."""

    takes_hook = False

    def head(self, made: Rewriting, *, hook: bool) -> list[str]:
        """Return the launcher's words, which say nothing of processes."""
        return list(made.launcher.words)

    def with_arguments(self, made: Rewriting, words: Sequence[str]) -> tuple[list[str], bool]:
        """Set what the framework takes by itself in its arguments or file."""
        found, keys = list(words), dict[str, Any]()
        old = self.file_word(found)
        file = Path(made.job.cwd) / old if old else None
        for name, _, value in made.wanted(self.name):
            made.changes.append(f"{name} is {text_of(value)}")
            found = self.placed(found, _spellings(name), value, file, keys)
        found = self.with_world(made, found, file, keys)
        if keys and file is not None:
            written = made.copy(file, keys)
            found = [word.replace(old, written) if word.endswith(old) else word for word in found]
        return found, True

    def file_word(self, words: Sequence[str]) -> str:
        """Return the word that names the framework's own file, or ""."""
        return words[0] if words else ""

    def placed(
        self,
        words: list[str],
        options: tuple[str, ...],
        value: Any,
        file: Path | None,
        keys: dict[str, Any],
    ) -> list[str]:
        """Set a value where it stands among the words, else by a key of the file or a new option.

        Args:
            options: the spellings of its option, the last of them the key.
        """
        if (at := place(words, options)) is not None:
            return with_value(words, at, value)
        if file is not None and self.takes_key(file, options[-1]):
            keys[options[-1]] = value
            return words
        return [*words, options[0], text_of(value)]

    def takes_key(self, file: Path, key: str) -> bool:
        """Return True if a new value belongs into the file."""
        return True

    def with_world(
        self, made: Rewriting, words: list[str], file: Path | None, keys: dict[str, Any]
    ) -> list[str]:
        """Return the words with the number of processes, and DeepSpeed's settings in the file."""
        if file is not None and made.job.frame.config and "deepspeed" in load(file):
            keys["deepspeed"] = str(made.folder / "ds_config.json")
        return words


class Trl(Framework, Vendor):
    """`trl COMMAND`, which starts a script of its own by accelerate."""

    name = "trl"
    commands = ("trl",)
    nodes = ("--num_machines",)

    def file_word(self, words: Sequence[str]) -> str:
        """Return the value of --config, or ""."""
        at = place(words, ("--config",))
        return "" if at is None else words[at].partition("=")[2] or words[at + 1]

    def takes_key(self, file: Path, key: str) -> bool:
        """Return True if the file has the key already."""
        return key in load(file)

    def with_world(
        self, made: Rewriting, words: list[str], file: Path | None, keys: dict[str, Any]
    ) -> list[str]:
        """Set the number of processes, and DeepSpeed's settings in the file for Accelerate."""
        values: dict[tuple[str, ...], Any] = {}
        if made.other_world:
            values[_spellings("num_processes")] = made.world
        if made.launcher.config:
            path = Path(made.job.cwd) / made.launcher.config
            if changed := made.deepspeed_keys(path):
                values["--accelerate_config", "--config_file", "accelerate_config"] = made.copy(
                    path, changed
                )
        for options, value in values.items():
            made.changes.append(f"{options[-1]} is {value}")
            words = self.placed(words, options, value, file, keys)
        return words


class LlamaFactory(Framework):
    """`llamafactory-cli train`, after llamafactory/cli.py and launcher.py (0.9.4).

    It starts its module launcher under torchrun on all devices, or NPROC_PER_NODE of them.
    """

    name = "llamafactory"
    commands = ("llamafactory-cli", "llamafactory", "lmf")

    def read(self, typed: Typed) -> Read:
        """Return what it starts by its variables."""
        words, environment = typed.words, typed.environment
        if len(words) < 3 or words[1] != "train":
            raise InputError(
                "of llamafactory-cli's commands only `llamafactory-cli train FILE` trains"
            )
        _check_config("llamafactory-cli train", words[2], None)
        nodes = environment.get("NNODES") or "1"
        if not nodes.isdigit() or not int(nodes):
            raise InputError(f"NNODES={nodes} is no number of nodes")
        env = {}
        if environment.get("OPTIM_TORCH", "1").lower() in ("true", "y", "1"):
            # What it sets for torch's DDP.
            allocator = "expandable_segments:True"
            env = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
        text = environment.get("NPROC_PER_NODE", "")
        each, nodes_count = int(text) if text.isdigit() else 0, int(nodes)
        launcher = Launcher(
            self.name, words[:2], words[2:], each, env, config=words[2], nodes=nodes_count
        )
        return ("-m", "llamafactory.launcher", *words[2:]), launcher

    def head(self, made: Rewriting, *, hook: bool) -> list[str]:
        """Return its words; it starts torchrun where it sees several devices, or is told to."""
        if made.other_world:
            made.changes.append(f"{made.world} processes")
            made.env = {"NPROC_PER_NODE": str(made.world // made.nodes), "FORCE_TORCHRUN": "1"}
            if made.launcher.nodes > 1:
                made.env["NNODES"] = str(made.nodes)
        return list(made.launcher.words)


class Axolotl(Framework):
    """`axolotl train`, after axolotl/cli/main.py and utils/train.py (0.12).

    It starts its module `axolotl.cli.train` by accelerate, torchrun or python (`--launcher`); what
    follows `--` is the launcher's.
    """

    name = "axolotl"
    commands = ("axolotl",)

    def read(self, typed: Typed) -> Read:
        """Return what its launcher starts."""
        words = typed.words
        if len(words) < 3 or words[1] != "train" or words[2].startswith("-"):
            raise InputError("of axolotl's commands only `axolotl train FILE` trains")
        _check_config("axolotl train", words[2], typed.cwd)
        own, for_launcher = list(words[2:]), []
        if "--" in own:
            cut = own.index("--")
            own, for_launcher = own[:cut], own[cut + 1 :]
        by, kept = "accelerate", []
        for word in _pairs(own):
            name, _, value = word.partition("=")
            if name in ("--sweep", "--cloud"):
                raise InputError(f"axolotl train {name} starts other runs than one; leave it out")
            if name == "--launcher":
                by = value
            elif name in ("--num-processes", "--main-process-port"):
                for_launcher = [name.replace("-p", "_p"), value, *for_launcher]
            else:
                kept.append(word)
        starts = {"accelerate": ["accelerate", "launch"]}
        starts |= {name: [name] for name in ("torchrun", "python")}
        if by not in starts:
            raise InputError(f"axolotl's launcher is accelerate, torchrun or python, not {by!r}")
        command = [*starts[by], *for_launcher, "-m", "axolotl.cli.train", *kept]
        script, launcher = typed.again(command, typed.environment)
        launcher = launcher or Launcher("", processes=1)
        return script, replace(
            launcher, kind=self.name, words=words[:2], script=words[2:], config=words[2]
        )

    def with_world(
        self, made: Rewriting, words: list[str], file: Path | None, keys: dict[str, Any]
    ) -> list[str]:
        """Set the number of processes of the launcher that it starts."""
        if made.other_world:
            made.changes.append(f"{made.world} processes")
            options = ("--num-processes", *Accelerate.of_all, *Torchrun.of_node)
            by = place(words, ("--launcher",))
            if (at := place(words, options)) is not None:
                words = with_value(words, at, made.world)
            else:
                torch = by is not None and value_at(words, by) == "torchrun"
                option = "--nproc_per_node" if torch else "--num_processes"
                words = [*words, *(() if "--" in words else ("--",)), option, str(made.world)]
        return super().with_world(made, words, file, keys)


def assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the variables off that are written in front of a command.

    Raises:
        InputError: `env` has an option.
    """
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


def _pairs(words: Sequence[str]) -> list[str]:
    """Join `--name value` to `--name=value`."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and word[:2] != "--":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _check_config(option: str, file: str, cwd: Path | None) -> None:
    """Refuse a configuration file from which a changed one could not be written."""
    if file == "-" or file.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/")):
        raise InputError(
            f"{option} is read from standard input, which is there only once; write it to a file"
        )
    path = (cwd or Path.cwd()) / file
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return  # of another format, or the launcher's own parser says that it is missing
    check_plain(read_text(path), path)
