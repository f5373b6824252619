"""The program's own integers that may carry its batch: parsed arguments and named variables.

An argument's name alone is no evidence. One whose value is seen as a dimension of the inputs is,
where no loader hands out samples that can be counted, and one that another launch proves.
"""

import contextlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import steps

#: Receives the integers of a parsed command by name, as `_parsed` holds them.
Note = Callable[[dict[str, dict[str, Any]]], None]
#: Names of a batch, and of an accumulation.
BATCH = re.compile(
    r"((per_device_|device_|local_|micro_|mini_|train_)*((micro|mini)_?)?batch(_?size)?|bsz?"
    r"|samples_per_gpu|ims_per_batch)",
    re.I,
)
ACCUMULATION = re.compile(r"((gradient|grad)_?)?(accum\w*|acc_steps)|update_freq", re.I)
#: Environment variable in which a process that parses arguments tells them to those it starts.
PROGRAM = "JOULEFRONT_PROGRAM"
#: The hook's own folder, whose functions run whenever the program's are asked.
_HERE = os.path.dirname(os.path.abspath(__file__))
#: Integers of each parsed command by name: the options that set it, and its value.
_parsed: list[dict[str, dict[str, Any]]] = []


def watch_arguments(*, inherited: bool = False) -> None:
    """Record the integers that the program's parsers return.

    Args:
        inherited: tell them, with the words of this process, to the processes that it starts.
    """
    _parsed.clear()

    def note(found: dict[str, dict[str, Any]]) -> None:
        _parsed.append(found)
        if inherited:
            program = {"words": sys.orig_argv, "arguments": arguments(), "named": batches()}
            os.environ[PROGRAM] = json.dumps(program)

    def imported(name: str, module: Any) -> None:
        with contextlib.suppress(Exception):  # another release of it
            _PARSERS[name](module, note)

    steps.ImportHook(_PARSERS, imported)


def _watch_argparse(module: Any, note: Note) -> None:
    @steps.around(module.ArgumentParser, "parse_known_args")
    def parse_known_args(plain: Any, self: Any, *args: Any, **named: Any) -> Any:
        namespaces = plain(self, *args, **named)
        values = getattr(namespaces[0], "__dict__", {})
        note(
            {
                action.dest: {"options": list(action.option_strings), "value": values[action.dest]}
                for action in self._actions
                if type(values.get(action.dest)) is int and action.nargs in (None, "?")
            }
        )
        return namespaces


def _watch_click(module: Any, note: Note) -> None:
    @steps.around(module.Command, "parse_args")
    def parse_args(plain: Any, self: Any, ctx: Any, args: Any) -> Any:  # click's own names
        rest = plain(self, ctx, args)
        values = ctx.params
        options = {each.name: [o for o in each.opts if o.startswith("-")] for each in self.params}
        _note_integers(values, options.get, note)
        return rest


def _watch_absl(module: Any, note: Note) -> None:
    @steps.around(module.FlagValues, "__call__")
    def parse(plain: Any, self: Any, *args: Any, **named: Any) -> Any:
        rest = plain(self, *args, **named)
        values = {name: flag.value for name, flag in self._flags().items()}
        _note_integers(values, lambda name: [f"--{name}"], note)
        return rest


def _watch_fire(module: Any, note: Note) -> None:
    @steps.around(module, "_MakeParseFn")
    def make_parse(plain: Any, fn: Any, *args: Any, **named: Any) -> Any:  # Fire's own name
        parse = plain(fn, *args, **named)

        def parsed(words: Any) -> Any:
            found = parse(words)
            with contextlib.suppress(Exception):  # Fire says what is wrong with the words
                (positional, by_name), *_ = found
                bound = inspect.signature(fn).bind(*positional, **by_name)
                bound.apply_defaults()
                _note_integers(bound.arguments, lambda name: [f"--{name}"], note)
            return found

        return parsed


