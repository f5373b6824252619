"""An observed launch: the user's command, started once exactly as it stands.

Nothing of the command is read to start it. What its ranks report (their words, folder, variables,
number, and the counts of their first steps) says what the user trains today, and whether ranks can
be started one by one from what they reported.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from tuner.workload.hook.attachment import program_words
from tuner.workload.scripts.script_facts import PLACEHOLDER, Launcher
from tuner.workload.scripts.secrets import hidden

#: Variables by which launchers number ranks, and what they depend on: an agent sets its own.
_NUMBERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|ROLE_NAME)|LOCAL_SIZE|CROSS_(RANK|SIZE)"
    r"|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING|NODE_RANK"
    r"|CUDA_VISIBLE_DEVICES|_|SHLVL|PWD|OLDPWD|LINES|COLUMNS|BASH_FUNC_\w+%%|KMP_\w+_REGISTER\w*"
)
#: The number of a rank in a word that differs from rank to rank.
_LOCAL_RANK = re.compile(r"(--local[-_]rank=)\d+")


@dataclass(frozen=True)
class Observation:
    """Facts observed in one launch of a command.

    Attributes:
        words: of a rank, without the interpreter; `{local_rank}` stands for its number.
        folder: that it was started in.
        ranks: their number.
        variables: what the command adds to the environment of its ranks.
        threads, cores: of a rank.
        imports: packages that take long to import, which its ranks have imported.
        why_as_it_stands: why ranks cannot be started from their words, a phrase; "" if they can.
    """

    words: tuple[str, ...]
    folder: str
    ranks: int
    variables: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    cores: int = 0
    imports: tuple[str, ...] = ()
    why_as_it_stands: str = ""

    @classmethod
    def of(cls, processes: Sequence[Mapping[str, Any]]) -> Observation:
        """Return the facts from the descriptions of all ranks, in their order."""
        first = processes[0]
        words = tuple(map(_without_number, program_words(first["words"])))
        why = _why_as_it_stands(processes, words)
        if why and not _is_program(words) and first["program"].get("words"):
            words = program_words(first["program"]["words"])  # which started the ranks
        variables = {
            name: value
            for name, value in first["variables"].items()
            if not _NUMBERS.fullmatch(name)
            and all(each["variables"].get(name) == value for each in processes)
        }
        return cls(
            words,
            str(first["cwd"]),
            len(processes),
            variables,
            int(first["threads"]),
            int(first["cores"]),
            tuple(first["imports"]),
            why,
        )

    def launcher(self, read: Launcher | None) -> tuple[Launcher | None, dict[str, str]]:
        """Return the launcher as it was observed, and the values that are not kept.

        Args:
            read: what the parser makes of the command; None if it cannot read it.
        """
        variables = {
            name: value
            for name, value in self.variables.items()
            if read is None or name not in read.env
        }
        texts, secrets = hidden([f"{name}={value}" for name, value in variables.items()])
        env = dict(text.split("=", 1) for text in texts)
        if read is None:
            if self.ranks == 1 and not env:
                return None, {}
            read = Launcher("", script=self.words, processes=self.ranks)
        env = {**{n: text for n, text in read.env.items() if n in self.variables}, **env}
        kept = {n: text for n, text in read.env.items() if "{" in text}
        return replace(read, env={**kept, **env}, processes=self.ranks, nodes=1), secrets

    def placed(self, typed: str, filled: str) -> tuple[str, ...]:
        """Return the words of a rank with the placeholders of the command that typed them."""
        with_names, with_values = shlex.split(typed), shlex.split(filled)
        words = list(self.words)
        match = SequenceMatcher(None, with_values, words, autojunk=False)
        for at, position, size in match.get_matching_blocks():
            for offset in range(size):
                if PLACEHOLDER.search(with_names[at + offset]):
                    words[position + offset] = with_names[at + offset]
        return tuple(words)


def _is_program(words: Sequence[str]) -> bool:
    text = " ".join(words[:2])
    return bool(words) and "multiprocessing" not in text and "default_worker.py" not in text


def _without_number(word: str) -> str:
    return _LOCAL_RANK.sub(r"\1{local_rank}", word)


def _why_as_it_stands(processes: Sequence[Mapping[str, Any]], words: tuple[str, ...]) -> str:
    if not words or words[0] == "-":
        return "its ranks run code that is in no file"
    if any("multiprocessing" in " ".join(each["words"]) for each in processes):
        return "the script starts its ranks itself, by multiprocessing"
    if Path(words[0]).name == "default_worker.py":
        return "Ray starts its ranks"
    if words[0] == "-c":
        return "its ranks run code that is in no file"
    if len(processes) > 1 and any("RANK" not in each["variables"] for each in processes):
        return "the script starts its ranks itself"
    if (
        len({tuple(_LOCAL_RANK.sub("", word) for word in each["words"][1:]) for each in processes})
        > 1
    ):
        return "its ranks have different arguments"
    path = Path(processes[0]["cwd"]) / words[0]
    if words[0] != "-m" and not path.is_file():
        return f"there is no script {words[0]} in {processes[0]['cwd']}"
    other = next((each["prefix"] for each in processes if each["prefix"] != sys.prefix), "")
    return f"it runs in another Python environment ({other})" if other else ""
