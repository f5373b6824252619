"""Driver of a framework: one TOML file with the places of its knobs.

`docs/adding-a-framework.md` explains each key. A driver is data: its conditions are those of
declared knobs (`tuner.search_spaces.knob_declarations`), and a key or a table that is not listed
here is refused. What it makes run, by variables, imports and calls, is said by
`tuner.workload.scripts.user_code`.
"""

from __future__ import annotations

import operator as op
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from tuner.search_spaces.data_files import read_toml
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.fields import plain_text, shown_word, whole_number
from tuner.search_spaces.job import PARTITIONS, Program
from tuner.search_spaces.knob_declarations import Knob, check_condition
from tuner.search_spaces.knobs import KNOBS
from tuner.workload.hook import merge
from tuner.workload.scripts.frameworks.settings import (
    FACTS,
    TEMPLATE,
    UNSET,
    Case,
    Command,
    Fact,
    FrameworkSigns,
    KnobKeys,
    Renamed,
    Rule,
    Wrapper,
)
from tuner.workload.scripts.user_code import FileStart, can_run_code, of_knobs, setting

#: What a route may set: the launch knobs and what follows from them.
ROUTED = (*(name for name, knob in KNOBS.items() if knob.kind == "launch"), "gradient_accumulation")
#: What a number may be multiplied with, and what a text in braces stands for.
NAMES = (*ROUTED, "sequence_length", "world_size")
#: What may be said of its program.
PROGRAM = tuple(item.name for item in fields(Program) if item.default is False)
_COMPARED = {">=": op.ge, "<=": op.le, "==": op.eq, "<": op.lt, ">": op.gt}
_VERSION = re.compile(r"(>=|<=|==|<|>)\s*(\d+(?:\.\d+)*)")
_RELEASE = re.compile(r"\d+(?:\.\d+)*")
Made = TypeVar("Made")


