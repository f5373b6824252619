"""Training as stated by a command's files and flags, read as text; nothing is started."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import whole_number
from tuner.search_spaces.job import LoRA, Program
from tuner.search_spaces.knobs import Value
from tuner.workload.scripts.frameworks.bound_driver import Bound, BoundDriver
from tuner.workload.scripts.frameworks.driver import Driver
from tuner.workload.scripts.frameworks.settings import Fact, Settings, matches
from tuner.workload.scripts.key_files import (
    parsed_file,
    read_deepspeed,
    repeated_keys,
    shown,
    shown_text,
)
from tuner.workload.scripts.script_facts import OFFLOADS, ScriptFacts

# Facts of the training that the keys of a command state, read as text: table [facts] of a driver.
#
# A fact is read and never written; what is written is a knob. What stands in for a missing value,
# and what cannot be counted, is collected as sentences.


#: Values that only the framework or a shell fills in.
UNFILLED = re.compile(r"\$\{|\$\w|\{\{")
#: Names of keys that change what memory holds. One that is given and not read is doubted.
_MEMORY = re.compile(
    r"quant|[48]_?bit|liger|offload|fsdp|deepspeed|optim|pack|lora|dora|peft|adapter|galore|apollo"
    r"|badam|adam_mini|mm_proj_only|enable_float8|freez|frozen|^beta$|max_prompt|max_completion|fp8|expert|parallel|checkpointing|cross_entropy|chunk|(?<!re)vision"
    r"|image|video|audio|tower|^rl$|dpo|kto|grpo|orpo|reward|ref_model|vllm|compile|unsloth|qat"
    r"|kernel|mixture_of|relora|llama_pro|^stage$|process_index|shard|converters|batch_size|training\.dtype|_cp_|cp_size|tp_size"
)
#: Names of degrees, for which 1 is neutral.
_DEGREE = re.compile(r"parallel|degree|replica|(?:shard|tp|pp|cp|dp|ep|sp|partition)_(?:size|dim)$")
#: Texts that turn something off, in small letters.
_OFF = ("", "none", "no", "null", "false", "off", "0", "disabled")
#: Keys that look so and are of a launcher, a writer or an evaluation.
_OTHER = re.compile(r"eval|save|hub|wandb|report|push|dataset|logging|^fsdp_config|^deepspeed$")


class Facts:
    """Reader of one command's facts, with its assumptions and doubts."""

    def __init__(self, driver: Driver, settings: Settings) -> None:
        self.driver, self.settings = driver, settings
        self.assumed, self.doubts = list[str](), list[str]()

    @cached_property
    def source(self) -> str:
        """The file, or else the framework's command, for sentences."""
        file = self.settings.file
        return file[1].name if file else f"the command of {self.driver.name}"

    def named(self, fact: str) -> str:
        """Return the key that states a fact, for sentences."""
        return next(iter(self._fact(fact).keys), fact)

    def get(self, key: str) -> Any:
        """Return the value of a key; InputError for one that only the framework fills in."""
        value = self.settings.get(key)
        if isinstance(value, str) and UNFILLED.search(value):
            raise InputError(
                f"{key} in {self.source} is {shown(value)}, which is filled in only when it is "
                f"started; write the value itself, in the file or in the command"
            )
        number = whole_number(value) if isinstance(value, str) else None
        return value if number is None else number

    def given(self, fact: str) -> Any:
        """Return the value of the first key of a fact that is given; None without."""
        return self._first(fact)[1]

    def switched_on(self, fact: str) -> bool:
        """Return True if a fact is given as true, by its word, too."""
        return str(self.given(fact)).lower() == "true"

    def text(self, fact: str) -> str:
        """Return a fact as a text; "" if it is not given."""
        key, value = self._first(fact)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{key} in {self.source} is {shown(value)}, which is not a name")
        return value or ""

    def number(self, fact: str) -> int:
        """Return a fact as a number of at least 1; 0 if it is not given.

        Of several keys without a default, one that is 0 is not used.
        """
        key, value = self._first(fact)
        unused = value == 0 and len(self._fact(fact).keys) > 1 and not self.default(fact)
        return 0 if unused else self.count(key, value)

    def count(self, key: str, value: Any) -> int:
        """Return the value of a key as a number of at least 1; 0 for None."""
        if value is None:
            return 0
        if type(value) is not int or value < 1:
            raise InputError(
                f"{key} in {self.source} is {shown(value)}; a number of at least 1 is read"
            )
        return value

    def default(self, fact: str) -> int:
        """Return the framework's default of a fact; 0 if it has none."""
        return int(self._fact(fact).default or 0)

    def unlimited(self, fact: str) -> bool:
        """Return True if the framework has no default of a fact, and a usual one is assumed."""
        return self._fact(fact).unlimited

    def case(self, fact: str) -> str:
        """Return the value of a fact by its cases; "" if none holds.

        A key of it whose value no case knows is doubted.
        """
        if found := self.holding(fact):
            return found
        known: dict[str, bool] = {}
        for case in self._fact(fact).cases:
            for key, any_of in case.when.items():
                if not key.startswith("env:") and not is_neutral(key, self.get(key)):
                    known[key] = known.get(key, False) or matches(self.get(key), any_of)
        # Values that are known each, and in no case together, are all doubted.
        for key in known:
            if not known[key] or all(known.values()):
                self.doubt(self.settings.name(key), self.get(key))
        return ""

    def holding(self, fact: str) -> str:
        """Return the value of the first case of a fact that holds; "" if none does."""
        for case in self._fact(fact).cases:
            if all(matches(self.get(key), any_of) for key, any_of in case.when.items()):
                return case.value
        return ""

    def doubt(self, key: str, value: Any) -> None:
        """Note that the value of a key is not counted."""
        given = shown_text(str(value)) if isinstance(value, bool | int | float | str) else "set"
        self.doubts.append(f"{shown_text(key)} = {given} of {self.source} is not counted")

    def _fact(self, name: str) -> Fact:
        return self.driver.facts.get(name, Fact())

    def _first(self, fact: str) -> tuple[str, Any]:
        keys = self._fact(fact).keys
        found = [(self.settings.name(k), v) for k in keys if (v := self.get(k)) is not None]
        used = (pair for pair in found if type(pair[1]) is not int or pair[1])
        return next(used, found[0] if found else ("", None))

    # ---- what else is given

    def name_the_rest(self) -> None:
        """Note each key that changes what memory holds and that no fact or knob reads."""
        for key, note in self.driver.uncounted.items():
            if not is_neutral(key, self.get(key)):
                self.assumed.append(note)
        read = {*self.driver.keys, *self.driver.read_keys, *self.driver.harmless}
        spelt = {key.replace("-", "_") for key in read}
        for key, value in self._every():
            if key in read or key in spelt or _OTHER.search(key) or not _MEMORY.search(key):
                continue
            if is_neutral(key, value):
                continue
            self.doubt(key, value)
        if (file := self.settings.file) and file[1].suffix != ".toml":
            for key, last in repeated_keys(file[1]):
                self.assumed.append(
                    f"{key} stands twice in {self.source}; the last, {last}, counts"
                )

    def _every(self) -> Iterator[tuple[str, Any]]:
        """Yield each key of the file and of the command, with its value."""
        file = self.settings.file
        data = parsed_file(file[1]) if file else {}
        if not isinstance(data, Mapping):
            raise InputError(f"{self.source} holds no keys")
        everywhere = file is not None and file[1].suffix == ".toml"
        read = (*self.driver.keys, *self.driver.read_keys)
        for key, value in data.items():
            if everywhere or any(name.startswith(f"{key}.") for name in read):
                yield from _flat({key: value})
            else:
                yield str(key), value
        for word in self.settings.words:
            name = word.partition("=")[0]
            if name.startswith("--") and len(name) > 2:
                key = name[2:].replace("-", "_") if "." not in name else name[2:]
                if key not in data:
                    yield key, self.settings.get(key)


