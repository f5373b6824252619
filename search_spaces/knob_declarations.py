"""Knobs that the user declares: a name, a finite list of values, and how a value is applied.

The search chooses among their values as among those of the standard knobs
(`tuner.search_spaces.knobs`). Nothing is known of them beyond what probes measure: no validity
rule but their own condition, and no analytic model. They belong to the job and are launch knobs,
unless they are declared as live ones.

A condition over other knobs, such as `zero_stage >= 1 and optimizer_offload != "none"`, says when
a declared knob applies. It is parsed by Python's own parser and compiled node by node: names of
knobs, numbers, texts, `true`, `false`, comparisons, `in` with a list, `and`, `or`, `not` and
parentheses. Nothing is evaluated by Python.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import check_keys, find_file, included_names, read_toml
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.fields import check_options, limited, plain_text
from tuner.search_spaces.knobs import (
    KINDS,
    KNOBS,
    SHORT_KINDS,
    SHOWN,
    Value,
    invalid,
    is_log,
    kind_of,
    value_of,
)

#: Longest condition, so that neither the parser nor the walk can be made to recurse without end.
LONGEST = 500


class Values(Protocol):
    """Values of knobs by name, such as a dictionary."""

    def get(self, name: str, /) -> Any:
        """Return a value; None if there is none."""


Condition = Callable[[Values], Any]
_TRUTH = {"true": True, "false": False, "True": True, "False": False}
_NUMBERS = (int, float)
_LISTED = (ast.List, ast.Tuple)


def _ordered(order: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda left, right: (
        isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS) and order(left, right)
    )


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
    ast.Eq: lambda left, right: left is not None and left == right,
    ast.NotEq: lambda left, right: left is None or left != right,
    ast.In: lambda left, right: left is not None and left in right,
    ast.NotIn: lambda left, right: left is None or left not in right,
}
_GRAMMAR = (
    "a condition has names of knobs, numbers, texts in quotes, true, false, comparisons, in [...], "
    "and, or, not and parentheses"
)


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[Condition, frozenset[str]]:
    if not text.strip() or len(text) > LONGEST:
        raise InputError(f"a condition must have 1 to {LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "1and x", which is valid Python
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(f"the condition {text!r} cannot be read: {_GRAMMAR}") from None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return _compiled(tree, text), frozenset(names - _TRUTH.keys())


def _compiled(node: ast.expr, text: str) -> Condition:
    if isinstance(node, ast.BoolOp):
        parts = [_compiled(part, text) for part in node.values]
        every = all if isinstance(node.op, ast.And) else any
        return lambda values: every(part(values) for part in parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        denied = _compiled(node.operand, text)
        return lambda values: not denied(values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number: Any = getattr(node.operand, "value", None)
        if type(number) in _NUMBERS:
            return lambda values: -number
    if isinstance(node, ast.Compare) and not isinstance(node.left, _LISTED):
        rights = zip(node.ops, node.comparators, strict=True)
        if all(
            type(op) in _COMPARISONS
            and isinstance(op, ast.In | ast.NotIn) == isinstance(r, _LISTED)
            for op, r in rights
        ):
            sides = [_compiled(part, text) for part in (node.left, *node.comparators)]
            checks = [_COMPARISONS[type(op)] for op in node.ops]
            pairs = list(zip(checks, sides[:-1], sides[1:], strict=True))
            return lambda values: all(
                check(left(values), right(values)) for check, left, right in pairs
            )
    if isinstance(node, _LISTED):
        elements = [_compiled(part, text) for part in node.elts]
        return lambda values: [element(values) for element in elements]
    if isinstance(node, ast.Name) and node.id not in _TRUTH:
        name = node.id
        return lambda values: values.get(name)
    if isinstance(node, ast.Name) or (
        isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str)
    ):
        constant = _TRUTH[node.id] if isinstance(node, ast.Name) else node.value
        return lambda values: constant
    refused = ast.get_source_segment(text.strip(), node) or text
    raise InputError(f"the condition {text!r} cannot have {refused!r}: {_GRAMMAR}")


def names_in(text: str) -> frozenset[str]:
    """Return the names of the knobs that a condition reads."""
    return _parsed(text)[1]


def check_condition(text: str, allowed: Collection[str], where: str) -> None:
    """Check that a condition can be read and that the knobs it names exist."""
    try:
        names = names_in(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    for name in sorted(names):
        if name not in allowed:
            raise UnknownName("knob", name, allowed, where=f" in {where}")


def holds(text: str, values: Values) -> bool:
    """Return the truth of a condition under these values of knobs.

    A knob without a value equals nothing and has no order, so `x != 1` holds and `x > 1` does not.
    """
    return bool(_parsed(text)[0](values))


#: Setting that marks a launch which learns something else than the baseline, wherever it is shown.
CHANGED, MARK = "training", "changed"
#: Suffixes of configuration files in which a key can be set.
FILE_KINDS = (".json", ".yaml", ".yml", ".toml")

#: Settings of torch that the hook sets in any script (`tuner.workload.scripts.torch_knobs`).
TORCH = (
    *("num_workers", "prefetch_factor", "pin_memory"),
    *("optimizer_kernel", "set_to_none", "cudnn_benchmark", "compile"),
)

#: Names that a command's placeholders and the mark already have.
_RANK = ("world_size", "rank", "local_rank", "node_rank")
_TAKEN = ("gradient_accumulation", "deepspeed_config", *_RANK, CHANGED)
_NAME = re.compile(r"[A-Za-z_]\w{0,63}")
_KEY = re.compile(r"[\w-]+(\.[\w-]+)*")
_FILE = re.compile(r"(?P<file>.+\.(?:json|ya?ml|toml)):(?P<key>[^:]+)")
#: Upper limits of one knob's values and of the combinations of all declared knobs.
MOST_VALUES, MOST_COMBINATIONS = 64, 10_000
_LEGAL_NAME = "a letter, then letters, digits and _, at most 64"


@dataclass(frozen=True)
class Knob:
    """Knob declared by the user.

    Attributes:
        values: the values to choose among, each one word; a flag's are "true" and "false".
        kind: one of `KINDS`, made of the values where empty. Integers that span more than a factor
            of 4 are logarithmic.
        baseline: the value in use today. Where it is not given: the one in the command's
            placeholder, in the environment or in the file; else the first of `values`, or for an
            environment variable or a key of DeepSpeed's configuration that is not set, none.
        how: how a value is applied: "placeholder" (`{name}` in the script's command), "env:NAME",
            "FILE:KEY" (a JSON, YAML or TOML file that the command names, KEY with dots between
            levels), "deepspeed:KEY" (DeepSpeed's configuration), "framework:KEY" (a key of the
            recognised framework), or "hook" (the script reads
            `joulefront_hook.configuration()`). Empty: a placeholder if the command has it, else
            the hook.
        when: condition over other knobs under which it applies (`condition`);
            otherwise it stays at the baseline.
        optional: where the script does not take it, leave it out instead of refusing to start.
        live: it changes while the job runs: between steps, by a function that the script registers
            (`joulefront_hook.live`). Every live setting names its value.
    """

    name: str
    values: tuple[Value, ...]
    kind: str = ""
    baseline: Value | None = None
    how: str = limited(default="")
    when: str = limited(default="")
    changes_training: bool = limited(default=False)
    optional: bool = limited(default=False)
    what: str = limited(default="")
    live: bool = limited(default=False)

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid("the name of a knob", name, _LEGAL_NAME)
        if name in KNOBS or name in _TAKEN:
            raise InputError(f"knob {name!r} already exists; give the declared one another name")
        where = f"of knob {name!r}"
        if isinstance(self.values, str) or not isinstance(self.values, Sequence):
            raise invalid(f"values {where}", self.values, "a list")
        count = len(self.values)
        if not count:
            raise InputError(f"knob {name!r} has no values; give at least one")
        if count > MOST_VALUES:
            raise InputError(
                f"knob {name!r} has {count} values; at most {MOST_VALUES} are searched"
            )
        kind = SHORT_KINDS.get(str(self.kind), str(self.kind)) or kind_of(self.values)
        if kind not in KINDS:
            raise UnknownName(f"kind {where}", str(kind)[:SHOWN], KINDS)
        values = tuple(
            dict.fromkeys(value_of(part, kind, f"value {where}") for part in self.values)
        )
        if kind == "integer" and not self.kind and is_log(values):
            kind = "log-integer"
        if kind == "log-integer" and not all(isinstance(v, int) and v > 0 for v in values):
            raise invalid(f"values {where}", list(values), "integers above 0 (log-integer)")
        if self.baseline is not None:
            baseline = value_of(self.baseline, kind, f"baseline {where}")
            object.__setattr__(self, "baseline", baseline)
        check_options(self, where)
        for field in ("how", "when", "what"):
            plain_text(getattr(self, field), f"{field} {where}")
        _check_how(self.how, where)
        _check_live(self)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "values", values)

    @property
    def scale(self) -> Literal["log2", "linear", "category"]:
        """Distance between values, as of a standard knob (`tuner.search_spaces.knobs`)."""
        if self.kind in ("category", "flag"):
            return "category"
        return "log2" if self.kind == "log-integer" else "linear"

    @property
    def levels(self) -> tuple[Value | None, ...]:
        """The baseline, None if nothing is set today, then the other values."""
        return (self.baseline, *(value for value in self.values if value != self.baseline))

    @property
    def target(self) -> tuple[str, str]:
        """`how` in two parts: ("env", NAME), ("deepspeed", KEY), (FILE, KEY), (WAY, "")."""
        first, colon, rest = self.how.rpartition(":")
        return (first, rest) if colon else (self.how, "")

    def check(self, value: object) -> Value:
        """Return a value as this knob has it; raise InvalidValue if it has none like it."""
        levels = [level for level in self.levels if level is not None]
        try:
            made = value_of(value, self.kind, self.name)
        except InputError:
            made = None
        if made is None or made not in levels:
            raise invalid(self.name, value, "one of " + ", ".join(map(str, levels)))
        return made

    def reads_as(self, read: object, value: Value) -> bool:
        """Return True if the text is a value of the knob, however written: 1e3 and 1000."""
        try:
            return self.check(read) == value
        except InputError:
            return False

    def native(self, value: Value) -> Any:
        """Return a value as Python, JSON, YAML and TOML have it: a flag as a truth value."""
        return value == "true" if self.kind == "flag" else value

    def applies(self, launch: Mapping[str, Value], knobs: Sequence[Knob]) -> bool:
        """Return True if the knob's condition holds in a launch with these declared knobs."""
        if not self.when:
            return True
        values: dict[str, Any] = {}
        for name in names_in(self.when):
            standard = KNOBS.get(name)
            values[name] = launch.get(name, standard.default if standard else None)
        for other in knobs:
            if other.name in values:
                value = values[other.name]
                value = other.baseline if value is None else value
                values[other.name] = None if value is None else other.native(value)
        return holds(self.when, values)

    def to_table(self) -> dict[str, Any]:
        """Return the table `[knobs.NAME]` of a TOML file, without keys at their defaults."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if name != "name" and value is not False and value not in ("", None, ())
        }


def _check_how(how: str, where: str) -> None:
    if how in ("", "placeholder", "hook"):
        return
    first, _, key = how.rpartition(":")
    if first == "env" and re.fullmatch(r"[A-Za-z_]\w*", key):
        return
    if first == "torch" and key in TORCH:
        return
    named = first in ("deepspeed", "framework") or first.endswith(FILE_KINDS)
    if named and _KEY.fullmatch(key):
        return
    raise invalid(
        f"how {where}",
        how,
        "placeholder, hook, env:NAME, deepspeed:KEY, framework:KEY, torch:NAME with NAME "
        f"{' or '.join(TORCH)}, or FILE:KEY with FILE a JSON, YAML or TOML file and KEY like "
        "zero_optimization.stage",
    )


def _check_live(knob: Knob) -> None:
    name = f"knob {knob.name!r}"
    if not knob.live:
        return
    if knob.how not in ("", "hook"):
        raise InputError(
            f"{name} is live, so the script sets it between steps (leave how out); {knob.how} "
            "would need a new launch"
        )
    if knob.changes_training:
        raise InputError(
            f"{name} changes what is learnt, and the steps of one launch learn one thing; leave "
            "live out"
        )


def parse_knob(text: str) -> Knob:
    """Read a declaration of the command line: NAME[:KIND]=VALUE,VALUE,...

    NAME may also be env:NAME, FILE:KEY or deepspeed:KEY; the knob is then named after the
    variable or the last part of the key. live:NAME declares a live knob that the script sets.
    """
    left, equals, right = text.partition("=")
    if not equals:
        raise InputError(
            f"{text[:SHOWN]!r} declares no knob; write NAME=VALUE,VALUE such as "
            "'compile=false,true', 'env:NCCL_ALGO=Ring,Tree' or 'bucket:int=25e6,50e6'"
        )
    kinds = {*KINDS, *SHORT_KINDS}
    head, colon, kind = left.rpartition(":")
    if not colon or kind not in kinds:
        head, kind = left, ""
    live, head = head.startswith("live:"), head.removeprefix("live:")
    name, how = head, ""
    found = _FILE.fullmatch(head)
    if head.startswith(("env:", "deepspeed:", "framework:", "torch:")) or found:
        how = head
        name = re.sub(r"\W", "_", head.rpartition(":")[2].rpartition(".")[2])
    elif ":" in head:
        name, _, kind = head[:SHOWN].partition(":")
        raise UnknownName(f"kind of knob {name!r}", kind, kinds)
    return Knob(name, tuple(right.split(",")) if right else (), kind=kind, how=how, live=live)


def read_knobs(tables: Any, where: str) -> tuple[Knob, ...]:
    """Read the tables `[knobs.NAME]` of a parsed TOML or JSON file."""
    allowed = [item.name for item in fields(Knob) if item.name != "name"]
    if not isinstance(tables, Mapping) or not tables:
        raise InputError(f"[knobs] of {where} must hold a table for each knob, [knobs.NAME]")
    made = []
    for name, table in tables.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid(f"the name of a knob in {where}", name, _LEGAL_NAME)
        if not isinstance(table, Mapping):
            raise InputError(f"knobs.{name} of {where} must be a table, with values = [...]")
        check_keys((str(key)[:SHOWN] for key in table), allowed, f"[knobs.{name}] of {where}")
        if "values" not in table:
            raise InputError(f"knob {name!r} of {where} has no values; give values = [...]")
        made.append(Knob(name, **table))
    return tuple(made)


def check_knobs(knobs: Sequence[Knob]) -> tuple[Knob, ...]:
    """Return declared knobs in an order in which each condition reads only knobs before it.

    Raises InputError for a double name, an unknown or circular condition, or too many combinations.
    """
    by_name: dict[str, Knob] = {}
    for knob in knobs:
        if by_name.setdefault(knob.name, knob) != knob:
            raise InputError(f"knob {knob.name!r} is declared twice")
    # A launch is chosen before its live settings, so no condition reads those.
    levels = [n for n, standard in KNOBS.items() if standard.kind == "launch"]
    levels += [name for name, knob in by_name.items() if not knob.live]
    for knob in by_name.values():
        if knob.when:
            check_condition(knob.when, levels, f"the condition of knob {knob.name!r}")
    ordered: dict[str, Knob] = {}
    left = dict(by_name)
    while left:
        ready = [k for k in left.values() if not (names_in(k.when) if k.when else set()) & {*left}]
        if not ready:
            names = " and ".join(repr(name) for name in left)
            raise InputError(f"the conditions of knobs {names} depend on themselves")
        for knob in ready:
            ordered[knob.name] = left.pop(knob.name)
    combinations = math.prod(len(knob.levels) for knob in ordered.values())
    if combinations > MOST_COMBINATIONS:
        raise InputError(
            f"the declared knobs have {combinations:,} combinations, of which at most "
            f"{MOST_COMBINATIONS:,} can be searched; leave out knobs or values"
        )
    return tuple(ordered.values())


def changed_training(launch: Mapping[str, Value], knobs: Sequence[Knob]) -> tuple[str, ...]:
    """Return the values by which a launch learns something else than the baseline.

    A standard knob learns the same at its default, one of the declared `knobs` at its baseline.
    """
    same = {name: knob.default for name, knob in KNOBS.items() if knob.changes_training}
    same |= {knob.name: knob.baseline for knob in knobs if knob.changes_training}
    return tuple(
        f"{name}={launch[name]}"
        for name, value in same.items()
        if launch.get(name) not in (None, value)
    )


def marked(launch: Mapping[str, Value], knobs: Sequence[Knob]) -> dict[str, Value]:
    """Return the settings of a launch, with the mark if it learns something else."""
    mark = {CHANGED: MARK} if changed_training(launch, knobs) else {}
    return {**launch, **mark}


def fixed(knobs: Sequence[Knob]) -> tuple[Knob, ...]:
    """Return the knobs at their baselines alone, without those that are not set today."""
    return tuple(
        replace(knob, values=(knob.baseline,)) for knob in knobs if knob.baseline is not None
    )


def with_baseline(configuration: Configuration, knobs: Sequence[Knob]) -> Configuration:
    """Return a configuration with the baselines of the declared knobs that it does not give."""
    given = {**configuration.launch, **configuration.live}
    live_names = {*configuration.live, *(knob.name for knob in knobs if knob.live)}
    chosen = {name: value for name, value in given.items() if name not in live_names}
    live = {name: value for name, value in given.items() if name in live_names}
    for knob in knobs:
        half = live if knob.live else chosen
        if knob.name in half:
            half[knob.name] = knob.check(half[knob.name])
        elif knob.baseline is not None and knob.applies(chosen, knobs):
            half[knob.name] = knob.baseline
    return Configuration(Settings(marked(chosen, knobs)), Settings(live))


def declared_words(
    words: Sequence[str], knobs: Sequence[Knob]
) -> tuple[dict[str, Value], list[str]]:
    """Return the values of declared knobs among words such as "attn=sdpa", and the other words."""
    by_name = {knob.name: knob for knob in knobs}
    own = [word for word in words if "=" in word and word.partition("=")[0] in by_name]
    pairs = (word.split("=", 1) for word in own)
    values = {name: by_name[name].check(value) for name, value in pairs}
    return values, [word for word in words if word not in own]


@dataclass(frozen=True)
class KnobPack:
    """Knobs that are declared together, in a TOML file with tables `[knobs.NAME]`."""

    name: str
    knobs: tuple[Knob, ...]
    what: str = ""


def pack_names() -> list[str]:
    """Return the names of the packs that joulefront includes."""
    return included_names("knobs")


def load_pack(name_or_path: str) -> KnobPack:
    """Load a pack by shipped name or by the path of a TOML file."""
    file, name = find_file("knobs", name_or_path, "pack of knobs")
    data = read_toml(file, f"knobs {name_or_path!r}")
    check_keys(data, ("what", "knobs"), f"the knobs {name_or_path!r}")
    knobs = check_knobs(read_knobs(data.get("knobs"), Path(name_or_path).name))
    return KnobPack(name, knobs, str(data.get("what", "")))