class Table:
    """Table of a parsed TOML file, named for sentences; InputError for an unknown key."""

    def __init__(self, data: Any, where: str, *keys: str) -> None:
        if not isinstance(data, Mapping):
            raise InputError(f"{where} must be a table")
        for key in data:
            if keys and key not in keys:
                raise UnknownName("key", str(key)[:80], keys, where=f" in {where}")
        self.data, self.where, self.file = data, where, where.rpartition(" of ")[2]

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text; InputError if it is missing without a default, or no text."""
        if key not in self.data and default is not None:
            return default
        value = self.data.get(key)
        if not isinstance(value, str):
            raise InputError(f"{key} in {self.where} must be a text")
        return plain_text(value, f"{key} in {self.where}")

    def choice(self, key: str, legal: tuple[str, ...]) -> str:
        """Return one of some texts, the first by default."""
        value = self.text(key, legal[0])
        if value not in legal:
            raise UnknownName(key, value, legal, where=f" in {self.where}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; a single one may stand alone; empty by default."""
        value = self.data.get(key, [])
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise InputError(f"{key} in {self.where} must be a list of texts")
        return tuple(plain_text(part, f"{key} in {self.where}") for part in parts)

    def value(self, key: str) -> Any:
        """Return a number, text or truth value; None if there is none."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool | int | float | str):
            raise InputError(f"{key} in {self.where} must be a number, a text or a truth value")
        return value

    def values(self, key: str) -> dict[str, Any]:
        """Return a table of numbers, texts and truth values; empty by default."""
        part = self.part(key)
        return {name: part.value(name) for name in part.data}

    def made(self, kind: type[Made], /, **given: Any) -> Made:
        """Make a dataclass of this table by the types of its fields, but for the given values."""
        values = dict(given)
        for item in fields(kind):  # type: ignore[arg-type]
            if item.name in values:
                continue
            if item.type == "str":
                default = None if item.default is MISSING else str(item.default)
                values[item.name] = self.text(item.name, default)
            elif item.type == "tuple[str, ...]":
                values[item.name] = self.texts(item.name) or item.default
            else:
                value = self.value(item.name)
                values[item.name] = value is True if item.type == "bool" else value
        return kind(**values)

    def part(self, key: str, *keys: str) -> Table:
        """Return a table inside this one; empty by default."""
        return Table(self.data.get(key, {}), f"[{key}] of {self.file}", *keys)

    def parts(self, key: str, *keys: str) -> list[Table]:
        """Return the tables of a list; empty by default."""
        value = self.data.get(key, [])
        if not isinstance(value, list):
            raise InputError(f"{key} in {self.where} must be a list of tables, [[{key}]]")
        return [Table(item, f"[[{key}]] of {self.file}", *keys) for item in value]


@dataclass(frozen=True)
class Driver:
    """Driver of one framework in a range of versions; each part is explained at its class.

    Attributes:
        package: distribution with the version, such as "torchtitan"; "" for none.
        divide: degrees by which the ranks are divided; data_parallel is the rest.
        defaults: values of keys of declared knobs where they are not given.
        facts: what is trained, as its keys state it.
        sizes: keys of a model's sizes, by their name in a config.json, if no key names a model.
        uncounted: sentences on keys whose effect is known and not counted, by key.
        harmless: keys that look like memory and take none.
        renamed: keys that had other names in earlier releases.
        program: what the program does (`Program`), as True or the key that sets it.
        sources: files in which its keys are named, below the folder that it is imported from.
        quiet, quiet_env: settings and variables of a probe, which writes and evaluates nothing.
    """

    name: str
    table: Mapping[str, Any] = field(hash=False, compare=False, repr=False)
    what: str
    package: str
    versions: str
    recognised: FrameworkSigns
    command: Command
    knobs: Mapping[str, KnobKeys] = field(hash=False)
    declared: Mapping[str, Knob] = field(hash=False)
    defaults: Mapping[str, Any] = field(hash=False)
    divide: tuple[str, ...]
    facts: Mapping[str, Fact] = field(hash=False)
    program: Mapping[str, bool | str] = field(hash=False)
    partition: str  # what pipeline stages have equal shares of, as `Program.partition`
    rules: tuple[Rule, ...]
    quiet: Mapping[str, Any] = field(hash=False)
    quiet_env: Mapping[str, str] = field(hash=False)
    sources: tuple[str, ...]
    sizes: Mapping[str, str] = field(hash=False)
    uncounted: Mapping[str, str] = field(hash=False)
    harmless: tuple[str, ...]
    renamed: tuple[Renamed, ...]
    wrapper: Wrapper | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that it may write, each once, variables included."""
        routed = [key for route in self.knobs.values() for key in route.keys]
        declared = [knob.how.removeprefix("framework:") for knob in self.declared.values()]
        return tuple(dict.fromkeys([*routed, *declared, *self.quiet]))

    @property
    def other_names(self) -> dict[str, tuple[str, ...]]:
        """Earlier names of keys, by key."""
        return {row.key: row.was for row in self.renamed}

    @property
    def read_keys(self) -> tuple[str, ...]:
        """Every key that is read and never written, each once."""
        facts = [key for fact in self.facts.values() for key in fact.keys]
        cases = [k for fact in self.facts.values() for case in fact.cases for k in case.when]
        named = [*facts, *cases, *self.sizes.values(), *self.uncounted]
        earlier = [name for names in self.other_names.values() for name in names]
        return tuple(dict.fromkeys([*named, *earlier]))


_TOP = (
    *("framework", "what", "package", "versions", "recognise", "command", "knobs", "declared"),
    *("world", "facts", "program", "rules", "probe", "keys", "wrapper", "sizes"),
    *("uncounted", "harmless", "renamed"),
)
_WITH = ("imports", "mentions", "options", "file", "lacks")
_RULE = ("why", "require", "divide", "of", "default")