def is_neutral(key: str, value: Any) -> bool:
    """Return True if a value turns nothing on: not given, off, empty, zero, or a degree of 1.

    A degree of -1 is that of the ranks that are left.
    """
    if isinstance(value, Mapping):
        return all(is_neutral(str(name), part) for name, part in value.items())
    if isinstance(value, str):
        return value.lower() in _OFF or (value in ("1", "-1") and bool(_DEGREE.search(key)))
    if type(value) is int and value in (1, -1):
        return bool(_DEGREE.search(key))
    return not value


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested tables with dots."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")


@dataclass(frozen=True)
class Sharding:
    """Owner of the sharding: "deepspeed" or "fsdp", or "" for replicas alone.

    Attributes:
        file: that says so, for sentences.
        batches: numbers that DeepSpeed's file gives, by knob.
        precision: that it gives; "" if it leaves it to the framework.
    """

    owner: str = ""
    file: str = ""
    knobs: Mapping[str, Value] = field(default_factory=dict, hash=False)
    batches: Mapping[str, int] = field(default_factory=dict, hash=False)
    precision: str = ""
    assumed: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def sharding_of(facts: Facts) -> Sharding:
    """Return how states are sharded; InputError for a file that is missing, or two that differ."""
    named, launched = facts.given("deepspeed"), facts.switched_on("launcher_deepspeed")
    fsdp = _fsdp(facts)
    if named not in (None, "", False):
        if fsdp is not None:
            raise InputError(
                f"{facts.source} names both DeepSpeed's configuration and FSDP, of which one "
                "shards the states; leave one out"
            )
        found = _of_deepspeed(*_deepspeed(named, facts, facts.source))
        other = facts.given("launcher_zero_stage")
        stage = found.knobs["zero_stage"]
        if launched and other not in (None, "", stage):
            text = f"ZeRO {stage} of {found.file}, which counts before ZeRO {other} of accelerate"
            return replace(found, assumed=(*found.assumed, text))
        return found
    if launched:
        return _by_launcher(facts)
    return fsdp or Sharding(knobs={"zero_stage": 0})


