"""torchrun, deepspeed and accelerate, which are read by their own parsers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.workload.scripts.launchers.kinds import Vendor
from tuner.workload.scripts.launchers.launcher import Launcher
from tuner.workload.scripts.launchers.writing import Rewriting, load, place, text_of, with_value


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