def read_driver(data: Any, where: str) -> Driver:
    """Make a driver of a parsed TOML file; InputError if a key is unknown, missing or mistyped."""
    table = Table(data, where, *_TOP)
    name = table.text("framework")
    signs = table.part("recognise", "modules", "scripts", "launchers", *_WITH)
    recognised = signs.made(FrameworkSigns)
    if not (recognised.modules or recognised.scripts or recognised.launchers or recognised.imports):
        raise InputError(f"[recognise] of {where} must have modules, scripts, launchers or imports")
    knobs = table.part("knobs", *ROUTED)
    parts = ("key", "default", "times", "over", "levels", "needs", "when")
    routes = {key: _route(key, knobs.part(key, *parts)) for key in knobs.data}
    declared = {
        key: _declared(key, item, where) for key, item in table.part("declared").data.items()
    }
    probe = table.part("probe", "set", "env")
    world = table.part("world", "divide").texts("divide")
    for degree in world:
        if degree not in routes:
            raise InputError(
                f"divide in [world] of {where} names {degree!r}, which is not one of its knobs"
            )
    facts, sizes, uncounted = (table.part(key) for key in ("facts", "sizes", "uncounted"))
    versions = table.text("versions", "")
    if versions and not all(_VERSION.fullmatch(part.strip()) for part in versions.split(",")):
        raise InputError(f"versions in {where} must be like '>=0.2,<0.3', not {versions!r}")
    for variable in probe.values("env"):
        if re.fullmatch(r"(LD|PYTHON)\w*|DYLD_\w*|PATH|BASH_ENV|ENV", variable):
            raise InputError(f"{variable} in [probe.env] of {where} would start code of its own")
    wrapper = table.part("wrapper", "module", "function", "search")
    program = table.part("program", "partition", *PROGRAM)
    return table.made(
        Driver,
        name=name,
        table=data,
        what=table.text("what", ""),
        package=table.text("package", ""),
        versions=versions,
        recognised=recognised,
        command=_command(table.part("command", "option", "truth", "file", "python")),
        knobs=routes,
        declared=declared,
        defaults=_defaults(table.part("declared")),
        divide=world,
        facts={key: _fact(key, facts) for key in facts.data},
        sizes={key: sizes.text(key) for key in sizes.data},
        uncounted={key: uncounted.text(key) for key in uncounted.data},
        harmless=table.texts("harmless"),
        renamed=_renamed(table.parts("renamed", "key", "was", "since")),
        program=_program(program),
        partition=program.choice("partition", PARTITIONS),
        rules=tuple(_rule(item) for item in table.parts("rules", *_RULE)),
        quiet=probe.values("set"),
        quiet_env={key: str(value) for key, value in probe.values("env").items()},
        sources=table.texts("keys"),
        wrapper=wrapper.made(Wrapper) if wrapper.data else None,
    )


def _renamed(tables: list[Table]) -> tuple[Renamed, ...]:
    rows = tuple(table.made(Renamed) for table in tables)
    names = [name for row in rows for name in (row.key, *row.was)]
    for row, table in zip(rows, tables, strict=True):
        if not row.was:
            raise InputError(f"was in {table.where} must name what {row.key} was called")
        if row.since and not _RELEASE.fullmatch(row.since):
            raise InputError(f"since in {table.where} must be like '0.12', not {row.since!r}")
        for name in (row.key, *row.was):
            if names.count(name) > 1:
                raise InputError(f"{name} stands twice in {table.where}; a key has one row")
    return rows


def _fact(name: str, table: Table) -> Fact:
    if name not in FACTS:
        raise UnknownName("fact", name, tuple(FACTS), where=f" in {table.where}")
    if not isinstance(table.data[name], Mapping):
        return Fact(table.texts(name))
    where, names = f"[facts.{name}] of {table.file}", ("keys", "default", "cases", "unlimited")
    part = Table(table.data[name], where, *names)
    cases, default = part.data.get("cases", []), part.value("default")
    if default is not None and type(default) is not int:
        raise InputError(f"default in {part.where} must be an integer")
    if not isinstance(cases, list):
        raise InputError(f"cases in {part.where} must be a list of [value, {{ key = value }}]")
    every = tuple(_case(name, each, part) for each in cases)
    return Fact(part.texts("keys"), default, every, part.value("unlimited") is True)


