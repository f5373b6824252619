"""Keys of a framework in a command, in the file that it names, and in the environment.

A key is read from the command first, then from the file. It is written where it stands; a new one
goes into the file if there is one, else at the end of the command. Variables are keys "env:NAME".
A framework that is configured by a function, as torchtitan 0.3 is, gets a generated module, which
calls the user's function and sets attributes of what it returns; the command names it instead.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import FILE_KINDS
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.safe_files import without_secrets, write_text
from tuner.workload.scripts.key_files import changed_text, parsed_file, read_text, renamed

#: In a level's text: a knob whose value stands there.
TEMPLATE = re.compile(r"\{(\w+)\}")
#: In a level: the key must not be given at all.
UNSET = "<unset>"
#: Facts of the training that keys may state, each with its legal values; () for a number or a name.
FACTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("steps", "sequence_length", "rank_batch", "lora_rank", "model"), ()),
    "loss": ("next-token",),
    "precision": ("fp32", "bf16", "fp16"),
    "pure_bf16": ("true",),
    "lora": ("true", "false"),
    "lora_targets": ("attention", "all-linear"),
    "lora_mlp": ("true",),  # the MLP's layers are adapted beside the named ones
    "lora_text_alone": ("true",),
    "dora": ("true",),
    "quantization": ("none", "nf4", "nf4-double", "int8"),
    "optimizer": ("adamw", "adamw_32bit", "adamw_8bit"),
    "activation_checkpointing": ("none", "selective", "full"),
    "model_type": ("llama", "qwen3", "mixtral", "gpt2"),
    "tied": ("true",),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_version", "fsdp_strategy", "fsdp_reshard"), ()),
    **dict.fromkeys(("fsdp_offload", "fsdp_checkpointing", "launcher_fsdp"), ()),
    **dict.fromkeys(("launcher_deepspeed", "launcher_deepspeed_file", "launcher_zero_stage"), ()),
    **dict.fromkeys(("launcher_optimizer_offload", "launcher_parameter_offload"), ()),
}


@dataclass(frozen=True)
class FrameworkSigns:
    """Signs of a framework in a command; one of the first four is enough.

    Beside these the script must hold each of `mentions`, or one of "A|B", and the command one of
    `options`. A file that is given alone has each key of `file`, or one of "A|B",
    and none of `lacks`.
    """

    modules: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def in_file(self, data: Any) -> bool:
        """Return True if a file's contents have the keys by which it is recognised."""
        if not self.file or not isinstance(data, Mapping):
            return False
        given = all({*names.split("|")} & {*data} for names in self.file)
        return given and not {*self.lacks} & {*data}


@dataclass(frozen=True)
class Command:
    """Spelling of a key.

    Attributes:
        option: in the command, with {key} and {value}: "--{key} {value}", "{key}={value}"; "" if
            the command takes no keys.
        truth: how a truth value is written there: "word" (--key True), "bare" (--key, or nothing)
            or "negated" (--key, or --no-key behind the last dot).
        file: options that name the file with the keys; "first" for the first word that names one.
        python: the script, and the Python files that the command names, assign the keys.
    """

    option: str = ""
    truth: str = "word"
    file: tuple[str, ...] = ()
    python: bool = False


