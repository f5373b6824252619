"""Keys of a framework's files that describe the training: the table [recipe] of a driver.

The knobs of a driver are read as ever; this table has what no knob states: the model, precision,
adapters, quantization, the optimizer, and keys whose memory is named because no formula counts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: What a case may say, with its legal values.
CASES: Mapping[str, tuple[str, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "pure_bf16": ("true",),
    "lora": ("true", "false"),
    "targets": ("attention", "all-linear"),
    "quantization": ("nf4", "nf4-double"),
    "optimizer": ("adamw", "adamw_32bit", "adamw_8bit"),
    "activation_checkpointing": ("none", "selective", "full"),
    "model_type": ("llama", "qwen3", "mixtral", "gpt2"),
    "tied": ("true",),
}


@dataclass(frozen=True)
class Case:
    """Value of one fact where each key has one of some values."""

    of: str
    value: str
    when: Mapping[str, tuple[Any, ...]] = field(hash=False)


@dataclass(frozen=True)
class RecipeKeys:
    """Table [recipe] of a driver; of several keys for one thing the first that is given counts.

    Attributes:
        file: keys of which a file that is given alone has each.
        lacks: keys of which such a file has none.
        model, length, rank, targets, deepspeed, fsdp: keys of the model's name, of the tokens of a
            sequence, of the rank and targets of adapters, of DeepSpeed's configuration and of FSDP.
        share: keys of the sequences of a rank in one optimizer step.
        length_default, rank_default: what the framework takes without them; 0 if it has none.
        cases: of each fact the first that holds counts; without any it is the framework's default.
        notes: sentences on keys whose effect is known and not counted, by key.
        harmless: keys that look like memory and take none.
        sizes: keys of a model's sizes, by their name in a config.json, where no key names a model.
    """

    file: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    rank: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    deepspeed: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()
    share: tuple[str, ...] = ()
    length_default: int = 0
    rank_default: int = 0
    cases: tuple[Case, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict, hash=False)
    harmless: tuple[str, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def names(self) -> frozenset[str]:
        """Every key that is read, named or harmless."""
        listed = (*self.model, *self.length, *self.rank, *self.targets, *self.deepspeed, *self.fsdp)
        read = [key for case in self.cases for key in case.when]
        given = (*self.notes, *self.harmless, *self.sizes.values())
        return frozenset((*listed, *self.share, *read, *given))