def _deepspeed(named: Any, facts: Facts, source: str) -> tuple[Mapping[str, Any], str]:
    if isinstance(named, Mapping):
        return named, source
    path, settings = Path(str(named)), facts.settings
    places = [settings.cwd / path]
    if settings.file is not None:  # it may be read from another folder than it is started in
        places += [parent / path for parent in settings.file[1].resolve().parents]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise InputError(
            f"{source} names DeepSpeed's configuration {shown(named)}, and there is no such file "
            f"from {settings.cwd}; start tuner where training starts, or correct the path"
        )
    return read_deepspeed(found), found.name


def _of_deepspeed(data: Mapping[str, Any], name: str) -> Sharding:
    settings = ScriptFacts(config=data)
    zero = settings.zero
    knobs: dict[str, Value] = {"zero_stage": int(zero.get("stage", 0))}
    doubts = []
    for knob, section in OFFLOADS.items():
        device = settings.device(section)
        if device not in ("none", "cpu", "nvme"):
            raise InputError(
                f"{section}.device in {name} is {shown(device)}; cpu, nvme or none is read"
            )
        knobs[knob] = device
    batches = {
        "micro_batch": data.get("train_micro_batch_size_per_gpu"),
        "gradient_accumulation": data.get("gradient_accumulation_steps"),
    }
    numbers = {k: v for k, v in batches.items() if type(v) is int}
    precision = ""
    for each in ("bf16", "bfloat16", "fp16"):
        if (data.get(each) or {}).get("enabled") is True:
            precision = "fp16" if each == "fp16" else "bf16"
    for key in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key) not in (None, False, 1):
            doubts.append(f"{key} = {zero[key]} of {name} is not counted")
    return Sharding("deepspeed", name, knobs, numbers, precision, (), tuple(doubts))


def _by_launcher(facts: Facts) -> Sharding:
    file = facts.given("launcher_deepspeed_file")
    if file not in (None, "", "none"):
        return _of_deepspeed(*_deepspeed(file, facts, "accelerate's configuration"))
    stage = facts.given("launcher_zero_stage")
    knobs: dict[str, Value] = {"zero_stage": stage if type(stage) is int else 2}
    for knob in OFFLOADS:
        device = facts.given(f"launcher_{knob}")
        knobs[knob] = device if device in ("cpu", "nvme") else "none"
    return Sharding("deepspeed", "accelerate's configuration", knobs)


def _fsdp(facts: Facts) -> Sharding | None:
    keys = facts.driver.facts["fsdp"].keys if "fsdp" in facts.driver.facts else ()
    given = [value for key in keys if (value := facts.get(key)) not in (None, "", False, [], {})]
    if not given and not facts.switched_on("launcher_fsdp"):
        return None
    words = [str(word) for value in given for word in _words(value)]
    version, reshard = facts.given("fsdp_version") or 1, facts.given("fsdp_reshard")
    strategy = facts.given("fsdp_strategy") or reshard or ""
    if type(strategy) is int and 1 <= strategy <= 4:  # by its number in torch
        strategy = _STRATEGIES[strategy - 1]
    strategy = next((word for word in words if word in _STRATEGIES), str(strategy).lower())
    offload = facts.switched_on("fsdp_offload")
    if facts.given("fsdp_offload") is None:
        offload = "offload" in words
    found = _of_fsdp(str(version), strategy, reshard, offload=offload, source=facts.source)
    if not facts.switched_on("fsdp_checkpointing"):
        return found
    return replace(found, knobs={**found.knobs, "activation_checkpointing": "full"})


