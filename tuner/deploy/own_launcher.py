"""A pasted command written back: the same launcher, with what the configuration changes alone.

The number of processes, and the batches and ZeRO settings where the launcher or its framework takes
them, are changed where they stand: in an option, in a variable, or in a copy of the configuration
file beside the launch files. Everything else stays as it was typed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.key_files import changed_text, read_text
from tuner.workload.scripts.frameworks import shipped_drivers
from tuner.workload.scripts.knob_support import SWITCH
from tuner.workload.scripts.launchers import Launcher
from tuner.workload.scripts.launchers.slurm import TASK_OPTIONS, is_srun
from tuner.workload.scripts.script_job import ScriptJob

#: Options of each launcher for its number of processes; the first is written where none was given.
_PROCESSES = {
    "torchrun": ("--nproc-per-node", "--nproc_per_node"),
    "deepspeed": ("--num_gpus", "--num_accelerators"),
    "accelerate": ("--num_processes", "--num-processes"),
    "trl": ("--num_processes",),
    "srun": tuple(f"--{name}" for name in TASK_OPTIONS),
}
#: Options of each launcher for its number of nodes.
_NODES = {
    "torchrun": ("--nnodes",),
    "deepspeed": ("--num_nodes",),
    "accelerate": ("--num_machines", "--num-machines"),
    "trl": ("--num_machines",),
    "srun": ("--nodes", "-N"),
}
#: The word after which an option of the launcher may be written.
_NAMES = {
    "torchrun": ("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    "deepspeed": ("deepspeed", "deepspeed.launcher.runner", "ds", "deepspeed.pt"),
    "accelerate": ("launch", "accelerate-launch", "accelerate.commands.launch"),
    "srun": ("srun",),
}
#: Launchers of a framework that trains by transformers' Trainer, with arguments of its own.
_ARGUMENTS = ("trl", "llamafactory", "axolotl")
#: Keys of Accelerate's file, below its section `deepspeed_config`, by the section or key of
#: DeepSpeed's own configuration.
_ACCELERATE_OFFLOAD = {
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
}


def reaches_other_nodes(launcher: Launcher) -> bool:
    """Return True if the launcher is started once and starts the ranks of all nodes itself."""
    by_ssh = launcher.kind == "deepspeed" and launcher.nodes > 1
    return is_srun(launcher.words) or (by_ssh and "--no_ssh" not in launcher.words)


def takes_hook(launcher: Launcher) -> bool:
    """Return True if the launcher starts a script of the user's, so that the hook can wrap it."""
    return launcher.kind not in _ARGUMENTS


