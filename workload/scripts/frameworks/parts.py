"""Parts of a driver: signs of a framework, spelling of its keys, and the purpose of each key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.search_spaces.knobs import Value

#: In a level's text: a knob whose value stands there.
TEMPLATE = re.compile(r"\{(\w+)\}")
#: In a level: the key must not be given at all.
UNSET = "<unset>"
#: Facts of the training that keys may state, each with its legal values; () for a number or a name.
FACTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("steps", "sequence_length", "rank_batch", "lora_rank", "model"), ()),
    "loss": ("next-token",),
    "precision": ("fp32", "bf16", "fp16"),
    "pure_bf16": ("true",),
    "lora": ("true", "false"),
    "lora_targets": ("attention", "all-linear"),
    "lora_text_alone": ("true",),
    "dora": ("true",),
    "quantization": ("nf4", "nf4-double", "int8"),
    "optimizer": ("adamw", "adamw_32bit", "adamw_8bit"),
    "activation_checkpointing": ("none", "selective", "full"),
    "model_type": ("llama", "qwen3", "mixtral", "gpt2"),
    "tied": ("true",),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_version", "fsdp_strategy", "fsdp_reshard"), ()),
    **dict.fromkeys(("fsdp_offload", "fsdp_checkpointing", "launcher_fsdp"), ()),
    **dict.fromkeys(("launcher_deepspeed", "launcher_deepspeed_file", "launcher_zero_stage"), ()),
    **dict.fromkeys(("launcher_optimizer_offload", "launcher_parameter_offload"), ()),
}


@dataclass(frozen=True)
class FrameworkSigns:
    """Signs of a framework in a command; one of the first four is enough.

    Beside these the script must hold each of `mentions`, or one of "A|B", and the command one of
    `options`. A file that is given alone has each key of `file`, or one of "A|B",
    and none of `lacks`.
    """

    modules: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """Spelling of a key.

    Attributes:
        option: in the command, with {key} and {value}: "--{key} {value}", "{key}={value}"; "" if
            the command takes no keys.
        truth: how a truth value is written there: "word" (--key True), "bare" (--key, or nothing)
            or "negated" (--key, or --no-key behind the last dot).
        file: options that name the file with the keys; "first" for the first word that names one.
        python: the script, and the Python files that the command names, assign the keys.
    """

    option: str = ""
    truth: str = "word"
    file: tuple[str, ...] = ()
    python: bool = False


@dataclass(frozen=True)
class Route:
    """Place of one knob: a key that takes its number, or settings for each of its values.

    The number is multiplied with `times` (a batch counted in tokens: sequence_length) and divided
    by `over`. Of a level's list of values the first is written, and each is recognised; {NAME} of a
    launch knob may stand in a text, and `UNSET` takes the key away. Where `when` does not hold, the
    key means something else: it is neither read, so that the knob is at its default, nor set.
    """

    key: str = ""
    default: Any = None
    times: tuple[str, ...] = ()
    levels: Mapping[Value, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    over: tuple[str, ...] = ()
    when: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that it may set, each once."""
        named = [key for settings in self.levels.values() for key in settings]
        return tuple(dict.fromkeys([self.key] * bool(self.key) + named))


@dataclass(frozen=True)
class Renamed:
    """Key that had other names, the latest first; its own is of release `since` and later.

    A key is read by each of its names, and written by the one that is given.
    """

    key: str
    was: tuple[str, ...] = ()
    since: str = ""


@dataclass(frozen=True)
class Case:
    """Value of a fact where each key has one of some values."""

    value: str
    when: Mapping[str, tuple[Any, ...]] = field(hash=False)


@dataclass(frozen=True)
class Fact:
    """Fact of the training (`FACTS`), which keys state and nothing changes.

    The first case that holds counts, else the first of `keys` that is given, else `default`.
    """

    keys: tuple[str, ...] = ()
    default: Any = None
    cases: tuple[Case, ...] = ()


@dataclass(frozen=True)
class Rule:
    """Configurations that the framework refuses.

    The product of the degrees `divide` must divide `of`: a launch knob, "world_size",
    "sequence_length" or a key of the framework; the rule is left out where that is not given.
    """

    why: str
    require: str = ""
    divide: tuple[str, ...] = ()
    of: str = ""
    default: Any = None


@dataclass(frozen=True)
class Wrapper:
    """Framework configured by a function, which a generated module calls; `search` has {module}."""

    module: str
    function: str
    search: tuple[str, ...] = ("{module}",)


def matches(now: Any, any_of: tuple[Any, ...]) -> bool:
    """Return True if the value of a key, None if it is not given, is one of some values."""
    if now is None:
        return UNSET in any_of
    return any(one == now and isinstance(one, bool) == isinstance(now, bool) for one in any_of)
