"""Integers of the program that are named as a batch: parsed arguments and globals of the script.

A name alone is no evidence. One whose value is seen as a dimension of the inputs is, where no
loader hands out samples that can be counted.
"""

import argparse
import re
import sys
from typing import Any

#: Names of a batch.
BATCH = re.compile(
    r"((per_device_|device_|local_|micro_|train_)*(micro_?)?batch(_?size)?|bsz?|samples_per_gpu"
    r"|ims_per_batch)",
    re.I,
)
_parsed: list[argparse.Namespace] = []


def watch_arguments() -> None:
    """Note what the program's parsers return."""
    _parsed.clear()
    plain = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        told = plain(self, *args, **kwargs)
        _parsed.append(told[0])
        return told

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def batches() -> dict[str, int]:
    """Return the integers that are named as a batch, by name."""
    main = vars(sys.modules["__main__"])
    every = [*main.items(), *(pair for told in _parsed for pair in vars(told).items())]
    return {
        name: value
        for name, value in every
        if type(value) is int and value > 0 and BATCH.fullmatch(name)
    }
