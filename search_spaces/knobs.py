"""Knobs of the search: name, kind and legal values of each.

A *launch* knob needs a new process to change; a *live* knob changes while the job runs. A recorded
table may have knobs that are not listed here; its own toml gives their kind. So may a job, whose
user declares them (`tuner.search_spaces.declared`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tuner.search_spaces.errors import InvalidValue, UnknownName

__all__ = ["KNOBS", "StandardKnob", "Value", "knob_named", "parse_value"]

#: Value of a knob. A tuple has one value per pipeline stage.
Value = int | float | str | tuple[int, ...]


#: Upper limit of every degree, batch, clock and limit, so that products of them fit a float.
LARGEST = 10**9


@dataclass(frozen=True)
class StandardKnob:
    """Dimension of the search that joulefront knows.

    Attributes:
        name: the field's standard term, with its unit, if any.
        kind: "launch" (needs a new process) or "live" (changes while the job runs).
        scale: distance between values: "log2" (degrees, batches), "linear" (clocks, watts) or
            "category" (no order).
        default: the value if a configuration does not give one; None for a live knob, which is
            left to the device, and for the global batch, which is the job's.
        choices: the legal values of a category; empty for numbers.
        minimum: the least legal number; None for a category.
        changes_training: a value other than the default changes what is learnt.
        what: description for the user.
    """

    name: str
    kind: Literal["launch", "live"]
    scale: Literal["log2", "linear", "category"]
    default: Value | None
    what: str
    choices: tuple[Value, ...] = ()
    minimum: int | None = None
    changes_training: bool = False

    def check(self, value: object) -> Value:
        """Return `value` if it is legal.

        Raises:
            InvalidValue: it is not legal; the error has the legal range.
        """
        if self.choices:
            # By type too: 1.0 and True equal 1, but a degree or a stage is an integer.
            if not any(value == choice and type(value) is type(choice) for choice in self.choices):
                raise InvalidValue(self.name, value, "one of " + ", ".join(map(str, self.choices)))
            return value  # type: ignore[return-value]
        if isinstance(value, tuple | list):
            if self.kind == "live" and value and all(type(part) is int for part in value):
                for part in value:
                    self.check(part)
                return tuple(value)
            raise InvalidValue(self.name, value, f"an integer of at least {self.minimum}")
        if not isinstance(value, int) or isinstance(value, bool) or value < (self.minimum or 0):
            raise InvalidValue(self.name, value, f"an integer of at least {self.minimum}")
        if value > LARGEST:
            raise InvalidValue(self.name, "larger", f"an integer of at most {LARGEST:g}")
        return value


KNOBS: Mapping[str, StandardKnob] = {
    knob.name: knob
    for knob in (
        StandardKnob(
            "data_parallel", "launch", "log2", 1, "replicas that split the batch", minimum=1
        ),
        StandardKnob(
            "tensor_parallel", "launch", "log2", 1, "ranks that split each layer", minimum=1
        ),
        StandardKnob(
            "pipeline_parallel", "launch", "log2", 1, "stages that split the depth", minimum=1
        ),
        StandardKnob(
            "pipeline_schedule",
            "launch",
            "category",
            "1f1b",
            "order of a pipeline's passes: one forward and one backward in turn, the same over "
            "virtual stages, or with gradients of weights in what was idle time",
            choices=("1f1b", "interleaved", "zero_bubble"),
        ),
        StandardKnob(
            "virtual_stages",
            "launch",
            "log2",
            1,
            "parts of the depth that each rank of a pipeline holds",
            minimum=1,
        ),
        StandardKnob(
            "sequence_parallel", "launch", "log2", 1, "ranks that split the sequence", minimum=1
        ),
        StandardKnob(
            "sequence_method",
            "launch",
            "category",
            "ulysses",
            "how ranks of one sequence attend: by exchanging heads, or with all keys and values",
            choices=("ulysses", "all_gather"),
        ),
        StandardKnob(
            "expert_parallel", "launch", "log2", 1, "ranks that split the experts", minimum=1
        ),
        # Its default is the job's own; for another the number of steps must be known.
        StandardKnob(
            "global_batch", "launch", "log2", None, "sequences an optimizer step", minimum=1
        ),
        StandardKnob(
            "micro_batch", "launch", "log2", 1, "sequences a rank takes at once", minimum=1
        ),
        StandardKnob(
            "zero_stage",
            "launch",
            "category",
            0,
            "ZeRO: what is sharded over the replicas",
            choices=(0, 1, 2, 3),
        ),
        StandardKnob(
            "sharding",
            "launch",
            "category",
            "deepspeed",
            "who shards over the replicas: ZeRO, or torch's FSDP2, which frees gathered parameters "
            "after the forward pass or not",
            choices=("deepspeed", "fsdp2", "fsdp2_no_reshard"),
        ),
        StandardKnob(
            "hsdp_replicas",
            "launch",
            "log2",
            1,
            "FSDP2: groups that each hold a whole copy of the training state",
            minimum=1,
        ),
        StandardKnob(
            "optimizer_offload",
            "launch",
            "category",
            "none",
            "where the optimizer's states live",
            choices=("none", "cpu", "async", "nvme"),
        ),
        StandardKnob(
            "parameter_offload",
            "launch",
            "category",
            "none",
            "where the parameters live between uses",
            choices=("none", "cpu", "nvme"),
        ),
        StandardKnob(
            "activation_checkpointing",
            "launch",
            "category",
            "none",
            "which blocks, or by operator what of each block, are recomputed instead of kept",
            choices=("none", "selective", "every_8", "every_4", "every_2", "full"),
        ),
        StandardKnob(
            "activation_offload",
            "launch",
            "category",
            "none",
            "where kept activations live",
            choices=("none", "sync", "async"),
        ),
        StandardKnob(
            "compilation",
            "launch",
            "category",
            "none",
            "what torch.compile compiles: nothing, each block, or the whole model",
            choices=("none", "regional", "full"),
        ),
        StandardKnob(
            "fp8",
            "launch",
            "category",
            "none",
            "matrix products of the blocks in FP8, with a scale of each tensor, of each row, or of "
            "each 32 values (MX)",
            choices=("none", "tensorwise", "rowwise", "mx"),
            changes_training=True,
        ),
        StandardKnob(
            "clock_MHz", "live", "linear", None, "SM clock, one for all or one a stage", minimum=1
        ),
        StandardKnob(
            "memory_clock_MHz", "live", "linear", None, "memory clock of each GPU", minimum=1
        ),
        StandardKnob(
            "power_limit_W",
            "live",
            "linear",
            None,
            "power limit of each GPU or package",
            minimum=1,
        ),
    )
}


def knob_named(name: str) -> StandardKnob:
    """Return the standard knob of this name.

    Raises:
        UnknownName: there is none; the error lists the existing ones.
    """
    try:
        return KNOBS[name]
    except KeyError:
        raise UnknownName("knob", name, KNOBS) from None


def parse_value(name: str, text: str) -> Value:
    """Read a knob's value from the command line ("2", "cpu", "1200", "1200,1410").

    Raises:
        UnknownName: there is no such knob.
        InvalidValue: the text is not a legal value.
    """
    knob = knob_named(name)
    value: object = text
    try:
        parts = [int(part) for part in text.split(",")]
        value = parts[0] if len(parts) == 1 else tuple(parts)
    except ValueError:
        pass
    return knob.check(value)
