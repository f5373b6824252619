"""The figures of every benchmark, printed in one form for people and for scripts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

#: The repository.
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: lower case, words joined by underscores.
        value: the number.
        unit: "s", "kJ", "ratio", "count", ...
    """

    name: str
    value: float
    unit: str


def arguments(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has, whose help is a module's text."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser


def publish(figures: Sequence[Figure], json_file: Path | None) -> None:
    """Print the figures as the last lines, and write them where asked."""
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    print(flush=True)
    for figure in figures:
        print(f"figure {figure.name} {figure.value:.6g} {figure.unit}", flush=True)
