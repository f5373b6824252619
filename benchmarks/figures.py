"""The figures of every benchmark, printed in one form for people and for scripts."""

from __future__ import annotations

import argparse
import json
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

#: The repository.
ROOT = Path(__file__).resolve().parent.parent
#: What each figure is.
TABLE = ROOT / "benchmarks" / "data" / "figures.toml"


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


@cache
def explained() -> Mapping[str, Mapping[str, str]]:
    """Return what each figure is, by benchmark and name; "*" stands for any part of a name."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def arguments(text: str | None, benchmark: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has.

    Args:
        text: of the help, which ends with the figures: a module's own.
        benchmark: key of the table of figures.
    """
    each = [
        textwrap.fill(f"{name}: {what}", 100, subsequent_indent="    ", break_on_hyphens=False)
        for name, what in explained()[benchmark].items()
    ]
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=text,
        epilog="\n".join(["figures:", *textwrap.indent("\n".join(each), "  ").splitlines()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser


def publish(figures: Sequence[Figure], json_file: Path | None) -> None:
    """Print the figures as the last lines, and write them where asked.

    Raises:
        SystemExit: a figure is missing in the table of figures; everything is printed before.
    """
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    print(flush=True)
    for figure in figures:
        print(f"figure {figure.name} {figure.value:.6g} {figure.unit}", flush=True)
    known = [name for table in explained().values() for name in table]
    unknown = [
        figure.name
        for figure in figures
        if not any(fnmatchcase(figure.name, name) for name in known)
    ]
    if unknown:
        raise SystemExit(f"{TABLE.name} does not say what these are: {', '.join(unknown)}")