def _words(value: Any) -> list[Any]:
    if isinstance(value, str):
        return value.split()
    return list(value) if isinstance(value, list) else []


def _of_fsdp(version: str, strategy: str, reshard: Any, *, offload: bool, source: str) -> Sharding:
    if strategy == "no_shard":
        return Sharding("fsdp", source, {"zero_stage": 0})
    kept = strategy == "shard_grad_op" or str(reshard).lower() == "false"
    knobs: dict[str, Value] = {"sharding": "fsdp2_no_reshard" if kept else "fsdp2", "zero_stage": 0}
    if offload:
        knobs["parameter_offload"] = "cpu"
    assumed = () if version == "2" else ("FSDP is counted as FSDP2",)
    doubts: tuple[str, ...] = ()
    if strategy.startswith("hybrid"):
        doubts = (f"{strategy} of {source} is counted as sharded over every rank",)
    return Sharding("fsdp", source, knobs, assumed=assumed, doubts=doubts)


#: Scripts of TRL and the like whose loss is another than the next token's.
_OTHER_LOSS = re.compile(r"(?:run_)?(?:dpo|kto|grpo|orpo|ppo|rloo|cpo|gkd|reward\w*|online_dpo)")
#: Sizes without which there is no model, by their names in a config.json.
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
#: The names that GPT-2's configuration has for sizes.
_GPT2 = {
    **{"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"},
    **{"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"},
}


