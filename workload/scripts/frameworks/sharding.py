"""Sharding of states by a command's facts: DeepSpeed's configuration, FSDP, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import Value
from tuner.workload.scripts.deepspeed_file import read_deepspeed
from tuner.workload.scripts.frameworks.facts import Facts
from tuner.workload.scripts.key_files import shown
from tuner.workload.scripts.script_facts import OFFLOADS, ScriptFacts

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
