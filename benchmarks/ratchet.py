"""Stored maxima of the size figures: a figure may only fall.

`size.toml` holds in `[maxima]` what was measured when it was last tightened, and in `[granted]`
what an issue allows on top: `"lines.workload" = { by = 400, issue = 25 }`. A figure above the sum
fails the everyday tests. `python -m benchmarks.size --tighten` lowers the maxima to what is
measured; it never raises one. A change that needs more adds a line to `[granted]` by hand, to be
reviewed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("size.toml")


def read(path: Path = STORED) -> dict[str, Any]:
    """Return the stored maxima and grants.

    Raises:
        ValueError: a grant names no issue, or a figure that has no maximum.
    """
    stored = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, grant in stored["granted"].items():
        if set(grant) != {"by", "issue"} or grant["by"] <= 0:
            raise ValueError(f"granted.{name} needs a positive `by` and an `issue`")
        if name not in stored["maxima"]:
            raise ValueError(f"granted.{name} is not a figure of [maxima]")
    return stored


def excesses(measured: Mapping[str, int], stored: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each figure above its maximum, or that has none."""
    sentences = []
    for name, value in measured.items():
        most = stored["maxima"].get(name)
        if most is None:
            sentences.append(f"{name} is {value} and has no maximum in {STORED.name}")
            continue
        grant = stored["granted"].get(name, {"by": 0})
        if value > most + grant["by"]:
            allowed = f"{most}" + (f" and {grant['by']} granted" if grant["by"] else "")
            sentences.append(f"{name} rose to {value}; allowed are {allowed}")
    return sentences


def fallen(measured: Mapping[str, int], stored: Mapping[str, Any]) -> dict[str, int]:
    """Return the figures below their maximum, or whose part of the code is gone."""
    maxima = stored["maxima"]
    return {name: measured.get(name, 0) for name in maxima if measured.get(name, 0) < maxima[name]}


def tightened(measured: Mapping[str, int], stored: Mapping[str, Any]) -> str:
    """Return the text of `size.toml` with each maximum lowered to what is measured."""
    low = fallen(measured, stored)
    maxima = {name: low.get(name, most) for name, most in stored["maxima"].items()}
    lines = [
        "# Maxima of `python -m benchmarks.size`; --tighten lowers them (benchmarks/ratchet.py).",
        "",
    ]
    lines += [
        "[maxima]",
        *(f'"{name}" = {most}' for name, most in maxima.items() if name in measured),
    ]
    lines += ["", "# What an issue allows on top.", "[granted]"]
    lines += [
        f'"{name}" = {{ by = {grant["by"]}, issue = {grant["issue"]} }}'
        for name, grant in stored["granted"].items()
    ]
    return "\n".join(lines) + "\n"