def _watch_tyro(module: Any, note: Note) -> None:
    @steps.around(module, "callable_with_args")  # tyro calls it for the command and for each part
    def called(
        plain: Any, f: Any, parser: Any, default: Any, typed: Any, *args: Any, **named: Any
    ) -> Any:  # typed: words by name; an argument that is left out has its default
        with contextlib.suppress(Exception):  # another release of it
            values, options = dict[str, Any](), dict[str, list[str]]()
            for each in parser.args:
                name = ".".join(filter(None, (each.intern_prefix, each.field.intern_name)))
                words = typed.get(module._strings.make_field_name([name]))
                given = words[0] if isinstance(words, list) and len(words) == 1 else ""
                values[name] = int(given) if given.isdecimal() else each.field.default
                flags = getattr(each.lowered, "name_or_flags", None) or (each.lowered.name_or_flag,)
                shown = [flag for flag in flags if flag.startswith("-")]
                also = [f"--{flag[2:].replace('-', '_')}" for flag in shown if "-" in flag[2:]]
                options[name] = [*shown, *also]
            _note_integers(values, options.get, note)
        return plain(f, parser, default, typed, *args, **named)


def _watch_hydra(module: Any, note: Note) -> None:
    @steps.around(module.Hydra, "compose_config")
    def compose(plain: Any, *args: Any, **named: Any) -> Any:
        composed = plain(*args, **named)
        with contextlib.suppress(Exception):  # no evidence
            values = dict(_leaves({n: composed[n] for n in composed if n != "hydra"}))
            _note_integers(values, lambda name: [f"{name}="], note)
        return composed


def _watch_jsonargparse(module: Any, note: Note) -> None:
    @steps.around(module.ArgumentParser, "parse_args")
    def parse_args(plain: Any, *args: Any, **named: Any) -> Any:
        parsed = plain(*args, **named)
        with contextlib.suppress(Exception):  # no evidence
            _note_integers(vars(parsed.as_flat()), lambda name: [f"--{name}"], note)
        return parsed


def _leaves(table: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if hasattr(value, "items"):
            yield from _leaves(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def _note_integers(
    values: Mapping[str, Any], options_of: Callable[[str], list[str] | None], note: Note
) -> None:
    with contextlib.suppress(Exception):  # no evidence
        note(
            {
                name: {"options": options_of(name) or [], "value": value}
                for name, value in values.items()
                if type(value) is int
            }
        )


#: Parsers whose integers are recorded, defaults included, by the module that is patched.
_PARSERS: dict[str, Callable[[Any, Note], None]] = {
    "argparse": _watch_argparse,
    "click.core": _watch_click,
    "absl.flags._flagvalues": _watch_absl,
    "fire.core": _watch_fire,
    "hydra._internal.hydra": _watch_hydra,
    "jsonargparse._core": _watch_jsonargparse,
    "tyro._calling": _watch_tyro,
}


def arguments() -> dict[str, dict[str, Any]]:
    """Return the integer arguments of the program by name: `options` that set it, `value`.

    One in a part of the command has a dotted name (`data.batch_size`).
    """
    return {name: option for options in _parsed for name, option in options.items()}


def batches(*, running: bool = False) -> dict[str, int]:
    """Return the integers that are named as a batch, by name.

    Parsed arguments, and the variables of the main module, with the values in its objects and
    tables (`config.batch_size`).

    Args:
        running: those of the program's functions on the stack, too. Only where the process ends
            soon: up to Python 3.12 a frame keeps what it was asked for, tensors included.
    """
    found: dict[str, int] = {}
    for options in _parsed:
        _add_batches(found, {name: each["value"] for name, each in options.items()}, counters=True)
    for names in (
        {**vars(sys.modules["__main__"])},
        *(_running() if running else ()),
    ):
        _add_batches(found, names)
        for holder, value in names.items():
            if not inspect.ismodule(value):
                with contextlib.suppress(Exception):  # an object of the program's own kind
                    held = value if isinstance(value, dict) else vars(value)
                    _add_batches(found, held, f"{holder}.")
    return found


def _add_batches(
    found: dict[str, int], names: Mapping[Any, Any], place: str = "", *, counters: bool = False
) -> None:
    for name, value in names.items():
        # A variable `batch` may count batches, and have the size of anything for a while.
        is_batch = type(name) is str and BATCH.fullmatch(name.rpartition(".")[2]) is not None
        is_number = type(value) is int and value > 0
        if is_batch and is_number and (counters or not name.endswith("batch")):
            found.setdefault(f"{place}{name}", value)


def _running() -> Iterator[Mapping[str, Any]]:
    """Yield the variables of the program's own functions on the stack, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        file, is_main = frame.f_code.co_filename, frame.f_code.co_name == "<module>"
        if not (is_main or file.startswith((_HERE, "<frozen")) or "-packages" in file):
            yield frame.f_locals
        frame = frame.f_back