def _case(fact: str, item: Any, table: Table) -> Case:
    if not (isinstance(item, list) and len(item) == 2 and isinstance(item[1], Mapping)):
        raise InputError(f"each case in {table.where} must be [value, {{ key = value }}]")
    value, when = item
    if value not in FACTS[fact]:
        raise UnknownName("value", str(value)[:80], FACTS[fact], where=f" in {table.where}")
    held = {key: _or_unset(_alternatives(each, table.where)) for key, each in when.items()}
    return Case(value, held)


def _program(table: Table) -> dict[str, bool | str]:
    facts = {name: value for name, value in table.data.items() if name != "partition"}
    for name, value in facts.items():
        if value is not True and not (isinstance(value, str) and value):
            raise InputError(f"{name} in {table.where} must be true or the key that sets it")
    return facts


def _command(table: Table) -> Command:
    option = table.text("option", "")
    if option and not ("{key}" in option and "{value}" in option):
        raise InputError(f"option in {table.where} must hold {{key}} and {{value}}")
    return table.made(Command, truth=table.choice("truth", ("word", "bare", "negated")))


def _route(name: str, table: Table) -> KnobKeys:
    times, over, when = table.texts("times"), table.texts("over"), table.text("when", "")
    if when:
        check_condition(when, ROUTED, table.where)
    for other in (*times, *over):
        if other not in NAMES:
            raise UnknownName("knob", other, NAMES, where=f" in {table.where}")
    key, levels = table.text("key", ""), table.part("levels")
    if bool(key) == bool(levels.data):
        raise InputError(f"[knobs.{name}] of {table.file} must have either a key or levels")
    made = {}
    for text in levels.data:
        number = whole_number(text)
        level = text if number is None else number
        standard = KNOBS.get(name)
        made[standard.check(level) if standard else level] = {
            setting: _alternatives(value, f"{setting} in {levels.where}")
            for setting, value in levels.part(text).data.items()
        }
    named = {key for level in made.values() for key, parts in level.items() if UNSET in parts}
    made = {
        level: {key: parts if key in named else _or_unset(parts) for key, parts in wanted.items()}
        for level, wanted in made.items()
    }
    needs = table.part("needs")
    held = {k: _or_unset(_alternatives(value, needs.where)) for k, value in needs.data.items()}
    return KnobKeys(key, table.value("default"), times, made, held, over, when)