@dataclass(frozen=True)
class StatedTraining:
    """Training as a command or its file states it.

    Attributes:
        model: name or folder of the model; "" if the command gives its sizes.
        config: the model's configuration by such sizes; None if it names a model.
        sequence_length: tokens; 0 if the command does not say, by `length_keys`.
        why_no_model: why its sizes are no model's, a sentence; "" if they are, or it names one.
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
    length_keys: tuple[str, ...] = ()
    on_deepspeed: bool = False
    lora: LoRA | None = None
    program: Program = field(default_factory=Program)
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    why_no_model: str = ""
    assumed: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def read_training(bound: Bound, settings: Settings, ranks: int, devices: int) -> StatedTraining:
    """Read the training of a framework's command; InputError where it is incomplete.

    Args:
        ranks: number that the command names; 0 if it names none, and `devices` are meant.
    """
    driver = bound.driver
    if "model" not in driver.facts and not driver.sizes:
        raise InputError(
            f"files and flags of {bound.title} are not read for a prediction; describe what it "
            "trains in a job file (docs/planning.md)"
        )
    facts = Facts(driver, settings)
    model = facts.text("model")
    config, why_no_model = _model_of_sizes(facts)
    if not model and not driver.sizes:
        raise InputError(
            f"{facts.source} names no model; give {facts.named('model')}, the model's name or "
            "folder"
        )
    driven = BoundDriver(bound, settings, ranks or devices)
    sharding = sharding_of(facts)
    facts.assumed += sharding.assumed
    facts.doubts += sharding.doubts
    micro, times = _batches(facts, driven, sharding)
    precision = _precision(facts, sharding)
    lora = _lora(facts)
    knobs = _knobs(facts, driven, sharding)
    script = next(iter(settings.words), "")
    if _OTHER_LOSS.fullmatch(Path(script).stem) and script.endswith(".py"):
        facts.doubts.append(f"{script} trains by another loss, with another model beside it")
    facts.case("loss")
    facts.name_the_rest()
    return StatedTraining(
        source=facts.source,
        framework=driver.name,
        model=model,
        micro_batch=micro,
        accumulation=times,
        sequence_length=_length(facts),
        precision=precision,
        ranks=ranks,
        knobs={**knobs, "micro_batch": micro},
        length_keys=driver.facts.get("sequence_length", Fact()).keys,
        on_deepspeed=sharding.owner == "deepspeed",
        lora=lora,
        program=_program(facts, driven, sharding, precision, lora),
        config=config,
        why_no_model=why_no_model,
        assumed=tuple(dict.fromkeys(facts.assumed)),
        doubts=tuple(dict.fromkeys(facts.doubts)),
    )


def _batches(facts: Facts, driven: BoundDriver, sharding: Sharding) -> tuple[int, int]:
    """Return (micro-batch, accumulation) of the framework's keys and of DeepSpeed's file."""
    routes, source = driven.bound.driver.knobs, facts.source
    found = dict(zip(("micro_batch", "gradient_accumulation"), driven.batches, strict=True))
    keys = {name: routes[name].key if name in routes else name for name in found}
    own = {name: facts.get(key) if name in routes else None for name, key in keys.items()}
    for name, key in keys.items():
        theirs = sharding.batches.get(name)
        if own[name] == "auto":
            raise InputError(
                f"{key} in {source} is 'auto', which is found only by starting it; write the "
                "number that you mean to run"
            )
        stated = facts.count(key, own[name])
        if stated and theirs and theirs != stated:
            raise InputError(
                f"{key} is {stated} in {source} and {theirs} in {sharding.file}; make them equal, "
                'or write "auto" in the latter'
            )
        found[name] = stated or theirs or found[name]
    micro, times = found.values()
    if not micro:
        raise InputError(f"{source} does not say its micro-batch; give {keys['micro_batch']}")
    share = facts.number("rank_batch")
    if share and own["gradient_accumulation"] is None:
        if share % micro:
            raise InputError(
                f"{facts.named('rank_batch')} {share} of {source} is not a multiple of its "
                f"micro-batch {micro}; make it one"
            )
        times = share // micro
    _check_global(facts, driven, micro)
    if own["micro_batch"] is None and not sharding.batches.get("micro_batch"):
        facts.assumed.append(f"a micro-batch of {micro}, the framework's default")
    return micro, times or 1


def _check_global(facts: Facts, driven: BoundDriver, micro: int) -> None:
    """Raise InputError for a global batch that the replicas do not take in whole micro-batches."""
    route = driven.bound.driver.knobs.get("global_batch")
    whole = facts.get(route.key) if route and route.key and not route.times else None
    replicas = driven.today.get("data_parallel") or driven.devices
    if route and type(whole) is int and whole > 0 and whole % (micro * int(str(replicas))):
        raise InputError(
            f"{route.key} {whole} of {facts.source} is no multiple of the micro-batch {micro} on "
            f"{replicas} replicas; change one of them, or the number of GPUs by --gpus"
        )


def _length(facts: Facts) -> int:
    """Return the tokens of a sequence; 0 if the command neither states nor defaults them."""
    if length := facts.number("sequence_length"):
        return length
    key, default = facts.named("sequence_length"), facts.default("sequence_length")
    if not default:
        return 0
    why = f"the default of {key}"
    if facts.unlimited("sequence_length"):
        why = f"assumed: without {key}, a sequence is as long as its text"
    facts.assumed.append(f"{default:,} tokens a sequence, {why}")
    return default


def _precision(facts: Facts, sharding: Sharding) -> str:
    """Return the precision of the arithmetic."""
    found = facts.case("precision")
    if sharding.precision:
        if found and found != sharding.precision:
            raise InputError(
                f"{facts.source} trains in {found} and {sharding.file} in {sharding.precision}; "
                "make them equal"
            )
        return sharding.precision
    if not found:
        facts.assumed.append("fp32, as no key says otherwise")
    return found or "fp32"


def _lora(facts: Facts) -> LoRA | None:
    with_adapters, quantization = facts.case("lora"), facts.case("quantization")
    if with_adapters != "true":
        if quantization not in ("", "none"):
            facts.doubt("quantization", f"{quantization} without adapters")
        if frozen := facts.given("lora_text_alone"):
            facts.doubt(facts.named("lora_text_alone"), frozen)
        return None
    rank, key, default = (
        facts.number("lora_rank"),
        facts.named("lora_rank"),
        facts.default("lora_rank"),
    )
    if not rank:
        if not default:
            raise InputError(f"{facts.source} trains adapters without {key}; give their rank")
        rank = default
        facts.assumed.append(f"adapters of rank {rank}, the default of {key}")
    dora = facts.case("dora") == "true"
    if dora:
        facts.assumed.append("DoRA's arithmetic of the norms of weights is left out")
    return LoRA(
        rank,
        _targets(facts),
        quantization or "none",
        dora=dora,
        text_alone=facts.holding("lora_text_alone") == "true",
    )


#: Names of modules by which torchtune calls those of transformers.
_TORCHTUNE = {"output_proj": "o_proj"}


def _targets(facts: Facts) -> str:
    """Return the modules with adapters, as in `LoRA.targets`."""
    if found := facts.holding("lora_targets"):
        return found
    given = facts.given("lora_targets")
    if isinstance(given, str) and re.search(r"[()\[\]\\|*+?^$]", given):
        return given  # a regular expression of peft
    names = given if isinstance(given, list) else re.split(r"[,\s]+", str(given or ""))
    names = [str(name).strip() for name in names if str(name).strip()]
    names = [_TORCHTUNE.get(name, name) for name in names]
    if names and facts.holding("lora_mlp") == "true":
        names += ["gate_proj", "up_proj", "down_proj"]
    if not names:
        facts.assumed.append("adapters on attention, as no targets are named")
        return "attention"
    return ",".join(names)


def _program(
    facts: Facts, driven: BoundDriver, sharding: Sharding, precision: str, lora: LoRA | None
) -> Program:
    optimizer = facts.case("optimizer") or "adamw"
    bare = not sharding.owner and lora is None and precision == "bf16"
    pure = bare and facts.holding("pure_bf16") == "true"
    if pure:
        facts.assumed.append("weights are loaded in bf16, without fp32 copies")
    return replace(driven.program, optimizer=optimizer, pure_bf16=pure)  # type: ignore[arg-type]


def _knobs(facts: Facts, driven: BoundDriver, sharding: Sharding) -> dict[str, Value]:
    """Return the knobs of the framework's keys, and those of what shards its states."""
    today = dict(driven.today)
    stated = facts.holding("activation_checkpointing")
    if stated:
        today["activation_checkpointing"] = stated
    elif why := driven.against.get("activation_checkpointing"):
        facts.doubts.append(f"activation checkpointing of {facts.source} is not read: {why}")
    route = driven.bound.driver.knobs.get("data_parallel")
    if route is None or facts.get(route.key) in (None, -1):
        today.pop("data_parallel", None)
    today.pop("compilation", None)
    if not sharding.owner:  # the framework's own keys may say it
        own = driven.bound.driver.knobs.get("sharding")
        why = driven.against.get("sharding")
        if own and why and any(facts.get(key) is not None for key in own.needs):
            facts.doubts.append(f"sharding of {facts.source} is not read: {why}")
        return {**sharding.knobs, **today}
    return {**today, **sharding.knobs}


