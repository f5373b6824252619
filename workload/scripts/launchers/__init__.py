"""Launchers of pasted commands: how each is recognised and read, and the processes of each.

A launcher is a subclass of `Kind`. torchrun, deepspeed and accelerate are read by their own parsers
(`vendor`), in the folder and environment that they would be started in; srun by a table of ours.
Nothing is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import whole_number
from tuner.workload.scripts.command import PYTHON, assignments, read_words, without_python
from tuner.workload.scripts.frameworks.settings import query_interpreter
from tuner.workload.scripts.launchers import vendor
from tuner.workload.scripts.script_facts import Launcher, names_taken
from tuner.workload.scripts.secrets import options_of_srun

#: Starters of ranks that are not read.
UNREAD = ("mpirun", "mpiexec", "horovodrun", "jsrun", "aprun", "colossalai", "composer")
#: Words that each rank runs, and the launcher in front of them.
Read = tuple[tuple[str, ...], Launcher]


@dataclass(frozen=True)
class LauncherCommand:
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
        also: other words that train like the last of `own`.
        takes_hook: the hook can stand in front of the script.
    """

    name = ""
    commands: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    takes_hook = True

    def __init_subclass__(cls) -> None:
        if cls.commands or cls.modules:
            KINDS.append(cls())

    def read(self, typed: LauncherCommand) -> Read:
        """Return the launch of a command; InputError if it is refused or cannot be honoured."""
        raise NotImplementedError

    def reaches_nodes(self, launcher: Launcher) -> bool:
        """Return True if it is started once and starts the ranks of all nodes itself."""
        return False


class Vendor(Kind):
    """Launcher that is read by its own parser."""

    @property
    def shown(self) -> str:
        """The command, for sentences."""
        return " ".join((self.commands or self.modules)[:1] + self.own)

    def read(self, typed: LauncherCommand) -> Read:
        """Read the arguments by the launcher's own parser; InputError if it refuses them."""
        words = typed.words
        read = _reply(self.name, words[typed.skip :], typed.cwd, typed.environment)
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


class _Deepspeed(Vendor):
    """DeepSpeed's launcher."""

    name = "deepspeed"
    commands = ("deepspeed", "ds", "deepspeed.pt")
    modules = ("deepspeed", "deepspeed.launcher.runner")

    def reaches_nodes(self, launcher: Launcher) -> bool:
        """Return True if it reaches several nodes by ssh."""
        return launcher.nodes > 1 and "--no_ssh" not in launcher.words


class _Accelerate(Vendor):
    """`accelerate launch`, with its configuration file."""

    name = "accelerate"
    commands = ("accelerate", "accelerate-launch")
    modules = ("accelerate.commands.launch",)
    own = ("launch",)


class _Trl(Vendor):
    """`trl COMMAND`, which starts a script of its own by accelerate."""

    name = "trl"
    commands = ("trl",)
    takes_hook = False


