"""Training as stated by a command's files and flags, read as text; nothing is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import LoRA, Program
from tuner.search_spaces.knobs import Value
from tuner.workload.scripts.frameworks.bound_driver import Bound, BoundDriver
from tuner.workload.scripts.frameworks.facts import Facts
from tuner.workload.scripts.frameworks.settings import Settings
from tuner.workload.scripts.frameworks.sharding import Sharding, sharding_of

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
    if own["micro_batch"] is None and not sharding.batches.get("micro_batch"):
        facts.assumed.append(f"a micro-batch of {micro}, the framework's default")
    return micro, times or 1


def _length(facts: Facts) -> int:
    if length := facts.number("sequence_length"):
        return length
    key, default = facts.named("sequence_length"), facts.default("sequence_length")
    if not default:
        raise InputError(f"{facts.source} does not say the tokens of a sequence; give {key}")
    facts.assumed.append(f"{default:,} tokens a sequence, the default of {key}")
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
        if quantization:
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


def _targets(facts: Facts) -> str:
    """Return the modules with adapters, as in `LoRA.targets`."""
    if found := facts.holding("lora_targets"):
        return found
    given = facts.given("lora_targets")
    if isinstance(given, str) and re.search(r"[()\[\]\\|*+?^$]", given):
        return given  # a regular expression of peft
    names = given if isinstance(given, list) else re.split(r"[,\s]+", str(given or ""))
    names = [str(name).strip() for name in names if str(name).strip()]
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
