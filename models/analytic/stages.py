"""Partition of a model's blocks into pipeline stages, grouped by kind.

The kind of a stage is its number of blocks, and if it holds the embedding or makes the logits.
Stages of a kind cost the same, so the models compute each kind once and weigh it by its count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.search_spaces.errors import InputError


@dataclass(frozen=True)
class Stages:
    """Kinds of stage; arrays of shape (kinds,)."""

    blocks: np.ndarray
    embeds: np.ndarray
    heads: np.ndarray
    count: np.ndarray
    # number of the kind's first stage; under 1F1B it keeps the most micro-batches.
    first: np.ndarray
    kind: np.ndarray  # each stage's kind, shape (stages,)

    def each(self) -> Stages:
        """Return these stages, each as its own kind (each may run at its own clock)."""
        one = np.arange(len(self.kind))
        return Stages(
            self.blocks[self.kind],
            self.embeds[self.kind],
            self.heads[self.kind],
            np.ones(len(one)),
            one.astype(float),
            one,
        )


def cut(layers: int, stages: int, given: Sequence[int] | None = None) -> Stages:
    """Partition the blocks of a model into stages.

    The embedding and the head count as a block each, all stages get the same number, and the
    remainder goes to the last ones, as partitions by parameters do.
    """
    if given is not None:
        if len(given) != stages or sum(given) != layers:
            raise InputError(
                f"the partition {tuple(given)} must name {stages} stages of {layers} layers in all"
            )
        blocks = list(given)
    elif stages == 1:
        blocks = [layers]
    else:
        least, more = divmod(layers + 2, stages)
        blocks = [least + (i >= stages - more) for i in range(stages)]
        blocks[0] -= 1
        blocks[-1] -= 1
    kinds: dict[tuple[int, bool, bool], int] = {}
    first: list[int] = []
    kind = []
    for i, here in enumerate(blocks):
        stage = (here, i == 0, i == stages - 1)
        if stage not in kinds:
            kinds[stage] = len(kinds)
            first.append(i)
        kind.append(kinds[stage])
    number = np.array(kind)
    return Stages(
        blocks=np.array([stage[0] for stage in kinds], dtype=float),
        embeds=np.array([stage[1] for stage in kinds], dtype=float),
        heads=np.array([stage[2] for stage in kinds], dtype=float),
        count=np.bincount(number).astype(float),
        first=np.array(first, dtype=float),
        kind=number,
    )
