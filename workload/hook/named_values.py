"""Integers that the program is told by its parsed arguments.

A name alone is no evidence. One whose value is seen as a dimension of the inputs is, where no
loader hands out samples that can be counted, and one that another launch proves.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

#: Names of a batch, and of an accumulation.
BATCH = re.compile(
    r"((per_device_|device_|local_|micro_|train_)*(micro_?)?batch(_?size)?|bsz?|samples_per_gpu"
    r"|ims_per_batch)",
    re.I,
)
ACCUMULATION = re.compile(r"((gradient|grad)_?)?(accum\w*|acc_steps)|update_freq", re.I)
#: What parsers returned, each with the options that set its values as they were parsed.
_parsed: list[tuple[Any, dict[str, dict[str, Any]]]] = []


def watch_arguments() -> None:
    """Note what the program's parsers return."""
    _parsed.clear()
    plain = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        told = plain(self, *args, **kwargs)
        values = getattr(told[0], "__dict__", {})
        options = {
            action.dest: {"options": list(action.option_strings), "value": values[action.dest]}
            for action in self._actions
            if type(values.get(action.dest)) is int and action.nargs in (None, "?")
        }
        _parsed.append((told[0], options))
        return told

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def watch_click(click: Any) -> None:
    """Note what click (and typer, which is made of it) hands to the program's function."""
    plain = click.Command.invoke

    def invoke(self: Any, context: Any) -> Any:
        options = {
            each.name: {"options": list(each.opts), "value": context.params[each.name]}
            for each in self.params
            if type(context.params.get(each.name)) is int
        }
        for each in options.values():
            each["options"] = [word for word in each["options"] if word.startswith("-")]
        _parsed.append((context.params, options))
        return plain(self, context)

    click.Command.invoke = invoke


def is_parsed(holder: Any) -> bool:
    """Return True if a parser returned this object, or it holds the same values."""
    return any(holder is told or holder is getattr(told, "__dict__", 0) for told, _ in _parsed)


def arguments() -> dict[str, dict[str, Any]]:
    """Return the integers that the program is told, by name: `options` that set it, `value`."""
    return {name: option for _, options in _parsed for name, option in options.items()}


def _positive(every: Any) -> Iterator[tuple[str, int]]:
    return ((name, value) for name, value in every if type(value) is int and value > 0)


def batches() -> dict[str, int]:
    """Return the integers that are named as a batch, by name."""
    told: list[Mapping[str, Any]] = [vars(sys.modules["__main__"])]
    told += [{name: each["value"] for name, each in options.items()} for _, options in _parsed]
    every = [pair for each in told for pair in each.items()]
    return {name: value for name, value in _positive(every) if BATCH.fullmatch(name)}
