"""Knobs of the search: name, kind and legal values of each.

A *launch* knob needs a new process to change; a *live* knob changes while the job runs. A recorded
table may have knobs that are not listed here; its own toml gives their kind. So may a job, whose
user declares them (`tuner.search_spaces.declared`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tuner.search_spaces.errors import InvalidValue, UnknownName, check_integer

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
        return check_integer(self.name, value, least=self.minimum or 0, most=LARGEST)


def _degree(name: str, what: str, default: int | None = 1) -> StandardKnob:
    return StandardKnob(name, "launch", "log2", default, what, minimum=1)


def _choice(
    name: str, what: str, choices: tuple[Value, ...], changes_training: bool = False
) -> StandardKnob:
    """Return a launch knob without an order, whose first choice is the default."""
    return StandardKnob(
        name, "launch", "category", choices[0], what, choices, changes_training=changes_training
    )


def _live(name: str, what: str) -> StandardKnob:
    return StandardKnob(name, "live", "linear", None, what, minimum=1)


_STANDARD = (
    _degree("data_parallel", "replicas that split the batch"),
    _degree("tensor_parallel", "ranks that split each layer"),
    _degree("pipeline_parallel", "stages that split the depth"),
    _choice(
        "pipeline_schedule",
        "order of a pipeline's passes: one forward and one backward in turn, the same over "
        "virtual stages, or with gradients of weights in what was idle time",
        ("1f1b", "interleaved", "zero_bubble"),
    ),
    _degree("virtual_stages", "parts of the depth that each rank of a pipeline holds"),
    _degree("sequence_parallel", "ranks that split the sequence"),
    _choice(
        "sequence_method",
        "how ranks of one sequence attend: by exchanging heads, or with all keys and values",
        ("ulysses", "all_gather"),
    ),
    _degree("expert_parallel", "ranks that split the experts"),
    # Its default is the job's own; for another the number of steps must be known.
    _degree("global_batch", "sequences an optimizer step", default=None),
    _degree("micro_batch", "sequences a rank takes at once"),
    _choice("zero_stage", "ZeRO: what is sharded over the replicas", (0, 1, 2, 3)),
    _choice(
        "sharding",
        "who shards over the replicas: ZeRO, or torch's FSDP2, which frees gathered parameters "
        "after the forward pass or not",
        ("deepspeed", "fsdp2", "fsdp2_no_reshard"),
    ),
    _degree("hsdp_replicas", "FSDP2: groups that each hold a whole copy of the training state"),
    _choice(
        "optimizer_offload", "where the optimizer's states live", ("none", "cpu", "async", "nvme")
    ),
    _choice("parameter_offload", "where the parameters live between uses", ("none", "cpu", "nvme")),
    _choice(
        "activation_checkpointing",
        "which blocks, or by operator what of each block, are recomputed instead of kept",
        ("none", "selective", "every_8", "every_4", "every_2", "full"),
    ),
    _choice("activation_offload", "where kept activations live", ("none", "sync", "async")),
    _choice(
        "compilation",
        "what torch.compile compiles: nothing, each block, or the whole model",
        ("none", "regional", "full"),
    ),
    _choice(
        "fp8",
        "matrix products of the blocks in FP8, with a scale of each tensor, of each row, or of "
        "each 32 values (MX)",
        ("none", "tensorwise", "rowwise", "mx"),
        changes_training=True,
    ),
    _live("clock_MHz", "SM clock, one for all or one a stage"),
    _live("memory_clock_MHz", "memory clock of each GPU"),
    _live("power_limit_W", "power limit of each GPU or package"),
)
KNOBS: Mapping[str, StandardKnob] = {knob.name: knob for knob in _STANDARD}


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
