"""Sharding of states in recipes of transformers' family: DeepSpeed's file, FSDP, or neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.typed_json import whole_number
from tuner.workload.scripts.deepspeed_file import read_deepspeed
from tuner.workload.scripts.frameworks.recipe_keys import RecipeKeys
from tuner.workload.scripts.frameworks.settings import Settings
from tuner.workload.scripts.script_facts import OFFLOADS

_STRATEGIES = {
    "1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard",
}  # fmt: skip


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


def sharding_of(
    keys: RecipeKeys, get: Callable[[str], Any], settings: Settings, source: str
) -> Sharding:
    """Return how states are sharded; InputError for a file that is missing, or two that differ."""
    named = next((v for k in keys.deepspeed if (v := get(k)) not in (None, "", False)), None)
    env = settings.env
    by_accelerate = env.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    fsdp = _fsdp(keys, get, env, source)
    if named is not None:
        if fsdp is not None:
            raise InputError(
                f"{source} names both DeepSpeed's configuration and FSDP, of which one shards the "
                "states; leave one out"
            )
        data, name = _deepspeed(named, settings, source)
        found = _of_deepspeed(data, name)
        if by_accelerate and (other := env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")):
            stage = found.knobs["zero_stage"]
            if other != str(stage):
                text = f"ZeRO {stage} of {name}, which counts before ZeRO {other} of accelerate"
                return Sharding(**{**vars(found), "assumed": (*found.assumed, text)})
        return found
    if by_accelerate:
        return _by_accelerate(env, settings, source)
    return fsdp or Sharding(knobs={"zero_stage": 0})


def _deepspeed(named: Any, settings: Settings, source: str) -> tuple[Mapping[str, Any], str]:
    if isinstance(named, Mapping):
        return named, source
    path = Path(str(named))
    file = settings.file
    places = [settings.cwd / path]
    if file is not None:  # the file may be read from another folder than it is started in
        places += [parent / path for parent in file[1].resolve().parents]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise InputError(
            f"{source} names DeepSpeed's configuration {str(named)!r}, and there is no such file "
            f"from {settings.cwd}; start tuner where training starts, or correct the path"
        )
    return read_deepspeed(found), found.name


def _of_deepspeed(data: Mapping[str, Any], name: str) -> Sharding:
    zero = data.get("zero_optimization") or {}
    zero = {} if isinstance(zero, bool) else zero
    stage = zero.get("stage", 0)
    knobs: dict[str, Value] = {"zero_stage": int(stage)}
    doubts = []
    for knob, section in OFFLOADS.items():
        device = str((zero.get(section) or {}).get("device", "none"))
        if device not in ("none", "cpu", "nvme"):
            raise InputError(f"{section}.device in {name} is {device!r}; cpu, nvme or none is read")
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


def _by_accelerate(env: Mapping[str, str], settings: Settings, source: str) -> Sharding:
    file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if file and file != "none":
        return _of_deepspeed(*_deepspeed(file, settings, "accelerate's configuration"))
    stage = whole_number(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", ""))
    knobs: dict[str, Value] = {"zero_stage": 2 if stage is None else stage}
    for knob, name in (("optimizer_offload", "OPTIMIZER"), ("parameter_offload", "PARAM")):
        device = env.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{name}_DEVICE", "none")
        knobs[knob] = device if device in ("cpu", "nvme") else "none"
    return Sharding("deepspeed", "accelerate's configuration", knobs)


def _fsdp(
    keys: RecipeKeys, get: Callable[[str], Any], env: Mapping[str, str], source: str
) -> Sharding | None:
    given = [value for key in keys.fsdp if (value := get(key)) not in (None, "", False, [], {})]
    by_env = env.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if not given and not by_env:
        return None
    words = [str(word) for value in given for word in _words(value)]
    table = next((value for value in given if isinstance(value, Mapping)), {})
    options = {str(key).removeprefix("fsdp_"): value for key, value in table.items()}
    if by_env:
        named = (
            *("SHARDING_STRATEGY", "RESHARD_AFTER_FORWARD", "OFFLOAD_PARAMS", "VERSION"),
            "ACTIVATION_CHECKPOINTING",
        )
        values = {name.lower(): env[f"FSDP_{name}"] for name in named if f"FSDP_{name}" in env}
        options = {**values, **options}
    version = str(get("fsdp_version") or options.get("version") or 1)
    reshard = options.get("reshard_after_forward")
    strategy = str(options.get("sharding_strategy") or reshard or "").lower()
    strategy = _STRATEGIES.get(strategy, strategy)
    strategies = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
    strategy = next((word for word in words if word in strategies), strategy)
    offload = str(options.get("offload_params", "offload" in words)).lower() == "true"
    found = _of_fsdp(version, strategy, reshard, offload=offload, source=source)
    if str(options.get("activation_checkpointing", "")).lower() != "true":
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
