"""Facts of the training that the keys of a command state, read as text: table [facts] of a driver.

A fact is read and never written; what is written is a knob. What stands in for a missing value, and
what cannot be counted, is collected as sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import whole_number
from tuner.workload.scripts.frameworks.driver import Driver
from tuner.workload.scripts.frameworks.parts import Fact, matches
from tuner.workload.scripts.frameworks.settings import Settings
from tuner.workload.scripts.key_files import parsed_file, repeated_keys, shown, shown_text

#: Values that only the framework or a shell fills in.
UNFILLED = re.compile(r"\$\{|\$\w|\{\{")
#: Names of keys that change what memory holds. One that is given and not read is doubted.
_MEMORY = re.compile(
    r"quant|[48]_?bit|liger|offload|fsdp|deepspeed|optim|pack|lora|dora|peft|adapter|galore|apollo"
    r"|badam|adam_mini|mm_proj_only|enable_float8|freez|frozen|^beta$|max_prompt|max_completion|fp8|expert|parallel|checkpointing|cross_entropy|chunk|(?<!re)vision"
    r"|image|video|audio|tower|^rl$|dpo|kto|grpo|orpo|reward|ref_model|vllm|compile|unsloth|qat"
    r"|kernel|mixture_of|relora|llama_pro|^stage$|process_index|shard|converters|batch_size|training\.dtype|_cp_|cp_size|tp_size"
)
#: Names of degrees, for which 1 is neutral.
_DEGREE = re.compile(r"parallel|degree|replica|(?:shard|tp|pp|cp|dp|ep|sp|partition)_(?:size|dim)$")
#: Texts that turn something off, in small letters.
_OFF = ("", "none", "no", "null", "false", "off", "0", "disabled")
#: Keys that look so and are of a launcher, a writer or an evaluation.
_OTHER = re.compile(r"eval|save|hub|wandb|report|push|dataset|logging|^fsdp_config|^deepspeed$")


class Facts:
    """Reader of one command's facts, with its assumptions and doubts."""

    def __init__(self, driver: Driver, settings: Settings) -> None:
        self.driver, self.settings = driver, settings
        self.assumed, self.doubts = list[str](), list[str]()

    @cached_property
    def source(self) -> str:
        """The file, or else the framework's command, for sentences."""
        file = self.settings.file
        return file[1].name if file else f"the command of {self.driver.name}"

    def named(self, fact: str) -> str:
        """Return the key that states a fact, for sentences."""
        return next(iter(self._fact(fact).keys), fact)

    def get(self, key: str) -> Any:
        """Return the value of a key; InputError for one that only the framework fills in."""
        value = self.settings.get(key)
        if isinstance(value, str) and UNFILLED.search(value):
            raise InputError(
                f"{key} in {self.source} is {shown(value)}, which is filled in only when it is "
                f"started; write the value itself, in the file or in the command"
            )
        number = whole_number(value) if isinstance(value, str) else None
        return value if number is None else number

    def given(self, fact: str) -> Any:
        """Return the value of the first key of a fact that is given; None without."""
        return self._first(fact)[1]

    def switched_on(self, fact: str) -> bool:
        """Return True if a fact is given as true, by its word, too."""
        return str(self.given(fact)).lower() == "true"

    def text(self, fact: str) -> str:
        """Return a fact as a text; "" if it is not given."""
        key, value = self._first(fact)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{key} in {self.source} is {shown(value)}, which is not a name")
        return value or ""

    def number(self, fact: str) -> int:
        """Return a fact as a number of at least 1; 0 if it is not given."""
        return self.count(*self._first(fact))

    def count(self, key: str, value: Any) -> int:
        """Return the value of a key as a number of at least 1; 0 for None."""
        if value is None:
            return 0
        if type(value) is not int or value < 1:
            raise InputError(
                f"{key} in {self.source} is {shown(value)}; a number of at least 1 is read"
            )
        return value

    def default(self, fact: str) -> int:
        """Return the framework's default of a fact; 0 if it has none."""
        return int(self._fact(fact).default or 0)

    def case(self, fact: str) -> str:
        """Return the value of a fact by its cases; "" if none holds.

        A key of it whose value no case knows is doubted.
        """
        if found := self.holding(fact):
            return found
        for key in dict.fromkeys(key for case in self._fact(fact).cases for key in case.when):
            value = self.get(key)
            if not key.startswith("env:") and not is_neutral(key, value):
                self.doubt(self.settings.name(key), value)
        return ""

    def holding(self, fact: str) -> str:
        """Return the value of the first case of a fact that holds; "" if none does."""
        for case in self._fact(fact).cases:
            if all(matches(self.get(key), any_of) for key, any_of in case.when.items()):
                return case.value
        return ""

    def doubt(self, key: str, value: Any) -> None:
        """Note that the value of a key is not counted."""
        given = shown_text(str(value)) if isinstance(value, bool | int | float | str) else "set"
        self.doubts.append(f"{shown_text(key)} = {given} of {self.source} is not counted")

    def _fact(self, name: str) -> Fact:
        return self.driver.facts.get(name, Fact())

    def _first(self, fact: str) -> tuple[str, Any]:
        keys = self._fact(fact).keys
        found = ((self.settings.name(k), v) for k in keys if (v := self.get(k)) is not None)
        return next(found, ("", None))

    # ---- what else is given

    def name_the_rest(self) -> None:
        """Note each key that changes what memory holds and that no fact or knob reads."""
        for key, note in self.driver.uncounted.items():
            if not is_neutral(key, self.get(key)):
                self.assumed.append(note)
        read = {*self.driver.keys, *self.driver.read_keys, *self.driver.harmless}
        spelt = {key.replace("-", "_") for key in read}
        for key, value in self._every():
            if key in read or key in spelt or _OTHER.search(key) or not _MEMORY.search(key):
                continue
            if is_neutral(key, value):
                continue
            self.doubt(key, value)
        if (file := self.settings.file) and file[1].suffix != ".toml":
            for key, last in repeated_keys(file[1]):
                self.assumed.append(
                    f"{key} stands twice in {self.source}; the last, {last}, counts"
                )

    def _every(self) -> Iterator[tuple[str, Any]]:
        """Yield each key of the file and of the command, with its value."""
        file = self.settings.file
        data = parsed_file(file[1]) if file else {}
        if not isinstance(data, Mapping):
            raise InputError(f"{self.source} holds no keys")
        if file is not None and file[1].suffix == ".toml":
            yield from _flat(data)
        else:
            yield from ((str(key), value) for key, value in data.items())
        for word in self.settings.words:
            name = word.partition("=")[0]
            if name.startswith("--") and len(name) > 2:
                key = name[2:].replace("-", "_") if "." not in name else name[2:]
                if key not in data:
                    yield key, self.settings.get(key)


def is_neutral(key: str, value: Any) -> bool:
    """Return True if a value turns nothing on: not given, off, empty, zero, or a degree of 1."""
    if isinstance(value, Mapping):
        return all(is_neutral(str(name), part) for name, part in value.items())
    if isinstance(value, str):
        return value.lower() in _OFF or (value == "1" and bool(_DEGREE.search(key)))
    if type(value) is int and value == 1:
        return bool(_DEGREE.search(key))
    return not value


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested tables with dots."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
