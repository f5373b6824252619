"""Copies of JSON, YAML and TOML files in which single keys have other values."""

from __future__ import annotations

import contextlib
import io
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tuner.search_spaces.data_files import parse_toml
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import FILE_KINDS
from tuner.search_spaces.safe_files import read_bytes
from tuner.workload.hook import parse_config

#: No configuration of a training is larger; a larger file is not read.
_MOST_BYTES = 2**20
#: Most values of a YAML file, most of them by aliases, and most tables and lists inside each other.
_MOST_VALUES, _MOST_ALIASED, _MOST_DEPTH = 100_000, 10_000, 64
#: Longest number: PyYAML takes time that grows with the square of its length.
_MOST_DIGITS = 1_000
_NUMBER = re.compile(r"[-+\d._:]+")
#: From this length on, YAML is read by libyaml, which is ten times as fast and takes tabs where
#: PyYAML's own reader, which frameworks use, refuses them.
_LARGE = 2**16
_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring = 2, 3, 3, 80


def shown_text(text: str, most: int = 80) -> str:
    """Return a text of a file for a sentence, shortened and without quotes."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """Return the value of a file for a sentence, shortened."""
    return _SHORT.repr(value)


def read_key(path: Path, key: str) -> Any:
    """Return the value of a key (names with dots); InputError if there is no single value."""
    return value_at(_parsed(read_text(path), path), key, path.name)


def value_at(data: Any, key: str, file: str) -> Any:
    """Return the value of a key in the data of a file; InputError as `read_key`."""
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            raise InputError(
                f"{file} has no key {key}; add it there with the value that you use today"
            )
        data = data[name]
    if not isinstance(data, bool | int | float | str):
        raise InputError(f"{key} of {file} is not a number, a text or a truth value")
    return data


def parsed_file(path: Path) -> Any:
    """Return the data of a JSON, YAML or TOML file; InputError if it cannot be read."""
    return _parsed(read_text(path), path)


def repeated_keys(path: Path) -> list[tuple[str, str]]:
    """Return the keys that a YAML or JSON file gives twice in one table, each with its last value.

    Parsers take the last in silence.
    """
    last: dict[str, str] = {}
    twice: list[str] = []
    try:
        for key, value in _top_level(read_text(path)):
            if key in last:
                twice.append(key)
            last[key] = value
    except (yaml.YAMLError, ValueError):
        return []
    return [(key, last[key]) for key in dict.fromkeys(twice)]


def _top_level(text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of a file's table in their order, each with its value or "a table"."""
    key, depth, is_table = None, 0, False
    for event in _events(text):
        if depth == 0:
            is_table = isinstance(event, yaml.MappingStartEvent)
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            if depth == 1 and is_table and key is None:
                key = str(getattr(event, "value", ""))
            elif depth == 1 and is_table:
                scalar = isinstance(event, yaml.ScalarEvent)
                yield str(key), shown_text(event.value) if scalar else "a table"
                key = None
            depth += isinstance(event, yaml.CollectionStartEvent)


def _events(text: str) -> Iterator[Any]:
    """Yield the events of YAML; ValueError as soon as they would make too much of it."""
    held: list[list[Any]] = []  # open tables and lists: their anchor and number of values
    sizes: dict[str, int] = {}
    values = aliased = 0
    for event in yaml.parse(text, Loader=_FAST):
        size = 0
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in held):
                raise ValueError(f"what *{event.anchor} names holds itself")
            size = sizes.get(event.anchor, 1)
            aliased += size
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor:
                sizes[event.anchor] = 1
            number = event.implicit[0] and len(event.value) > _MOST_DIGITS
            if number and _NUMBER.fullmatch(event.value):
                raise ValueError(f"a number of {len(event.value):,} characters")
        elif isinstance(event, yaml.CollectionStartEvent):
            held.append([event.anchor, 1])
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = held.pop()
            if anchor:
                sizes[anchor] = size
        if size and held:
            held[-1][1] += size
        values += bool(size)
        if values > _MOST_VALUES or aliased > _MOST_ALIASED or len(held) > _MOST_DEPTH:
            raise ValueError(
                f"a configuration has at most {_MOST_VALUES:,} values, {_MOST_ALIASED:,} by "
                f"aliases (*name), and {_MOST_DEPTH} tables or lists inside each other"
            )
        yield event


def changed_text(path: Path, changes: Mapping[str, Any], *, may_add: bool = False) -> str:
    """Return the text of a file with other values of some keys; comments and order stay.

    With `may_add`, keys that the file lacks are added and those whose value is None taken away.
    InputError as `read_key`.
    """
    text = read_text(path)
    before = _parsed(text, path)
    expected = _unshared(before)
    for key, value in changes.items():
        if not may_add:
            read_key(path, key)
        _set(expected, path, key, value)
    if expected == before:
        return text
    if path.suffix == ".json":
        return json.dumps(expected, indent=2) + "\n"
    edit = _edited_toml if path.suffix == ".toml" else _edited_yaml
    # Comments are lost where the editor refuses the file (a key twice) or changes another key, too
    # (one that an alias shares).
    with contextlib.suppress(Exception):
        made = edit(text, path, changes)
        if _parsed(made, path) == expected:
            return made
    if path.suffix == ".toml":
        import tomlkit

        return tomlkit.dumps(expected)
    return str(yaml.safe_dump(expected, sort_keys=False, allow_unicode=True))


def _edited_toml(text: str, path: Path, changes: Mapping[str, Any]) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    for key, value in changes.items():
        _set(document, path, key, value)
    return tomlkit.dumps(document)


