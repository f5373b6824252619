"""`srun` in front of a command: its tasks and its nodes."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import whole_number
from tuner.workload.scripts.command import PYTHON, assignments, read_words, without_python
from tuner.workload.scripts.launchers.kinds import Kind, LauncherCommand, Read
from tuner.workload.scripts.script_facts import Launcher
from tuner.workload.scripts.secrets import options_of_srun

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