def _model_of_sizes(facts: Facts) -> tuple[Mapping[str, Any] | None, str]:
    """Return the model that sizes describe, and why they describe none."""
    try:
        return (_sizes_of_model(facts) if facts.driver.sizes else None), ""
    except InputError as error:
        return None, str(error)


def _sizes_of_model(facts: Facts) -> dict[str, Any]:
    """Return the Hugging Face configuration of the model that a command's sizes describe.

    Megatron-LM's defaults (megatron/training/arguments.py, validate_args): the MLP is four times as
    wide as the model, or 2/3 of that, rounded down to a multiple of 64, with SwiGLU; as many heads
    of keys and values as of queries.

    Raises:
        InputError: a size is missing, or its blocks are of no family that is described so.
    """
    family, keys = facts.holding("model_type"), facts.driver.sizes
    if not family:
        raise InputError(
            f"the norms, activation and positions of {facts.source} are of no family that is "
            "described so; give the model's config.json by --model-config"
        )
    sizes = {name: facts.count(key, facts.get(key)) for name, key in keys.items()}
    for name in _NEEDED:
        if not sizes[name]:
            raise InputError(
                f"{facts.source} does not give --{keys[name]}, without which the model has no "
                "size; add it, or give the model's config.json by --model-config"
            )
    hidden = sizes["hidden_size"]
    wide = 4 * hidden if family == "gpt2" else int(4 * hidden * 2 / 3) // 64 * 64
    sizes["intermediate_size"] = sizes["intermediate_size"] or wide
    if family == "mixtral":
        sizes["intermediate_size"] = sizes["moe_intermediate_size"] or sizes["intermediate_size"]
        sizes["num_experts_per_tok"] = sizes["num_experts_per_tok"] or 2
    given = {name: size for name, size in sizes.items() if size}
    given.pop("moe_intermediate_size", None)
    if family == "gpt2":
        given = {_GPT2.get(name, name): size for name, size in given.items()}
        given.pop("num_key_value_heads", None)
    tied = facts.holding("tied") == "true"
    return {"model_type": family, **given, "tie_word_embeddings": tied}
