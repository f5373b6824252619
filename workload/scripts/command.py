"""A user's command: its words, their placeholders, and the start of its ranks.

`{micro_batch}` and the like may stand where a script owns a flag; `{micro_batch=8}` also says
today's value. `Script` is what the user names, `Start` what the ranks of one configuration get.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.search_spaces.declared import Knob
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.options import check_options, option
from tuner.workload.scripts.frameworks.driven import Bound
from tuner.workload.scripts.frameworks.keys import recognised, source_of
from tuner.workload.scripts.launchers import Launcher, read_command
from tuner.workload.scripts.launchers.secrets import hidden, revealed
from tuner.workload.scripts.script_facts import LAUNCH, PLACEHOLDER

#: What a command may hold beside the launch knobs. The last three differ from rank to rank.
_EXTRA = ("gradient_accumulation", "deepspeed_config", "world_size", "rank", "local_rank")
#: Frameworks that take long to import, and the modules of theirs that training needs.
_FRAMEWORKS = {
    "accelerate": ("accelerate",),
    "datasets": ("datasets",),
    "lightning": ("lightning", "lightning.pytorch"),
    "pytorch_lightning": ("pytorch_lightning",),
    "transformers": ("accelerate", "transformers.trainer"),
}


_IMPORTS = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.M)
#: `"RANK" in os.environ`, `os.environ.get("RANK")`, `os.getenv("RANK", -1)`.
_HAS_RANK = re.compile(
    r"""(["'])RANK\1 (?:not )?in os\.environ"""
    r"""|(?:environ\.get|getenv)\((["'])RANK\2(?:, *(?:-1|None))?\)"""
)


def imported_frameworks(words: Sequence[str], cwd: str | Path) -> tuple[str, ...]:
    """Return the frameworks among a script's own import lines, worth importing once for all."""
    named = _IMPORTS.findall(_source(words, cwd))
    modules = [module for name in named for module in _FRAMEWORKS.get(name, ())]
    return tuple(dict.fromkeys(modules))


def asks_for_a_rank(words: Sequence[str], cwd: str | Path) -> bool:
    """Return True if a script asks whether it has a rank, and trains in one process without.

    Under DeepSpeed it may need one: without, DeepSpeed looks for MPI's.
    """
    text = _source(words, cwd)
    return bool(_HAS_RANK.search(text)) and "deepspeed" not in _IMPORTS.findall(text)


def _source(words: Sequence[str], cwd: str | Path) -> str:
    return "" if words[0] == "-m" else source_of(words, Path(cwd))


def filled(word: str, values: Mapping[str, str]) -> str:
    """Return the word with the placeholders in `values` filled in."""
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word)


