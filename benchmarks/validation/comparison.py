"""Published tables and models, the result of a comparison, and the layout of its table."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import ROOT, Figure

DATA = ROOT / "benchmarks" / "data"


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table with a head."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def models() -> dict[str, dict[str, Any]]:
    """Return the configurations of the models that published tables name."""
    return tomllib.loads((DATA / "models.toml").read_text(encoding="utf-8"))


def gpt2(
    hidden: int, layers: int, heads: int, *, positions: int, vocabulary: int
) -> dict[str, Any]:
    """Return a model as a Hugging Face configuration names its sizes."""
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": vocabulary,
    }


@dataclass(frozen=True)
class Comparison:
    """One comparison with something published.

    Attributes:
        name: short name.
        title: what was compared.
        lines: its table and its sentences.
        figures: its figures, for scripts.
        summary: its result and what that is worth, one sentence.
    """

    name: str
    title: str
    lines: Sequence[str]
    figures: Sequence[Figure] = field(default_factory=list)
    summary: str = ""


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def quantiles(errors: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Median, 90th percentile and worst of absolute errors."""
    size = np.abs(np.asarray(errors, dtype=float))
    return float(np.median(size)), float(np.quantile(size, 0.9)), float(size.max())


def median_and_worst(name: str, errors: Sequence[float] | np.ndarray) -> list[Figure]:
    """Return the figures of absolute errors, given as shares; "*" in the name is which it is."""
    median, _, worst = quantiles(errors)
    return [
        Figure(name.replace("*", "median"), 100 * median, "%"),
        Figure(name.replace("*", "worst"), 100 * worst, "%"),
    ]