def _or_unset(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    # Add `UNSET` if false is one: a missing key is false unless another level names it.
    return (*parts, UNSET) if any(part is False for part in parts) else parts


def _alternatives(value: Any, where: str) -> tuple[Any, ...]:
    parts = tuple(value) if isinstance(value, list) else (value,)
    if not parts or not all(isinstance(part, bool | int | float | str) for part in parts):
        raise InputError(f"{where} must be a number, a text, a truth value or a list of them")
    for part in parts:
        for other in TEMPLATE.findall(part) if isinstance(part, str) else ():
            if other not in NAMES:
                raise UnknownName("knob", other, NAMES, where=f" in {where}")
    return parts


def _declared(name: str, item: Any, where: str) -> Knob:
    table = Table(
        item, f"[declared.{name}] of {where}", "key", "values", "kind", "default", "when", "what",
        "changes_training",
    )  # fmt: skip
    key, values = table.text("key"), table.data.get("values", [])
    if not isinstance(values, list):
        raise InputError(f"values in {table.where} must be a list")
    return Knob(
        name,
        tuple(values),
        kind=table.text("kind", ""),
        how=key if key.startswith("env:") else f"framework:{key}",
        when=table.text("when", ""),
        what=table.text("what", ""),
        changes_training=table.data.get("changes_training", False),
        optional=True,
    )


def _defaults(declared: Table) -> dict[str, Any]:
    parts = [Table(item, declared.where) for item in declared.data.values()]
    return {part.text("key"): part.value("default") for part in parts if "default" in part.data}


def _rule(table: Table) -> Rule:
    rule = table.made(Rule)
    if bool(rule.require) == bool(rule.divide) or bool(rule.divide) != bool(rule.of):
        raise InputError(f"{table.where} must have either require, or divide and of")
    if rule.require:
        check_condition(rule.require, ROUTED, table.where)
    for name in rule.divide:
        if name not in NAMES:
            raise UnknownName("knob", name, NAMES, where=f" in {table.where}")
    return rule


def load_drivers(file: Path | Traversable) -> tuple[Driver, ...]:
    """Load the driver of a TOML file, or one for each of its `[[variants]]`.

    What it is `launched_by`, another driver, states the facts that it leaves open.

    InputError if it cannot be read, or is no driver.
    """
    data = read_toml(file, f"framework {str(file)!r}")
    if "launched_by" in data:
        launcher = _launcher_facts(Table(data, file.name).text("launched_by"), file.name)
        data = merge({"facts": launcher}, {k: v for k, v in data.items() if k != "launched_by"})
    variants = Table(data, file.name).parts("variants") or [Table({}, file.name)]
    common = {key: value for key, value in data.items() if key != "variants"}
    return tuple(read_driver(merge(common, variant.data), file.name) for variant in variants)


def _launcher_facts(name: str, where: str) -> dict[str, Any]:
    files = {file.name.removesuffix(".toml"): file for file in _shipped_files()}
    if name not in files:
        raise UnknownName("launched_by", name, tuple(files), where=f" in {where}")
    return dict(read_toml(files[name], f"framework {name!r}").get("facts", {}))


def _shipped_files() -> list[Traversable]:
    folder = resources.files("tuner.workload.scripts.frameworks")
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return sorted(files, key=lambda file: file.name)


@lru_cache(maxsize=1)
def shipped_drivers() -> tuple[Driver, ...]:
    """Return the drivers that joulefront includes, by file name."""
    return tuple(driver for file in _shipped_files() for driver in load_drivers(file))


def check_version(versions: str, version: str) -> bool:
    """Return True if a version such as "0.2.2" is in a range such as ">=0.2,<0.3"."""
    have = _numbers(version)
    for sign, text in _VERSION.findall(versions):
        limit = _numbers(text)
        width = max(len(have), len(limit))
        pair = [[*side, *([0] * (width - len(side)))] for side in (have, limit)]
        if not _COMPARED[sign](*pair):
            return False
    return True


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in found[0].split(".")] if found else []


def starts_of(driver: Driver) -> Iterator[FileStart]:
    """Yield the writes, imports and settings of a user's own driver."""
    if any(driver.table == own.table for own in shipped_drivers()):
        return
    owner = shown_word(driver.name)
    written = re.sub(r"\{key\}|\{value\}", "", driver.command.option)
    if written.strip("-+= "):
        yield FileStart(f"{owner}: options as {shown_word(driver.command.option)}", True)
    for name, value in driver.quiet_env.items():
        yield setting(owner, name, name, [value])
    for key, value in driver.quiet.items():
        yield setting(owner, key, key, [value])
    if driver.wrapper is not None:
        modules = ", ".join(map(shown_word, driver.wrapper.search))
        yield FileStart(f"{owner}: imports {modules}, and calls a function of it", True)
    for knob, route in driver.knobs.items():
        if route.key:
            key = route.key.removeprefix("env:")
            runs_code = can_run_code(key, ["VALUE"])
            yield FileStart(f"{owner}, {knob}: {shown_word(key)}=VALUE", runs_code)
        for key, values in chain.from_iterable(level.items() for level in route.levels.values()):
            yield setting(f"{owner}, {knob}", key, key, values)
    yield from of_knobs(tuple(driver.declared.values()))
