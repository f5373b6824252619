"""TRL, LLaMA-Factory and Axolotl, which train by transformers' Trainer with arguments of their own.

LLaMA-Factory and Axolotl start torchrun or accelerate with a module of theirs, which is written out
here after their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.launchers.kinds import (
    Kind,
    Read,
    Typed,
    Vendor,
    check_config,
    read_words,
    spellings,
)
from tuner.workload.scripts.launchers.writing import (
    Rewriting,
    load,
    place,
    text_of,
    value_at,
    with_value,
)
from tuner.workload.scripts.script_facts import Launcher


class _Framework(Kind):
    """Launcher of a framework that trains by transformers' Trainer, with arguments of its own."""

    takes_hook = False

    def head(self, made: Rewriting, *, hook: bool) -> list[str]:
        return list(made.launcher.words)

    def with_arguments(self, made: Rewriting, words: Sequence[str]) -> tuple[list[str], bool]:
        found, keys = list(words), dict[str, Any]()
        old = self.file_word(found)
        file = Path(made.job.cwd) / old if old else None
        for name, _, value in made.wanted(self.name):
            made.changes.append(f"{name} is {text_of(value)}")
            found = self.placed(found, spellings(name), value, file, keys)
        found = self.with_world(made, found, file, keys)
        if keys and file is not None:
            written = made.copy(file, keys)
            found = [word.replace(old, written) if word.endswith(old) else word for word in found]
        return found, True

    def file_word(self, words: Sequence[str]) -> str:
        return words[0] if words else ""

    def placed(
        self,
        words: list[str],
        options: tuple[str, ...],
        value: Any,
        file: Path | None,
        keys: dict[str, Any],
    ) -> list[str]:
        """Set a value where it stands, else by the key, the last option, or a new option."""
        if (at := place(words, options)) is not None:
            return with_value(words, at, value)
        if file is not None and self.takes_key(file, options[-1]):
            keys[options[-1]] = value
            return words
        return [*words, options[0], text_of(value)]

    def takes_key(self, file: Path, key: str) -> bool:
        return True

    def with_world(
        self, made: Rewriting, words: list[str], file: Path | None, keys: dict[str, Any]
    ) -> list[str]:
        if file is not None and made.job.frame.config and "deepspeed" in load(file):
            keys["deepspeed"] = str(made.folder / "ds_config.json")
        return words


class _Trl(_Framework, Vendor):
    """`trl COMMAND`, which starts a script of its own by accelerate."""

    name = "trl"
    commands = ("trl",)
    nodes = ("--num_machines",)

    def file_word(self, words: Sequence[str]) -> str:
        at = place(words, ("--config",))
        return "" if at is None else words[at].partition("=")[2] or words[at + 1]

    def takes_key(self, file: Path, key: str) -> bool:
        return key in load(file)

    def with_world(
        self, made: Rewriting, words: list[str], file: Path | None, keys: dict[str, Any]
    ) -> list[str]:
        values: dict[tuple[str, ...], Any] = {}
        if made.other_world:
            values[spellings("num_processes")] = made.world
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


class _LlamaFactory(_Framework):
    """`llamafactory-cli train` (0.9.4): its module under torchrun, on NPROC_PER_NODE devices."""

    name = "llamafactory"
    commands = ("llamafactory-cli", "llamafactory", "lmf")

    def read(self, typed: Typed) -> Read:
        words, environment = typed.words, typed.environment
        if len(words) < 3 or words[1] != "train":
            raise InputError(
                "of llamafactory-cli's commands only `llamafactory-cli train FILE` trains"
            )
        check_config("llamafactory-cli train", words[2], None)
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
        if made.other_world:
            made.changes.append(f"{made.world} processes")
            made.env = {"NPROC_PER_NODE": str(made.world // made.nodes), "FORCE_TORCHRUN": "1"}
            if made.launcher.nodes > 1:
                made.env["NNODES"] = str(made.nodes)
        return list(made.launcher.words)


class _Axolotl(_Framework):
    """`axolotl train`, after axolotl/cli/main.py and utils/train.py (0.12).

    It starts its module `axolotl.cli.train` by accelerate, torchrun or python (`--launcher`); what
    follows `--` is the launcher's.
    """

    name = "axolotl"
    commands = ("axolotl",)

    def read(self, typed: Typed) -> Read:
        words = typed.words
        if len(words) < 3 or words[1] != "train" or words[2].startswith("-"):
            raise InputError("of axolotl's commands only `axolotl train FILE` trains")
        check_config("axolotl train", words[2], typed.cwd)
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
        script, launcher = read_words(command, typed.cwd, typed.environment)
        launcher = launcher or Launcher("", processes=1)
        return script, replace(
            launcher, kind=self.name, words=words[:2], script=words[2:], config=words[2]
        )

    def with_world(
        self, made: Rewriting, words: list[str], file: Path | None, keys: dict[str, Any]
    ) -> list[str]:
        if made.other_world:
            made.changes.append(f"{made.world} processes")
            options = ("--num-processes", "--num_processes", "--nproc-per-node", "--nproc_per_node")
            by = place(words, ("--launcher",))
            if (at := place(words, options)) is not None:
                words = with_value(words, at, made.world)
            else:
                torch = by is not None and value_at(words, by) == "torchrun"
                option = "--nproc_per_node" if torch else "--num_processes"
                words = [*words, *(() if "--" in words else ("--",)), option, str(made.world)]
        return super().with_world(made, words, file, keys)


def _pairs(words: Sequence[str]) -> list[str]:
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and word[:2] != "--":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined
