"""Sizes of a job's model, as far as they decide what can run.

What reads them of a Hugging Face configuration (`model_reading`) an installation may leave out:
the model is then not known, and nothing is refused, predicted or chosen by its sizes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any

from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.plugins import shipped_module

#: Module that reads a model's sizes; an extra.
READER = "tuner.search_spaces.model_reading"


@dataclass(frozen=True)
class Sizes:
    """Sizes that a configuration gives, completed by the defaults of its family.

    Attributes:
        dense, expert: width of a dense MLP and of an expert; equal without experts.
        experts, experts_per_token: experts per layer, and those that a token visits; 0 if dense.
        positions: the longest sequence the configuration states; None if it states none.
        tied: True if the output projection shares the embedding table.
        gated: True if the MLP multiplies by a gate (SwiGLU and its kin).
        learned_positions: True if positions are a table of parameters.
        qk_norm: True if queries and keys are normed.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dense: int
    expert: int
    experts: int
    experts_per_token: int
    positions: int | None
    tied: bool
    gated: bool
    learned_positions: bool
    qk_norm: bool

    @property
    def intermediate(self) -> int:
        """Width of a dense MLP, or of one expert if there are experts."""
        return self.expert


#: Sizes that are not known, with no limit on layers.
NO_SIZES: dict[str, Any] = {item.name: 0 for item in fields(Sizes)} | {
    **{"model_type": "unknown", "layers": sys.maxsize, "positions": None},
    **dict.fromkeys(("tied", "gated", "learned_positions", "qk_norm"), False),
}
UNKNOWN = Sizes(**NO_SIZES)


def reader_of(job: TrainingJob) -> Any:
    """Return what reads the sizes of a job's model; None if it is not known or not installed."""
    return shipped_module(READER) if job.model else None


def sizes_of(job: TrainingJob) -> Sizes:
    """Return the sizes of a job's model; `UNKNOWN`, which no rule refuses, without a reader."""
    reader = reader_of(job)
    sizes: Sizes = UNKNOWN if reader is None else reader.facts_of(job)
    return sizes
