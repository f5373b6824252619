"""Training as stated by a command's files and flags, read as text; nothing is started."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.program import LoRA, Program
from tuner.search_spaces.typed_json import whole_number
from tuner.workload.scripts.frameworks.bound_driver import Bound, BoundDriver
from tuner.workload.scripts.frameworks.parts import UNSET
from tuner.workload.scripts.frameworks.recipe_keys import RecipeKeys
from tuner.workload.scripts.frameworks.settings import Settings
from tuner.workload.scripts.recipe_model import sizes_of_model
from tuner.workload.scripts.recipe_sharding import Sharding, sharding_of
from tuner.workload.scripts.repeated_keys import repeated_keys

#: Names of keys that change what memory holds. One that is given and not read is named.
MEMORY = re.compile(
    r"quant|[48]_?bit|liger|offload|fsdp|deepspeed|optim|pack|lora|dora|peft|adapter|galore|apollo"
    r"|badam|adam_mini|freez|frozen|^beta$|max_prompt|max_completion|fp8|expert|parallel|checkpointing|cross_entropy|chunk|(?<!re)vision"
    r"|image|video|audio|tower|^rl$|dpo|kto|grpo|orpo|reward|ref_model|vllm|compile|unsloth|qat"
    r"|kernel|mixture_of|relora|llama_pro|^stage$|process_index|shard|converters|batch_size|training\.dtype|_cp_|cp_size|tp_size"
)
#: Keys that look so and are of a launcher, a writer or an evaluation.
HARMLESS = re.compile(r"eval|save|hub|wandb|report|push|dataset|logging|^fsdp_config|^deepspeed$")
#: Values that only the framework or a shell fills in.
UNFILLED = re.compile(r"\$\{|\$\w|\{\{")
#: Linear layers of an MLP, by their names in transformers.
_MLP = re.compile(r"gate|up_proj|down_proj|fc\d|mlp|dense_h|dense_4h|w[123]\b|all.linear")
#: Scripts of TRL and the like whose loss is another than the next token's.
_OTHER_LOSS = re.compile(r"(?:run_)?(?:dpo|kto|grpo|orpo|ppo|rloo|cpo|gkd|reward\w*|online_dpo)")
#: What trains something else than the next token, with another model beside it.
_STAGES = ("sft", "pt", "pretrain")


@dataclass(frozen=True)
class Recipe:
    """Training as a command or its file states it.

    Attributes:
        model: name or folder of the model; "" if the command gives its sizes.
        config: the model's configuration by such sizes; None if it names a model.
        why_no_model: why its sizes are no model's, a sentence; "" if they are, or it names one.
        global_batch: sequences of an optimizer step, where ranks are known.
        ranks: that the command starts; 0 if it does not say.
        knobs: launch knobs, as far as they are stated.
        on_deepspeed: True if DeepSpeed shards its states.
        assumed: sentences on what is not stated, or counted otherwise.
        doubts: sentences on what changes memory and is not counted.
    """

    source: str
    framework: str
    model: str
    micro_batch: int
    accumulation: int
    sequence_length: int
    precision: str
    ranks: int
    knobs: Mapping[str, Value] = field(hash=False)
    on_deepspeed: bool = False
    lora: LoRA | None = None
    program: Program = field(default_factory=Program)
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    why_no_model: str = ""
    assumed: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def read_recipe(
    bound: Bound,
    words: Sequence[str],
    cwd: Path,
    *,
    ranks: int,
    devices: int,
    env: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Recipe:
    """Read the training of a framework's command; InputError where it is incomplete.

    Args:
        words: that each rank runs.
        ranks: number that the command names; 0 if it names none, and `devices` are meant.
        env: variables that the launcher sets.
    """
    keys = bound.driver.recipe
    if keys is None:
        raise InputError(
            f"files and flags of {bound.title} are not read for a prediction; describe what it "
            "trains in a job file (docs/planning.md)"
        )
    settings = Settings(bound.driver.command, tuple(words), cwd, {**os.environ, **(env or {})})
    driven = BoundDriver(bound, settings, ranks or devices)
    return _Reader(driven, keys, ranks, tuple(notes)).recipe


class _Reader:
    """One reading, with its assumptions and doubts."""

    def __init__(
        self, driven: BoundDriver, keys: RecipeKeys, ranks: int, notes: tuple[str, ...]
    ) -> None:
        self.driven, self.keys, self.ranks = driven, keys, ranks
        self.settings = driven.settings
        self.assumed, self.doubts = [*notes], list[str]()

    @property
    def recipe(self) -> Recipe:
        model = self.text(self.keys.model)
        config, why_no_model = _model_of_sizes(self.keys.sizes, self)
        if not model and not self.keys.sizes:
            raise InputError(
                f"{self.source} names no model; give {self.keys.model[0]}, the model's name or "
                "folder"
            )
        sharding = self.sharding
        micro, times = self._batches(sharding)
        precision = self.precision(sharding)
        lora = self._lora()
        knobs = self._knobs(sharding)
        self._name_the_rest()
        return Recipe(
            source=self.source,
            framework=self.driven.bound.driver.name,
            model=model,
            micro_batch=micro,
            accumulation=times,
            sequence_length=self._length(),
            precision=precision,
            ranks=self.ranks,
            knobs={**knobs, "micro_batch": micro},
            on_deepspeed=sharding.owner == "deepspeed",
            lora=lora,
            config=config,
            why_no_model=why_no_model,
            program=self._program(sharding, precision, lora),
            assumed=tuple(dict.fromkeys(self.assumed)),
            doubts=tuple(dict.fromkeys(self.doubts)),
        )

    # ---- single values

    @cached_property
    def source(self) -> str:
        """The file, or else the framework's command, for sentences."""
        file = self.settings.file
        return file[1].name if file else f"the command of {self.driven.bound.driver.name}"

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The tables of the file; empty without one."""
        from tuner.workload.scripts.key_files import parsed_file

        file = self.settings.file
        data = parsed_file(file[1]) if file else {}
        if not isinstance(data, Mapping):
            raise InputError(f"{self.source} holds no keys")
        return data

    def get(self, key: str) -> Any:
        """Return the value of a key; InputError for one that only the framework fills in."""
        value = self.settings.get(key)
        if isinstance(value, str) and UNFILLED.search(value):
            raise InputError(
                f"{key} in {self.source} is {value!r}, which is filled in only when it is "
                f"started; write the value itself, in the file or in the command"
            )
        number = whole_number(value) if isinstance(value, str) else None
        return value if number is None else number

    def first(self, keys: Sequence[str]) -> tuple[str, Any]:
        """Return the first of some keys that is given, with its value."""
        return next(((k, v) for k in keys if (v := self.get(k)) is not None), ("", None))

    def text(self, keys: Sequence[str]) -> str:
        """Return the first of some keys as a text; "" if none is given."""
        key, value = self.first(keys)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{key} in {self.source} is {value!r}, which is not a name")
        return value or ""

    def number(self, keys: Sequence[str]) -> int:
        """Return the first of some keys as a number of at least 1; 0 if none is given."""
        key, value = self.first(keys)
        if value is None:
            return 0
        if type(value) is not int or value < 1:
            raise InputError(f"{key} in {self.source} is {value!r}; a number of at least 1 is read")
        return value

    def case(self, of: str) -> str:
        """Return the value of a fact by its cases; "" if none holds.

        A key of it whose value no case knows is doubted.
        """
        if found := self.holding(of):
            return found
        cases = [case for case in self.keys.cases if case.of == of]
        for key in dict.fromkeys(key for case in cases for key in case.when):
            value = self.get(key)
            if not key.startswith("env:") and value not in (None, False, "", "none", "no"):
                self._doubt(key, value)
        return ""

    def holding(self, of: str) -> str:
        """Return the value of the first case of a fact that holds; "" if none does."""
        for case in self.keys.cases:
            held = (_is(self.get(key), any_of) for key, any_of in case.when.items())
            if case.of == of and all(held):
                return case.value
        return ""

    def _doubt(self, key: str, value: Any) -> None:
        shown = str(value) if isinstance(value, bool | int | float | str) else "set"
        self.doubts.append(f"{key} = {shown[:60]} of {self.source} is not counted")

    # ---- what is trained

    @cached_property
    def sharding(self) -> Sharding:
        """Sharding of the states."""
        found = sharding_of(self.keys, self.get, self.settings, self.source)
        self.assumed += found.assumed
        self.doubts += found.doubts
        return found

    def _batches(self, sharding: Sharding) -> tuple[int, int]:
        micro, times = self.driven.batches
        for name in ("micro_batch", "gradient_accumulation"):
            route = self.driven.bound.driver.knobs.get(name)
            given = self.get(route.key) if route else None
            own, theirs = given, sharding.batches.get(name)
            if isinstance(own, str) and own == "auto":
                raise InputError(
                    f"{route.key if route else name} in {self.source} is 'auto', which is found "
                    "only by starting it; write the number that you mean to run"
                )
            if own is not None and (type(own) is not int or own < 1):
                raise InputError(
                    f"{route.key if route else name} in {self.source} is {own!r}; a number of at "
                    "least 1 is read"
                )
            if own is None and theirs:
                micro, times = (theirs, times) if name == "micro_batch" else (micro, theirs)
            elif own is not None:
                if theirs and theirs != own:
                    raise InputError(
                        f"{route.key if route else name} is {own} in {self.source} and {theirs} in "
                        f'{sharding.file}; make them equal, or write "auto" in the latter'
                    )
                micro, times = (own, times) if name == "micro_batch" else (micro, own)
        share = self.number(self.keys.share)
        if share and self.get(self.driven.bound.driver.knobs["gradient_accumulation"].key) is None:
            if micro and share % micro:
                raise InputError(
                    f"{self.keys.share[0]} {share} of {self.source} is not a multiple of its "
                    f"micro-batch {micro}; make it one"
                )
            times = share // micro if micro else times
        given = self.get(self.driven.bound.driver.knobs["micro_batch"].key)
        if micro and given is None and not sharding.batches.get("micro_batch"):
            self.assumed.append(f"a micro-batch of {micro}, the framework's default")
        if not micro:
            key = self.driven.bound.driver.knobs["micro_batch"].key
            raise InputError(f"{self.source} does not say its micro-batch; give {key}")
        return micro, times or 1

    def _length(self) -> int:
        length = self.number(self.keys.length)
        if length:
            return length
        if not self.keys.length_default:
            raise InputError(
                f"{self.source} does not say the tokens of a sequence; give {self.keys.length[0]}"
            )
        self.assumed.append(
            f"{self.keys.length_default:,} tokens a sequence, the default of {self.keys.length[0]}"
        )
        return self.keys.length_default

    def precision(self, sharding: Sharding) -> str:
        """Return the precision of the arithmetic."""
        found = self.case("precision")
        if sharding.precision:
            if found and found != sharding.precision:
                raise InputError(
                    f"{self.source} trains in {found} and {sharding.file} in {sharding.precision}; "
                    "make them equal"
                )
            return sharding.precision
        if not found:
            self.assumed.append("fp32, as no key says otherwise")
        return found or "fp32"

    def _lora(self) -> LoRA | None:
        with_adapters, quantization = self.case("lora"), self.case("quantization")
        if with_adapters != "true":
            if quantization:
                self._doubt("quantization", f"{quantization} without adapters")
            return None
        rank = self.number(self.keys.rank)
        if not rank:
            if not self.keys.rank_default:
                raise InputError(
                    f"{self.source} trains adapters without {self.keys.rank[0]}; give their rank"
                )
            rank = self.keys.rank_default
            self.assumed.append(f"adapters of rank {rank}, the default of {self.keys.rank[0]}")
        return LoRA(rank, self._targets(), quantization or "none")

    def _targets(self) -> str:
        if found := self.holding("targets"):
            return found
        given = self.first(self.keys.targets)[1]
        names = given if isinstance(given, list) else str(given or "").split(",")
        names = [str(name).strip() for name in names if str(name).strip()]
        if not names:
            self.assumed.append("adapters on attention, as no targets are named")
            return "attention"
        wide = any(_MLP.search(name) for name in names)
        kinds = {re.sub(r"^.*?(\w+?)(_proj)?$", r"\1", name) for name in names}
        whole = {"q", "k", "v", "o"} | ({"gate", "up", "down"} if wide else set())
        if kinds != whole:
            modules = "every linear layer" if wide else "attention"
            self.assumed.append(f"adapters on {modules} in place of {', '.join(names)[:80]}")
        return "all-linear" if wide else "attention"

    def _program(self, sharding: Sharding, precision: str, lora: LoRA | None) -> Program:
        optimizer = self.case("optimizer") or "adamw"
        bare = not sharding.owner and lora is None and precision == "bf16"
        pure = bare and self.holding("pure_bf16") == "true"
        if pure:
            self.assumed.append("weights are loaded in bf16, without fp32 copies")
        return replace(self.driven.program, optimizer=optimizer, pure_bf16=pure)  # type: ignore[arg-type]

    def _knobs(self, sharding: Sharding) -> dict[str, Value]:
        today = dict(self.driven.today)
        stated = self.holding("activation_checkpointing")
        if stated:
            today["activation_checkpointing"] = stated
        elif why := self.driven.against.get("activation_checkpointing"):
            self.doubts.append(f"activation checkpointing of {self.source} is not read: {why}")
        route = self.driven.bound.driver.knobs.get("data_parallel")
        given = route is not None and self.get(route.key) not in (None, -1)
        kept = {name: v for name, v in today.items() if given or name != "data_parallel"}
        kept.pop("compilation", None)
        if not sharding.owner:  # the framework's own keys may say it
            return {**sharding.knobs, **kept}
        return {**kept, **sharding.knobs}

    # ---- what else it says

    def _name_the_rest(self) -> None:
        for key, note in self.keys.notes.items():
            if self.get(key) not in (None, False, "false"):
                self.assumed.append(note)
        script = next(iter(self.settings.words), "")
        if _OTHER_LOSS.fullmatch(Path(script).stem) and script.endswith(".py"):
            self.doubts.append(f"{script} trains by another loss, with another model beside it")
        read = {*self.keys.names, *self.driven.bound.driver.keys}
        read |= {*self.driven.bound.driver.facts.values()}
        spelt = {key.replace("-", "_") for key in read}
        for key, value in self._given():
            if key in read or key in spelt or HARMLESS.search(key) or not MEMORY.search(key):
                continue
            if value in (None, False, "", 0, "none", "false") or value == [] or value == {}:
                continue
            if key == "stage" and value in _STAGES:
                continue
            self._doubt(key, value)
        if (file := self.settings.file) and file[1].suffix != ".toml":
            for key, value in repeated_keys(file[1]):
                self.assumed.append(
                    f"{key} stands twice in {self.source}; the last, {value}, counts"
                )

    def _given(self) -> Iterator[tuple[str, Any]]:
        if self.source.endswith(".toml"):
            yield from _flat(self.data)
        else:
            yield from ((str(key), value) for key, value in self.data.items())
        for word in self.settings.words:
            name = word.partition("=")[0]
            if name.startswith("--") and len(name) > 2:
                key = name[2:].replace("-", "_") if "." not in name else name[2:]
                if key not in self.data:
                    yield key, self.settings.get(key)


def _model_of_sizes(
    keys: Mapping[str, str], reader: _Reader
) -> tuple[Mapping[str, Any] | None, str]:
    """Return the model that sizes describe, and why they describe none."""
    try:
        return (sizes_of_model(keys, reader) if keys else None), ""
    except InputError as error:
        return None, str(error)


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested tables with dots."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _is(value: Any, any_of: tuple[Any, ...]) -> bool:
    if value is None:
        return UNSET in any_of
    return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in any_of)
