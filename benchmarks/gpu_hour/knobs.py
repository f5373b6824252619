"""`knobs`: every knob that one GPU can have, one launch each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu_hour.hour import Hour, described


class Case(NamedTuple):
    """One launch: its launch knobs, and a job that they need with values beside its file's."""

    name: str
    knobs: Mapping[str, Any]
    job: str = ""
    values: Mapping[str, Any] = {"sequence_length": 1024}


def _zero1(name: str, **knobs: Any) -> Case:
    return Case(name, {"zero_stage": 1, **knobs})


ON_HOST = {"zero_stage": 3, "optimizer_offload": "cpu", "parameter_offload": "cpu"}
SHORT = {"sequence_length": 128}
CASES = (
    *(Case(f"zero{stage}", {"zero_stage": stage}) for stage in (0, 2, 3)),
    Case("offload-cpu", {"zero_stage": 2, "optimizer_offload": "cpu"}),
    Case("offload-async", {"zero_stage": 3, "optimizer_offload": "async"}),
    Case("parameters-cpu", ON_HOST),
    Case("fsdp2", {"sharding": "fsdp2"}),
    _zero1("checkpoint-full", activation_checkpointing="full"),
    _zero1("checkpoint-selective", activation_checkpointing="selective"),
    _zero1("activations-sync", activation_offload="sync"),
    _zero1("activations-async", activation_offload="async"),
    _zero1("compile-regional", compilation="regional"),
    Case("lora", {"zero_stage": 1}, "tiny-qwen2.5-lora", SHORT),
    Case("video", {"zero_stage": 1, "micro_batch": 1}, "tiny-lmm", SHORT),
    Case("experts", {"zero_stage": 1}, "tiny-olmoe", SHORT),
    _zero1("compile-full", compilation="full"),
)


def knobs(hour: Hour) -> None:
    for case in CASES:
        hour.check(case.name, partial(_tried, hour, case))


def _tried(hour: Hour, case: Case) -> str:
    return described(hour.probe(case.name, hour.job(case.job, **case.values), **case.knobs))