@dataclass(frozen=True)
class Script:
    """Script as the user names it, its command as one shell line.

    joulefront starts the ranks that a launcher in front of it would start. `{NAME}` or
    `{NAME=VALUE}` stands where the script takes a knob; VALUE is today's.
    """

    command: str
    cwd: Path = field(default_factory=Path.cwd)
    steps: int | None = option(None, "optimizer steps of the whole training", least=1)
    global_batch: int | None = option(
        None, "samples per optimizer step, if DeepSpeed's configuration does not give it", least=1
    )
    sequence_length: int | None = option(
        None, "tokens per sample, if the first batch does not show it", least=1
    )
    nodes: int | None = option(
        None,
        "nodes that it runs on today, through --ray (default: all usable ones)",
        least=1,
    )
    model_config: Path | None = option(
        None, "Hugging Face config.json, if the model does not carry its own", metavar="FILE"
    )
    framework: Path | None = option(
        None,
        "driver of its framework (default: recognised; see tuner list frameworks)",
        metavar="FILE",
    )
    knobs: tuple[Knob, ...] = ()

    def __post_init__(self) -> None:
        check_options(self)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words that each rank runs, without the interpreter or a launcher.

        InputError if there is no script, its launcher cannot be read, or a placeholder is unknown.
        """
        words = self._read[0]
        if not words:
            raise InputError('a script needs a command, e.g. --script "train.py --data DIR"')
        if words[0] == "-m":
            if len(words) == 1:
                raise InputError("-m must be followed by a module's name")
        elif Path(words[0]).name in ("bash", "sh", "zsh", "dash") or words[0].endswith(".sh"):
            raise InputError("shell scripts are not read: give the python or torchrun line in it")
        elif not (self.cwd / words[0]).is_file():
            raise InputError(f"there is no script {words[0]!r} in {self.cwd}")
        declared = [knob.name for knob in self.knobs]
        for word in words:
            for name, value in PLACEHOLDER.findall(word):
                if name not in (*LAUNCH, *_EXTRA, *declared):
                    hint = f"or any name whose values are declared, --knob '{name}=VALUE,VALUE'"
                    raise UnknownName("placeholder", name, (*LAUNCH, *_EXTRA, *declared, hint))
                if value and name in LAUNCH:
                    KNOBS[name].check(int(value) if value.isdigit() else value)
        return words

    def stating(self, words: Sequence[str]) -> Script:
        """Return this script with NAME=VALUE as today's value of the bare placeholder {NAME}."""
        command = self.command
        for name, _, value in (word.partition("=") for word in words):
            command = command.replace(f"{{{name}}}", f"{{{name}={value}}}") if value else command
        return replace(self, command=command)

    @property
    def launcher(self) -> Launcher | None:
        """The launcher in front of the script, or None; InputError if it cannot be honoured."""
        return self._read[1]

    @cached_property
    def framework_of_command(self) -> Bound | None:
        """The framework of the command and the keys that its installed version lacks, or None."""
        launcher = self.launcher.kind if self.launcher else ""
        return recognised(self.words, Path(self.cwd), launcher, self.framework)

    @property
    def framework_knobs(self) -> tuple[Knob, ...]:
        """Knobs that the framework's driver declares; InputError if none is recognised."""
        found = self.framework_of_command
        if found is None:
            raise InputError(
                f"no framework is recognised in {self.shown!r}, so --knobs framework has none "
                "(tuner list frameworks)"
            )
        return tuple(found.driver.declared.values())

    @cached_property
    def _kept(self) -> tuple[list[str], dict[str, str]]:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise InputError(f"the script's command cannot be read: {error}") from error
        return hidden(words, {knob.target[1] for knob in self.knobs if knob.target[0] == "env"})

    @cached_property
    def _read(self) -> tuple[tuple[str, ...], Launcher | None]:
        return read_command(self._kept[0], Path(self.cwd))

    @property
    def shown(self) -> str:
        """The command without the values of its secrets; InputError if it cannot be read."""
        return shlex.join(self._kept[0])

    @property
    def secrets(self) -> Mapping[str, str]:
        """The values that are not kept, by the variables that stand for them."""
        return self._kept[1]

    @property
    def name(self) -> str:
        """The name of the script's file or module."""
        return self.words[1] if self.words[0] == "-m" else Path(self.words[0]).stem


@dataclass(frozen=True)
class Start:
    """Start of the ranks of one configuration.

    Attributes:
        words: the command with every placeholder but those of a rank filled in.
        options: for the hook: `configuration` (every launch knob), `deepspeed` (laid over what the
            script passes; null takes a key away), `owned` (what its framework is told of batches),
            `activation_checkpointing` (set on the model), `micro_batch` (which an engine's batches
            must hold), `counts` (the first steps are counted), `quiet` (no checkpoint is written),
            `bare` (it is started as if without a launcher), `inspect` and `alter`.
        env: what is added to the environment; `{rank}` and the like as in the words.
        secrets: values that words and env name as `{env:NAME}`; others are the environment's.
        steps: length of a training that the program takes by `--steps`; None if it does not.
    """

    words: tuple[str, ...]
    cwd: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    env: Mapping[str, str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    steps: int | None = None

    def argv(
        self, rank: int, world: int, local_rank: int | None = None, node_rank: int = 0
    ) -> tuple[str, ...]:
        """Return the command of one rank of `world`; `local_rank` is its number on its node."""
        mine = _numbers(rank, world, local_rank, node_rank)
        return tuple(revealed(filled(word, mine), self.secrets) for word in self.words)

    def environment(
        self, rank: int, world: int, local_rank: int | None = None, node_rank: int = 0
    ) -> Mapping[str, str]:
        """Return what is added to the environment of one rank."""
        mine = _numbers(rank, world, local_rank, node_rank)
        return {
            name: revealed(filled(value, mine), self.secrets) for name, value in self.env.items()
        }


def _numbers(rank: int, world: int, local_rank: int | None, node_rank: int) -> dict[str, str]:
    local = rank if local_rank is None else local_rank
    numbers = {"rank": rank, "local_rank": local, "node_rank": node_rank, "world_size": world}
    return {name: str(number) for name, number in numbers.items()}