def _edited_yaml(text: str, path: Path, changes: Mapping[str, Any]) -> str:
    from ruamel.yaml import YAML

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 2**20  # a long line stays one
    document = editor.load(text)
    for key, value in changes.items():
        # As PyYAML writes it, by which frameworks read YAML 1.1: 'no' and 1.0e-05.
        written = None if value is None else editor.load(yaml.safe_dump(value))
        _set(document, path, key, written)
    made = io.StringIO()
    editor.dump(document, made)
    return made.getvalue()


def _unshared(data: Any) -> Any:
    # A copy without the tables that aliases share.
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    return [_unshared(value) for value in data] if isinstance(data, list) else data


def _set(table: Any, path: Path, key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for name in tables:
        if isinstance(table, dict) and table.get(name) is None:
            table[name] = {}
        table = table[name] if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise InputError(f"{path.name} cannot have the key {key}")
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value


def renamed(words: Sequence[str], cwd: Path, file: Path, written: Path) -> list[str]:
    """Return a command in which `written` stands wherever it names `file`."""
    made = list(words)
    for at, word in enumerate(words):
        before, equals, value = word.rpartition("=")
        if word.endswith(FILE_KINDS) and (cwd / value).resolve() == file.resolve():
            made[at] = f"{before}{equals}{written}"
    return made


def read_text(path: Path) -> str:
    """Return the text of a file; InputError if it cannot be read, or is not a configuration's."""
    if not path.is_file():
        raise InputError(f"{path} is not a file (standard input cannot be read twice)")
    try:
        data = read_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path} is too large for a configuration: it has more than 1 MiB")
    try:
        return data.decode("utf-8-sig")  # editors of Windows begin it with a mark
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _parsed(text: str, path: Path) -> Any:
    try:
        return _data(text, path.suffix)
    except Exception as error:  # PyYAML's errors share no class with those of the others
        problem = " ".join(str(error).split())
        kind = path.suffix[1:].upper() if path.suffix in (".json", ".toml") else "YAML"
        raise InputError(f"{path} is not valid {kind}: {shown_text(problem, 300)}") from error


@lru_cache(maxsize=8)
def _data(text: str, suffix: str) -> Any:
    """Return the data of a text, which is shared: a caller must not change it."""
    if suffix == ".json":
        return json.loads(text)
    if suffix == ".toml":
        return parse_toml(text)
    for _ in _events(text):
        pass
    if len(text) < _LARGE:
        return yaml.safe_load(text)
    loader = _FAST(text)  # as safe, and in C
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


#: An object with one of these is taken for a DeepSpeed configuration.
_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
)
#: No configuration of a training is larger; a larger file is data, and is not read.
_MOST_DEEPSPEED_BYTES = 4 * 2**20


def read_deepspeed(path: Path, *, option: str = "") -> dict[str, Any]:
    """Return the settings in a DeepSpeed configuration file; InputError if it holds none.

    Args:
        option: the option that names the file, for messages.
    """
    named = f"{path} of {option}" if option else str(path)
    settings = _read(path, named)
    _check_types(settings, named)
    return settings


def _read(path: Path, named: str) -> dict[str, Any]:
    try:
        data = read_bytes(path, _MOST_DEEPSPEED_BYTES)
        if len(data) > _MOST_DEEPSPEED_BYTES:
            raise InputError(f"{named} is too large for a DeepSpeed configuration")
        settings = parse_config(data.decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read {named}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{named} is not a valid DeepSpeed configuration: {error}") from error
    if not settings:
        raise InputError(f"{named} holds no setting of DeepSpeed")
    return settings


def _check_types(settings: Mapping[str, Any], named: str) -> None:
    """Raise InputError for a value of another type than DeepSpeed takes."""
    for key, (allowed, is_allowed) in _VALUES.items():
        table, _, name = key.rpartition(".")
        holder: Any = settings
        for part in filter(None, table.split(".")):
            holder = holder.get(part) if isinstance(holder, Mapping) else None
        value = holder.get(name) if isinstance(holder, Mapping) else None
        if value is not None and not is_allowed(value):
            raise InputError(f"{key} is {shown(value)} in {named}; it must be {allowed}")


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_count(value: Any) -> bool:
    return value == "auto" or (type(value) is int and value > 0)


_TABLE = ("an object", _is_table)
#: Values that are read here, by key: what is allowed, and its check. What transformers fills in
#: from its own arguments is "auto" (DeepSpeed 0.19's config-json page, transformers' integration).
_VALUES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_KEYS[:3], ('a whole number of at least 1, or "auto"', _is_count)),
    "zero_optimization": ("an object", lambda value: _is_table(value) or type(value) is bool),
    "zero_optimization.stage": ("0, 1, 2 or 3", lambda value: value in (0, 1, 2, 3)),
    "zero_optimization.offload_optimizer": ('an object, such as {"device": "cpu"}', _is_table),
    "zero_optimization.offload_param": ('an object, such as {"device": "cpu"}', _is_table),
    "optimizer": _TABLE,
    "optimizer.params": _TABLE,
    "scheduler": _TABLE,
    "bf16": _TABLE,
    "fp16": _TABLE,
    "tensor_parallel": _TABLE,
    "sequence_parallel_size": ("a whole number of at least 1", _is_count),
}


def is_deepspeed_file(path: Path) -> bool:
    """Return True if a file holds a DeepSpeed configuration."""
    try:
        return bool({*_read(path, str(path))} & {*_KEYS})
    except InputError:
        return False