class Relaunch:
    """One command as it is written back.

    Attributes:
        files: text of each file to write beside launch.sh.
        changes: a phrase for each change.
    """

    def __init__(
        self, launcher: Launcher, configuration: Configuration, job: ScriptJob, folder: Path
    ) -> None:
        self._launcher, self._job, self._configuration = launcher, job, configuration
        self._folder = folder.resolve()
        self.files: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.changes: list[str] = []

    # ---- the script's arguments

    def with_arguments(self, words: Sequence[str]) -> tuple[list[str], bool]:
        """Set what the framework takes by itself in its arguments or file.

        Returns:
            The words, and whether they set all that the hook would set.
        """
        kind, found, changes = self._launcher.kind, list(words), []
        names, may_add = _names(kind), kind in _ARGUMENTS
        if not may_add and self._job.frame.owner != "transformers":
            return found, False
        file = self._own_file(found) if may_add else None
        keys: dict[str, Any] = {}
        for knob, (today, value) in self._wanted().items():
            name = names[knob]
            if name.startswith("disable_"):
                today, value = not today, not value
            at = _option(found, (f"--{name}", f"--{name.replace('_', '-')}", name))
            if at is not None and (may_add or _value(found, at) == _text(today)):
                found = _with_value(found, at, value)
            elif not may_add:
                return list(words), False
            elif file is not None and (kind != "trl" or name in _load(file)):
                keys[name] = value
            else:
                found += [f"--{name}", _text(value)]
            changes.append(f"{name} is {_text(value)}")
        self.changes += changes
        if kind == "trl":
            found = self._trl(found, file, keys)
        elif kind in _ARGUMENTS and file is not None:
            found = self._processes_of_framework(found)
            if self._job.frame.config and "deepspeed" in _load(file):
                keys["deepspeed"] = str(self._folder / "ds_config.json")
        if keys and file is not None:
            old, written = self._file_word(found), self._copy(file, keys)
            found = [word.replace(old, written) if word.endswith(old) else word for word in found]
        return found, True

    def _wanted(self) -> dict[str, tuple[Any, Any]]:
        """Return today's and the new value of what the hook would set beside DeepSpeed's JSON."""
        job, today, new = self._job, self._job.baseline, self._configuration
        size = job.global_batch
        wanted: dict[str, tuple[Any, Any]] = {}
        if "micro_batch" in job.hook_turns and new.micro_batch != today.micro_batch:
            wanted["micro_batch"] = today.micro_batch, new.micro_batch
        times = today.accumulation(size), new.accumulation(size)
        if "gradient_accumulation" in job.hook_turns and times[0] != times[1]:
            wanted["gradient_accumulation"] = times
        knob = "activation_checkpointing"
        if job.offers[knob].why == SWITCH and new.get(knob) != today.get(knob):
            wanted[knob] = today.get(knob) != "none", new.get(knob) != "none"
        return wanted

    def _file_word(self, words: Sequence[str]) -> str:
        """Return the word that names the framework's own file, or ""."""
        if self._launcher.kind == "trl":
            at = _option(words, ("--config",))
            if at is None:
                return ""
            return words[at].partition("=")[2] or words[at + 1]
        return words[0] if words else ""

    def _own_file(self, words: Sequence[str]) -> Path | None:
        word = self._file_word(words)
        return Path(self._job.cwd) / word if word else None

    def _trl(self, words: list[str], file: Path | None, keys: dict[str, Any]) -> list[str]:
        """Set TRL's number of processes, and DeepSpeed's settings in its file for Accelerate."""
        set_here: dict[str, Any] = {}
        if self._other_world:
            set_here["num_processes"] = self._configuration.world_size
        if self._launcher.config:
            path = Path(self._job.cwd) / self._launcher.config
            if changed := self._deepspeed_keys(path):
                set_here["accelerate_config"] = self._copy(path, changed)
        for name, value in set_here.items():
            self.changes.append(f"{name} is {value}")
            options = (f"--{name}", "--config_file") if "config" in name else (f"--{name}",)
            at = _option(words, options)
            if at is not None:
                words = _with_value(words, at, value)
            elif file is not None and name in _load(file):
                keys[name] = value
            else:
                words = [*words, f"--{name}", str(value)]
        return words

    def _processes_of_framework(self, words: list[str]) -> list[str]:
        """Set the number of processes of axolotl's launcher; LLaMA-Factory takes a variable."""
        if not self._other_world or self._launcher.kind == "llamafactory":
            return words
        world = self._configuration.world_size
        at = _option(words, ("--num-processes", *_PROCESSES["accelerate"], *_PROCESSES["torchrun"]))
        self.changes.append(f"{world} processes")
        if at is not None:
            return _with_value(words, at, world)
        by = _option(words, ("--launcher",))
        torch = by is not None and "torchrun" in (words[by].partition("=")[2], *words[by + 1 :][:1])
        option = "--nproc_per_node" if torch else "--num_processes"
        return [*words, *(() if "--" in words else ("--",)), option, str(world)]

    # ---- the launcher's own words

    @property
    def _other_world(self) -> bool:
        return self._configuration.world_size != self._job.baseline.world_size

    def head(self, *, hook: bool) -> list[str]:
        """Return the launcher's words as changed.

        Args:
            hook: a script of ours stands before the user's, which the launcher starts instead.
        """
        launcher, words = self._launcher, list(self._launcher.words)
        if launcher.kind == "llamafactory" and self._other_world:
            # It starts torchrun where it sees several devices, or is told to.
            nodes, world = self._nodes, self._configuration.world_size
            self.changes.append(f"{world} processes")
            self.env = {"NPROC_PER_NODE": str(world // nodes), "FORCE_TORCHRUN": "1"}
            if launcher.nodes > 1:
                self.env["NNODES"] = str(nodes)
        if launcher.kind not in _NAMES:
            return words
        if hook:
            name = self._name_at(words)
            own = [word for word in words[name + 1 :] if word not in ("-m", "--module")]
            words = words if launcher.kind == "srun" else [*words[: name + 1], *own]
            if launcher.kind == "deepspeed":
                words = self._added(words, "--no_local_rank")
            if "torch.distributed.launch" in words:
                words = self._added(words, "--use-env")
        if launcher.kind == "accelerate" and launcher.config:
            words = self._with_config(words)
        if self._other_world:
            words = self._with_processes(words)
        return words

    @property
    def _nodes(self) -> int:
        """The least number of nodes with as many processes on each as today at most."""
        each = self._job.baseline.world_size // self._launcher.nodes
        return -(-self._configuration.world_size // max(each, 1))

    def _with_processes(self, words: list[str]) -> list[str]:
        kind, world = self._launcher.kind, self._configuration.world_size
        self.changes.append(f"{world} processes instead of {self._job.baseline.world_size}")
        nodes, each = self._nodes, world // self._nodes
        if nodes != self._launcher.nodes:
            words = self._with_nodes(words, nodes)
        if kind == "accelerate" and world == 1:
            words = [word for word in words if word not in ("--multi_gpu", "--multi-gpu")]
        if kind == "deepspeed" and (at := _option(words, ("--include", "-i"))) is not None:
            del words[at : at + (1 if "=" in words[at] else 2)]
        written, short = False, kind in ("torchrun", "deepspeed")  # argparse's default
        names = (
            ("-n", *_PROCESSES[kind], "--tasks-per-node") if kind == "srun" else _PROCESSES[kind]
        )
        # What torchrun and deepspeed take is of a node, what accelerate and srun take of all.
        of_node = ("--ntasks-per-node", "--tasks-per-node", *_PROCESSES["torchrun"])
        of_node += _PROCESSES["deepspeed"]
        for name in names:
            if (at := _option(words, (name,), short=short)) is not None:
                number = each if name in of_node else world
                words, written = _with_value(words, at, number), True
        config = Path(self._job.cwd) / self._launcher.config
        if written or (config.is_file() and "num_processes" in _load(config)):
            return words
        first = _PROCESSES[kind][0]
        return self._added(words, f"{first}={each if first in of_node else world}")

    def _with_nodes(self, words: list[str], nodes: int) -> list[str]:
        """Set the number of nodes of each launcher among the words, and of Accelerate's file."""
        self.changes.append(f"{nodes} nodes instead of {self._launcher.nodes}")
        for option in dict.fromkeys(name for names in _NODES.values() for name in names):
            if (at := _option(words, (option,))) is not None:
                words = _with_value(words, at, nodes)
        return words

    def _with_config(self, words: list[str]) -> list[str]:
        """Write Accelerate's file with the changed keys, and name the new one."""
        path = Path(self._job.cwd) / self._launcher.config
        keys: dict[str, Any] = {}
        if self._other_world and "num_processes" in _load(path):
            keys["num_processes"] = self._configuration.world_size
        if self._nodes != self._launcher.nodes and "num_machines" in _load(path):
            keys["num_machines"] = self._nodes
        keys |= self._deepspeed_keys(path)
        if not keys:
            return words
        written = self._copy(path, keys)
        self.changes += [f"{key} is {_text(value)}" for key, value in keys.items()]
        at = _option(words, ("--config_file", "--config-file"))
        if at is not None:
            return _with_value(words, at, written)
        return self._added(words, f"--config_file={written}")

    def _deepspeed_keys(self, path: Path) -> dict[str, Any]:
        """Return the changed keys of the section for DeepSpeed, if the file has one."""
        if self._configuration.launch == self._job.baseline.launch:
            return {}
        section = _load(path).get("deepspeed_config") or {}
        new = self._job.start(self._configuration, self._folder, probe=False).config
        if not isinstance(section, Mapping) or not section or not new:
            return {}
        if "deepspeed_config_file" in section:
            file = str(self._folder / "ds_config.json")
            return {"deepspeed_config.deepspeed_config_file": file}
        zero = new.get("zero_optimization") or {}
        values = {"zero_stage": zero.get("stage", 0)}
        for key, name in _ACCELERATE_OFFLOAD.items():
            values[key] = (zero.get(name) or {}).get("device", "none")
        times = self._configuration.accumulation(self._job.global_batch)
        if "gradient_accumulation_steps" in section:
            values["gradient_accumulation_steps"] = times
        return {
            f"deepspeed_config.{key}": value
            for key, value in values.items()
            if str(section.get(key, "none")) != str(value)
        }

    def _added(self, words: list[str], option: str) -> list[str]:
        """Return the words with an option after the launcher's name."""
        name = option.partition("=")[0]
        if _option(words, (name, name.replace("_", "-"))) is not None:
            return words
        at = self._name_at(words)
        return [*words[: at + 1], option, *words[at + 1 :]]

    def _name_at(self, words: Sequence[str]) -> int:
        names = _NAMES[self._launcher.kind]
        return max(at for at, word in enumerate(words) if Path(word).name in names)

    def _copy(self, path: Path, keys: Mapping[str, Any]) -> str:
        """Add a copy of a configuration file with changed keys; return its path."""
        text = changed_text(path, keys, may_add=True)
        name = path.name
        while name in ("ds_config.json", "job.json", "options.json", *self.files):
            name = f"launcher-{name}"
        self.files[name] = text
        return str(self._folder / name)


def _names(kind: str) -> dict[str, str]:
    """Return the keys of the batches and of checkpointing in a framework's arguments or file."""
    wanted = kind if kind in _ARGUMENTS else "trl"  # whose arguments are the Trainer's
    driver = next(d for d in shipped_drivers() if wanted in d.recognised.launchers)
    knobs = ("micro_batch", "gradient_accumulation", "activation_checkpointing")
    return {name: driver.knobs[name].keys[0] for name in knobs}


def _option(words: Sequence[str], names: Sequence[str], *, short: bool = False) -> int | None:
    """Return the place of an option among words, or None; with `short` an abbreviation counts."""
    for at, word in enumerate(words):
        given = word.partition("=")[0]
        abbreviated = short and len(given) > 3 and given.startswith("--")
        if given in names or (abbreviated and any(name.startswith(given) for name in names)):
            return at
        if len(names[0]) == 2 and word.startswith(names[0]) and word[2:].isdigit():
            return at
    return None


def _with_value(words: Sequence[str], at: int, value: Any) -> list[str]:
    """Return the words with the value of the option at a place replaced."""
    changed = list(words)
    name, equals, _ = changed[at].partition("=")
    if equals:
        changed[at] = f"{name}={_text(value)}"
    elif not name.startswith("--") and len(name) > 2:  # -n8
        changed[at] = f"{name[:2]}{_text(value)}"
    elif at + 1 < len(changed) and not changed[at + 1].startswith("--"):
        changed[at + 1] = _text(value)
    else:  # a flag that stands for true
        changed.insert(at + 1, _text(value))
    return changed


def _value(words: Sequence[str], at: int) -> str:
    """Return the value of the option at a place; a flag alone stands for true."""
    _, equals, value = words[at].partition("=")
    if equals:
        return value
    following = words[at + 1 : at + 2]
    return following[0] if following and not following[0].startswith("--") else "true"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(read_text(path))  # JSON is YAML, too
    except yaml.YAMLError as error:
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} holds no keys")
    return data
