"""The program's own integers that may carry its batch: parsed arguments and named variables.

An argument's name alone is no evidence. One whose value is seen as a dimension of the inputs is,
where no loader hands out samples that can be counted, and one that another launch proves.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

#: Names of a batch, and of an accumulation.
BATCH = re.compile(
    r"((per_device_|device_|local_|micro_|train_)*(micro_?)?batch(_?size)?|bsz?|samples_per_gpu"
    r"|ims_per_batch)",
    re.I,
)
ACCUMULATION = re.compile(r"((gradient|grad)_?)?(accum\w*|acc_steps)|update_freq", re.I)
#: Environment variable in which a process that parses arguments tells them to those it starts.
PROGRAM = "JOULEFRONT_PROGRAM"
#: Integers of each parsed command by name: the options that set it, and its value.
_parsed: list[dict[str, dict[str, Any]]] = []


def watch_arguments(*, inherited: bool = False) -> None:
    """Record the integers that the program's parsers return.

    Args:
        inherited: tell them, with the words of this process, to the processes that it starts.
    """
    _parsed.clear()
    plain = argparse.ArgumentParser.parse_known_args  # `state` imports this module

    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        namespaces = plain(self, *args, **kwargs)
        values = getattr(namespaces[0], "__dict__", {})
        _parsed.append(
            {
                action.dest: {"options": list(action.option_strings), "value": values[action.dest]}
                for action in self._actions
                if type(values.get(action.dest)) is int and action.nargs in (None, "?")
            }
        )
        if inherited:
            program = {"words": sys.orig_argv, "arguments": arguments(), "named": batches()}
            os.environ[PROGRAM] = json.dumps(program)
        return namespaces

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def arguments() -> dict[str, dict[str, Any]]:
    """Return the integer arguments of the program by name: `options` that set it, `value`."""
    return {name: option for options in _parsed for name, option in options.items()}


def batches() -> dict[str, int]:
    """Return the integers that are named as a batch, by name."""
    namespaces: list[Mapping[str, Any]] = [vars(sys.modules["__main__"])]
    namespaces += [{name: each["value"] for name, each in options.items()} for options in _parsed]
    return {
        name: value
        for each in namespaces
        for name, value in each.items()
        if type(value) is int and value > 0 and BATCH.fullmatch(name)
    }