class _Starter(Kind):
    """Command as `NAME train` that starts a module of its own by another launcher."""

    own = ("train",)
    takes_hook = False

    def command(self, given: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Return the launch for these arguments; InputError for one that is not read."""
        raise NotImplementedError

    def read(self, typed: LauncherCommand) -> Read:
        """Return the launch of that launcher."""
        words, at = typed.words, typed.skip
        command = self.command(words[at:], typed.environment)
        script, launcher = read_words(command, typed.cwd, typed.environment)
        assert launcher is not None
        return script, replace(launcher, kind=self.name, words=words[:at], script=words[at:])


class _LlamaFactory(_Starter):
    """`llamafactory-cli train` (0.9.4): torchrun on NPROC_PER_NODE devices.

    `sft` is the word of its v1, which USE_V1 chooses.
    """

    name = "llamafactory"
    commands = ("llamafactory-cli", "llamafactory", "lmf")
    also = ("sft",)

    def command(self, given: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        second = environment.get("USE_V1", "").lower() in ("true", "y", "1")
        module = f"llamafactory{'.v1' * second}.launcher"
        return [*_torchrun(environment, "gpu"), "-m", module, *given]

    def read(self, typed: LauncherCommand) -> Read:
        """Return the same with its settings of torch's DDP."""
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


class _Torchtune(_Starter):
    """`tune run` (0.6): options of torchrun, then a recipe's name or file and its own words."""

    name = "torchtune"
    commands = ("tune",)
    own = ("run",)

    def command(self, given: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        at = 0
        while at < len(given) and given[at].startswith("-"):
            at += 1 if "=" in given[at] or given[at] == "--standalone" else 2
        if at >= len(given):
            raise InputError("tune run must be followed by a recipe, e.g. tune run R --config FILE")
        start = ["torchrun", *(given[:at] or ["--nproc-per-node=1"])]
        recipe = [given[at]]
        if not given[at].endswith(".py"):
            recipe = ["-m", "recipes." + given[at].replace("/", ".")]
        return [*start, *recipe, *given[at + 1 :]]


class _Swift(_Starter):
    """`swift sft` (ms-swift 3): torchrun on NPROC_PER_NODE devices, one without it."""

    name = "swift"
    commands = ("swift",)
    own = ("sft",)

    def command(self, given: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        return [*_torchrun(environment, "1"), "-m", "swift.cli.sft", *given]


def _torchrun(environment: Mapping[str, str], each: str) -> list[str]:
    """Return torchrun as variables say it, with so many ranks a node where none does."""
    nodes = environment.get("NNODES") or 1
    nodes, each = environment.get("NNODES") or 1, environment.get("NPROC_PER_NODE") or each
    return ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={each}"]


def _reply(
    name: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    given = {name: text for name, text in environment.items() if not names_taken([text])}
    question = {"launcher": name, "arguments": list(arguments)}
    reply, why = query_interpreter([vendor.__file__], question, vendor.MARK, cwd, given)
    # argparse says what is wrong in its last line and ends the process.
    why = why.partition("error: ")[2] or why or "it answered this command with its help"
    return {"refuse": why} if reply is None else reply


def kind_of(launcher: Launcher) -> Kind | None:
    """Return the kind of a launcher; None for variables alone."""
    return next((kind for kind in KINDS if kind.name == launcher.kind), None)


def launched(words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> Read | None:
    """Return the launch of a command without variables in front; None if it has no launcher."""
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
            if bare[1 : 1 + len(kind.own)] not in (kind.own, *((word,) for word in kind.also)):
                shown = " ".join((name, *kind.own))
                raise InputError(f"of {name}'s commands only `{shown}` trains")
            skip += len(kind.own)
        return kind.read(LauncherCommand(tuple(words), skip, cwd, environment))
    return None


#: What Slurm is told outside a pasted command.
ON_EACH_NODE = (
    "srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "
    # A task has one core, unless it is given those of its node.
    '--cpus-per-task="$SLURM_CPUS_ON_NODE" --mem=0'
)


class Srun(Kind):
    """`srun` in front of a script, or of another launcher."""

    name = "srun"
    commands = ("srun",)

    def reaches_nodes(self, launcher: Launcher) -> bool:
        """Return True: its tasks are on all nodes."""
        return True

    def read(self, typed: LauncherCommand) -> Read:
        """Return the launch, in an allocation by Slurm's own figures; or InputError."""
        words = list(typed.words)
        options, at = options_of_srun(words)
        _check_options(words[at:], options)
        nodes, tasks = _tasks(options, typed.environment)
        chdir = options.get("chdir", "")
        if (typed.cwd / chdir).resolve() != typed.cwd.resolve():
            raise InputError(f"srun starts in {chdir}; start tuner there, without --chdir")
        env, notes = _exported(options.get("export", "ALL"))
        if "cpus-per-task" in options:
            env["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
        notes += [
            f"srun --{option} is not applied in probes"
            for option in ("cpu-bind", "mem-bind", "distribution", "hint")
            if option in options
        ]
        inner, rest = assignments(words[at:])
        if not without_python(rest):
            raise InputError("srun must be followed by a command, e.g. srun -n 2 python train.py")
        script, launcher = read_words(rest, typed.cwd, {**typed.environment, **env, **inner})
        if launcher is None:
            installed = script[0] == "-m" and rest[0] != "-m" and tuple(rest[1:]) == script[2:]
            if installed:
                words = [*words[: len(words) - len(rest)], "python", *script]
            elif Path(rest[0]).suffix != ".py" and not PYTHON.fullmatch(Path(rest[0]).name):
                raise InputError(
                    f"srun starts {rest[0]!r}, whose ranks are not seen from here; paste the "
                    "command of Python that is in it"
                )
            own = tuple(words[: len(words) - len(script)])
            launcher = Launcher(self.name, own, script, tasks or 1, nodes=nodes)
            env = {**env, **inner, **_task_environment()}
            return script, replace(launcher, env=env, notes=tuple(notes))
        if tasks > 1:
            raise InputError(
                f"srun starts {tasks} tasks on a node, and each would start the ranks of "
                f"{launcher.kind}; give --ntasks-per-node=1"
            )
        if nodes != launcher.nodes:
            raise InputError(
                f"srun starts on {nodes} nodes and {launcher.kind} asks for {launcher.nodes}; "
                "give both the same number"
            )
        return script, replace(
            launcher,
            words=(*words[: len(words) - len(rest)], *launcher.words),
            env={**env, **inner, **_task_environment(nodes), **launcher.env},
            notes=(*notes, *launcher.notes),
        )


def _check_options(command: Sequence[str], options: Mapping[str, str]) -> None:
    if not command:
        raise InputError("srun must be followed by a command, e.g. srun -n 2 python train.py")
    if ":" in command:
        raise InputError("srun of a heterogeneous job (`:`) starts several programs; give one")
    for option in ("multi-prog", "pty"):
        if option in options:
            raise InputError(f"srun --{option} is not for a training script; leave it out")
    if "gpus-per-task" in options or options.get("gpu-bind", "none") != "none":
        option = "gpus-per-task" if "gpus-per-task" in options else "gpu-bind"
        raise InputError(
            f"srun --{option} shows each task its own GPU alone, and a rank of a probe sees those "
            "of all; give --gpus-per-node and let the script take the GPU of its local rank"
        )


def _tasks(options: Mapping[str, str], environment: Mapping[str, str]) -> tuple[int, int]:
    nodes = _nodes(options, environment)
    each, tasks = _number(options, "ntasks-per-node"), _number(options, "ntasks")
    if not each and not tasks:
        each = _first_number(environment.get("SLURM_NTASKS_PER_NODE", ""))
        tasks = _first_number(environment.get("SLURM_NTASKS", ""))
    # --ntasks wins over --ntasks-per-node, which then is a limit (srun(1)).
    if tasks and each:
        nodes = max(nodes, -(-tasks // each))
    if tasks % nodes:
        raise InputError(
            f"srun spreads {tasks} tasks over {nodes} nodes, and a probe has as many on each; give "
            f"a multiple of {nodes}"
        )
    return nodes, tasks // nodes or each


def _exported(text: str) -> tuple[dict[str, str], list[str]]:
    items = text.split(",")
    env = dict(item.split("=", 1) for item in items if "=" in item)
    if "ALL" in items:
        return env, []
    return env, [f"srun --export={text}: probes keep the whole environment of tuner"]


def _task_environment(nodes: int = 0) -> dict[str, str]:
    # Return what srun tells its tasks of their numbers (srun(1), "OUTPUT ENVIRONMENT").
    tasks = str(nodes) if nodes else "{world_size}"
    return {
        "SLURM_PROCID": "{node_rank}" if nodes else "{rank}",
        "SLURM_LOCALID": "0" if nodes else "{local_rank}",
        "SLURM_NODEID": "{node_rank}",
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
    }


def with_tasks(launcher: Launcher, world: int, today: int) -> list[str]:
    """Return srun's own words for `world` tasks in place of today's, up to the script.

    They are on the least number of nodes with as many on each as today at most. Of several options
    of a kind srun takes the last.
    """
    words = list(launcher.words)
    at = options_of_srun(words)[1]
    nodes = -(-world // max(today // launcher.nodes, 1))
    counts = [f"--nodes={nodes}", f"--ntasks={world}", f"--ntasks-per-node={world // nodes}"]
    return [*words[:at], *counts, *(words[at:] or [sys.executable])]


def _nodes(options: Mapping[str, str], environment: Mapping[str, str]) -> int:
    text = options.get("nodes", "")
    if not text:
        one = options.get("ntasks") == "1"
        return 1 if one else _first_number(environment.get("SLURM_NNODES", "")) or 1
    words = re.findall(r"\d+", text.partition(":")[0])
    nodes = whole_number(words[-1]) if words else None
    if not nodes:
        raise InputError(f"srun's --nodes={text} is not a number of nodes")
    return nodes


def _number(options: Mapping[str, str], name: str) -> int:
    if name not in options:
        return 0
    number = whole_number(options[name])
    if not number:
        raise InputError(f"srun's --{name}={options[name]} is not a number of tasks")
    return number


def _first_number(text: str) -> int:
    found = re.match(r"[0-9]+", text)
    return (whole_number(found[0]) or 0) if found else 0


#: Words of launchers, which say nothing of a user.
LAUNCHER_WORDS = frozenset(
    {
        *(name for kind in KINDS for name in (*kind.commands, *kind.modules)),
        *(*UNREAD, "env", "launch", "train", "run", "sft"),
    }
)

__all__ = ["LAUNCHER_WORDS", "kind_of", "launched", "with_tasks"]
