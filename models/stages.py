"""How the blocks of a model are cut into pipeline stages, and which stages are alike.

A stage is its number of blocks, whether it embeds and whether it makes the logits. Stages that are
equal in all three cost the same, so the models compute each kind once and weigh it by how often it
stands in the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search_spaces.errors import InputError

__all__ = ["Stages", "cut"]


@dataclass(frozen=True)
class Stages:
    """Kinds of stage; arrays of shape (kinds,).

    Attributes:
        blocks: transformer blocks.
        embeds, heads: 1 where the stage holds the embedding, or makes the logits; else 0.
        count: how many stages are of the kind.
        first: the number of the kind's first stage; under 1F1B it keeps the most micro-batches.
        kind: each stage's kind, shape (stages,).
    """

    blocks: np.ndarray
    embeds: np.ndarray
    heads: np.ndarray
    count: np.ndarray
    first: np.ndarray
    kind: np.ndarray

    def each(self) -> Stages:
        """The same stages, every one a kind of its own (each may run at its own clock)."""
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
    """Cut `layers` blocks into `stages` stages.

    The embedding and the head count as a block each, all stages get equally many, and what is left
    over goes to the last ones, as partitions by parameters come out.

    Args:
        layers: blocks of the model.
        stages: pipeline degree.
        given: blocks of each stage where they are known.

    Raises:
        InputError: `given` does not name every stage or does not sum to `layers`.
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
        what = (here, i == 0, i == stages - 1)
        if what not in kinds:
            kinds[what] = len(kinds)
            first.append(i)
        kind.append(kinds[what])
    number = np.array(kind)
    return Stages(
        blocks=np.array([what[0] for what in kinds], dtype=float),
        embeds=np.array([what[1] for what in kinds], dtype=float),
        heads=np.array([what[2] for what in kinds], dtype=float),
        count=np.bincount(number).astype(float),
        first=np.array(first, dtype=float),
        kind=number,
    )