@dataclass(frozen=True)
class KnobKeys:
    """Place of one knob: a key that takes its number, or settings for each of its values.

    The number is multiplied with `times` (a batch counted in tokens: sequence_length) and divided
    by `over`. Of a level's list of values the first is written, and each is recognised; {NAME} of a
    launch knob may stand in a text, and `UNSET` takes the key away. Where `when` does not hold, the
    key means something else: it is neither read, so that the knob is at its default, nor set.
    """

    key: str = ""
    default: Any = None
    times: tuple[str, ...] = ()
    levels: Mapping[Value, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    over: tuple[str, ...] = ()
    when: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that it may set, each once."""
        named = [key for settings in self.levels.values() for key in settings]
        return tuple(dict.fromkeys([self.key] * bool(self.key) + named))


@dataclass(frozen=True)
class Renamed:
    """Key that had other names, the latest first; its own is of release `since` and later.

    A key is read by each of its names, and written by the one that is given.
    """

    key: str
    was: tuple[str, ...] = ()
    since: str = ""


@dataclass(frozen=True)
class Case:
    """Value of a fact where each key has one of some values."""

    value: str
    when: Mapping[str, tuple[Any, ...]] = field(hash=False)


@dataclass(frozen=True)
class Fact:
    """Fact of the training (`FACTS`), which keys state and nothing changes.

    The first case that holds counts, else the first of `keys` that is given, else `default`: the
    framework's own, or, if it is `unlimited` without, a usual one.
    """

    keys: tuple[str, ...] = ()
    default: Any = None
    cases: tuple[Case, ...] = ()
    unlimited: bool = False


@dataclass(frozen=True)
class Rule:
    """Configurations that the framework refuses.

    The product of the degrees `divide` must divide `of`: a launch knob, "world_size",
    "sequence_length" or a key of the framework; the rule is left out where that is not given.
    """

    why: str
    require: str = ""
    divide: tuple[str, ...] = ()
    of: str = ""
    default: Any = None


@dataclass(frozen=True)
class Wrapper:
    """Framework configured by a function, which a generated module calls; `search` has {module}."""

    module: str
    function: str
    search: tuple[str, ...] = ("{module}",)


def matches(now: Any, any_of: tuple[Any, ...]) -> bool:
    """Return True if the value of a key, None if it is not given, is one of some values.

    A text with * is a pattern.
    """
    if now is None:
        return UNSET in any_of
    return any(
        (one == now and isinstance(one, bool) == isinstance(now, bool)) or _is_like(now, one)
        for one in any_of
    )


def _is_like(now: Any, pattern: Any) -> bool:
    both = isinstance(now, str) and isinstance(pattern, str)
    return both and "*" in pattern and fnmatchcase(now, pattern)


MODULE = "joulefront_config"
#: Prints today's values of some keys; an object is named by its class, and None left out.
_READ = """
import importlib, json, sys

asked = json.load(sys.stdin)
sys.path[:0] = asked["path"]
config = None
for name in asked["search"]:
    try:
        config = getattr(importlib.import_module(name), asked["function"])()
        break
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
given = {}
for key in asked["keys"]:
    value = config
    for part in key.split("."):
        value = getattr(value, part, None)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        value = f"call:{type(value).__module__}:{type(value).__qualname__}"
    if value is not None:
        given[key] = value
print("\\njoulefront-given " + json.dumps(given), flush=True)
"""
#: Parsers and configurations import torch.
_LIMIT_S = 180.0


@dataclass(frozen=True)
class Settings:
    """Keys as a command gives them.

    Attributes:
        given: values by a user's function, where neither the command nor a file gives a key.
        other_names: earlier names of keys, by key.
        former: the name by which the installed release takes a key, where it is an earlier one.
    """

    command: Command
    words: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    given: Mapping[str, Any] = field(default_factory=dict)
    other_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> tuple[int, Path] | None:
        """Position of the word that names the file with the keys, and the file; None without."""
        for option in self.command.file:
            for at, word in enumerate(self.words):
                name, equals, value = word.partition("=")
                found = None
                if option == "first":
                    before = self.words[at - 1] if at else ""
                    of_option = _is_option(before) and before != "-m" and "=" not in before
                    if word.endswith(FILE_KINDS) and not of_option and not _is_option(word):
                        found, value = at, word
                elif _same(name, option):
                    found = at if equals else at + 1
                    value = value if equals else "".join(self.words[found : found + 1])
                path = self.cwd / value
                if found is not None and path.suffix in FILE_KINDS and path.is_file():
                    return found, path
        return None

    def get(self, key: str) -> Any:
        """Return the value of a key, or None; InputError if the file cannot be read."""
        name = self.name(key)
        kind, _, variable = name.rpartition(":")
        if kind == "env":
            value = self.env.get(variable)
            return None if value is None else _native(value)
        at = self._at(name)
        if at is not None:
            return self._word(at)[1]
        value = self._in_file(name)
        return self.given.get(key) if value is None else value

    def name(self, key: str) -> str:
        """Return the name by which a key is given, or else the one that the release takes."""
        names = (key, *self.other_names.get(key, ()))
        if len(names) > 1:
            for name in names:
                if self.in_command(name):
                    return name
            for name in names:
                if self._in_file(name) is not None:
                    return name
        return self.former.get(key, key)

    def _in_file(self, name: str) -> Any:
        """Return the value of a name in the file, or None."""
        if self.command.python:
            return self._assigned.get(name)
        file = self.file
        data: Any = parsed_file(file[1]) if file else None
        for part in name.split("."):
            if not isinstance(data, Mapping) or part not in data:
                return None
            data = data[part]
        return data

    @cached_property
    def _assigned(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for word in self.words:
            path = self.cwd / word
            if path.suffix != ".py" or not path.is_file():
                continue
            try:
                tree = ast.parse(read_text(path))
            except (SyntaxError, ValueError) as error:
                raise InputError(f"cannot read {path}: {error}") from error
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    value = _constant(node.value)
                    if value is not None:
                        values[node.targets[0].id] = value
        return values

    def in_command(self, name: str) -> bool:
        """Return True if the command itself gives a key by this name."""
        return self._at(name) is not None

    def _option(self, key: str, *, no: bool = False) -> str:
        tables, dot, last = key.rpartition(".")
        return f"{self.command.option.partition('{key}')[0]}{tables}{dot}{'no-' * no}{last}"

    def _at(self, key: str) -> int | None:
        option, found = self.command.option, None
        options = [self._option(key)]
        options += [self._option(key, no=True)] * (self.command.truth == "negated")
        for at, word in enumerate(self.words if option else ()):
            name, equals, _ = word.partition("=")
            # An override without a prefix is KEY=VALUE in one word.
            if (equals or not option.startswith("{key}")) and any(_same(name, o) for o in options):
                found = at
        return found

    def _word(self, at: int) -> tuple[int, Any]:
        name, equals, value = self.words[at].partition("=")
        if equals:
            return 1, _native(value)
        if self.command.truth == "negated" and re.search(r"[.-]no-[\w-]+$", name):
            return 1, False
        following = self.words[at + 1 : at + 2]
        if not following or _is_option(following[0]):
            return 1, True
        return 2, _native(following[0])

    def changed(
        self, changes: Mapping[str, Any], folder: Path
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Write the file with other values to a folder; return the command and more variables.

        The value `UNSET` takes a key away. InputError if a key can be given nowhere, or the file
        cannot be changed; OSError if it cannot be written.
        """
        words, env, in_file = list(self.words), {}, {}
        file = self.file
        for changed, value in changes.items():
            key = self.name(changed)
            kind, _, name = key.rpartition(":")
            if kind == "env":
                env[name] = "" if value == UNSET else str(value).lower()
                continue
            now = Settings(self.command, tuple(words), self.cwd, self.env)
            at = now._at(key)
            if at is not None:
                count = now._word(at)[0]
                words[at : at + count] = self._spelled(key, value, words[at])
            elif file is not None:
                if value != UNSET or self.get(key) is not None:
                    in_file[key] = None if value == UNSET else value
            elif self.command.option:
                words += self._spelled(key, value)
            elif value != UNSET:
                raise InputError(f"{key} is a key of a file, and the command names none")
        if in_file and file is not None:
            folder.mkdir(parents=True, exist_ok=True)
            written = folder.resolve() / file[1].name
            write_text(written, changed_text(file[1], in_file, may_add=True))
            words = renamed(words, self.cwd, file[1], written)
        return tuple(words), env

    def _spelled(self, key: str, value: Any, today: str = "") -> list[str]:
        option, truth = self.command.option, self.command.truth
        name = today.partition("=")[0]
        if name:
            option = name + ("={value}" if "=" in today else " {value}")
        if value == UNSET or (value is False and truth == "bare"):
            return []
        if value is True and truth in ("bare", "negated"):
            return [self._option(key)]
        if value is False and truth == "negated":
            return [self._option(key, no=True)]
        if " {value}" in option:
            return [option.replace(" {value}", "").replace("{key}", key), str(value)]
        return [option.replace("{key}", key).replace("{value}", str(value))]


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _constant(node.left), _constant(node.right)
        return left * right if type(left) is int and type(right) is int else None
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
        return node.value
    return None


def _same(name: str, other: str) -> bool:
    # Return True if two options are one: most parsers take - and _ for the same.
    return name.replace("_", "-") == other.replace("_", "-")


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[\d.]+(e-?\d+)?", word)


def _native(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_function(
    wrapper: Wrapper, words: Sequence[str], keys: Sequence[str], path: Sequence[Path], cwd: Path
) -> dict[str, Any]:
    """Return the values that the user's function gives some keys, by an interpreter of its own.

    InputError if the command does not name the function, or it cannot be called.
    """
    named = _named(wrapper, words)
    module, function = named[wrapper.module][1], named[wrapper.function][1]
    question = {
        "search": [name.format(module=module) for name in wrapper.search],
        "function": function,
        "keys": list(keys),
        "path": [str(folder) for folder in path],
    }
    reply, why = query_interpreter(
        ["-c", _READ], question, "joulefront-given ", cwd, without_secrets(os.environ)
    )
    if reply is None:
        raise InputError(f"{function} of {module} cannot be read: {why or 'no answer'}")
    return reply


def query_interpreter(
    program: Sequence[str],
    question: Mapping[str, Any],
    mark: str,
    cwd: Path,
    environment: Mapping[str, str],
) -> tuple[dict[str, Any] | None, str]:
    """Return the reply of a Python program on a line behind `mark`, or None and the reason.

    It gets the question as JSON on standard input; the reason is the last line of its errors.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", *program],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            timeout=_LIMIT_S,
            check=False,
            env=environment,
        )
    except OSError as error:
        return None, str(error)
    except subprocess.TimeoutExpired:
        return None, f"it did not answer within {_LIMIT_S:.0f} s"
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(mark):
            return dict(json.loads(line.removeprefix(mark))), ""
    return None, next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")


def _named(wrapper: Wrapper, words: Sequence[str]) -> dict[str, tuple[int, str]]:
    named = {}
    for option in (wrapper.module, wrapper.function):
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name == option and (equals or at + 1 < len(words)):
                named[option] = (at if equals else at + 1, value if equals else words[at + 1])
    if len(named) < 2 or not named[wrapper.function][1].isidentifier():
        raise InputError(f"the command must name {wrapper.module} and {wrapper.function}")
    return named


def wrapped(
    wrapper: Wrapper, settings: Mapping[str, Any], words: Sequence[str], folder: Path
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Write the module to a folder; return the command that names it, and PYTHONPATH."""
    changed, named = list(words), _named(wrapper, words)
    (at, module), (_, function) = named[wrapper.module], named[wrapper.function]
    changed[at] = f"{wrapper.module}={MODULE}" if "=" in words[at] else MODULE
    template = resources.files("tuner.workload.scripts.frameworks") / "function_config.txt"
    text = template.read_text(encoding="utf-8").format(
        function=function,
        search=[name.format(module=module) for name in wrapper.search],
        settings={key: None if value == UNSET else value for key, value in settings.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{MODULE}.py", text)
    return tuple(changed), {"PYTHONPATH": str(folder.resolve())}
