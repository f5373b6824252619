"""Sizes of a model as transformers builds it, for every model but plain decoders.

The model is built without weights in an interpreter of its own (`built_model`), by the class that
the installed transformers has for the configuration. That takes seconds, so a count is kept in the
user's cache, by the configuration and the releases that count; those of the included models are
data (`data/catalogue/counted_models.json`, written by `python -m benchmarks.counted_models`), which
needs no torch. What the formulas of `tuner.models.analytic` do not describe is returned as doubts,
in sentences.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from tuner.search_spaces.built_model import DESCRIBED, STORAGE
from tuner.search_spaces.data_files import data_folder, read_json_object
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import LoRA
from tuner.search_spaces.safe_files import read_bytes, write_text

_PROGRAM = Path(__file__).with_name("built_model.py")
#: Program and the module that it loads: a change of either makes kept counts old.
_SOURCES = (_PROGRAM, _PROGRAM.with_name("built_layers.py"))
#: Limit of the processor time that building a model may take: a busy machine is no wrong size.
LIMIT_CPU_S = 120
#: Limit of the wait for it, behind which something other than the sizes is the cause.
WAIT_LIMIT_S = 900
_LIBRARIES = ("torch", "transformers")
#: Counts that the runs that were read keep of their models, by `key_of`, and of the adapters of
#: those, by `_key_of_adapters`.
_COUNTS_OF_RUNS: dict[str, Mapping[str, Any]] = {}
#: Limit of the size of a kept count; one is 2 kB.
_LARGEST_BYTES = 2**20
#: Types of attention layers whose parameters and activations are those of full attention.
_ATTENTION = ("", "full_attention", "sliding_attention", "chunked_attention")
#: Largest share of a block's products by which it may differ from a plain transformer block's.
_SAME = 0.001
#: Share of the parameters up to which those outside blocks and tables belong to norms and the head.
_SMALL = 0.01


def is_installed() -> bool:
    """Return True if this Python has torch and transformers."""
    return all(importlib.util.find_spec(name) is not None for name in _LIBRARIES)


def key_of(config: Mapping[str, Any]) -> str:
    """Return the text by which the count of a configuration is kept.

    Raises:
        InputError: the configuration cannot be written as JSON.
    """
    kept = {name: value for name, value in config.items() if name not in STORAGE}
    try:
        text = json.dumps(kept, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"the model config is not JSON: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()


def count_in_library(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the result of `built_model.count` for a configuration: included, kept or new.

    Raises:
        InputError: torch or transformers is not installed, the configuration cannot be written as
            JSON, or the model takes too long.
    """
    key = key_of(config)
    if key in included_counts():
        return included_counts()[key]
    if not is_installed():
        if key in _COUNTS_OF_RUNS:
            return _COUNTS_OF_RUNS[key]
        raise InputError(
            f"a {config['model_type']} model is counted by transformers, which is not installed "
            "in this Python: pip install torch transformers"
        )
    return _counted(key, json.dumps(config))


def adapters_in_library(config: Mapping[str, Any], lora: LoRA) -> Mapping[str, Any]:
    """Return the result of `built_model.adapters` for a configuration: kept or new.

    Raises:
        InputError: torch or transformers is not installed or cannot build the model, or the model
            has no such layer.
    """
    of_run = _key_of_adapters(config, lora)
    if not is_installed():
        if of_run in _COUNTS_OF_RUNS:
            return _COUNTS_OF_RUNS[of_run]
        raise InputError(
            f"the layers of a {config['model_type']} model that LoRA adapts ({lora.targets}) are "
            "counted by transformers, which is not installed in this Python: pip install torch "
            "transformers"
        )
    key = hashlib.sha256(f"{of_run} {_release('peft')}".encode()).hexdigest()
    report = _counted(key, json.dumps({"config": config, "adapters": _asked(lora)}))
    if "failure" in report:
        raise InputError(
            f"LoRA on {lora.targets} cannot be counted on the {config['model_type']} model of "
            f"transformers {report['transformers']}: {report['why']}; give names of its linear "
            "layers, or all-linear"
        )
    found = report["adapted"]
    if not found["blocks"]["adapters"] + found["outside"]["adapters"]:
        raise InputError(
            f"no module of {report['class']} is named by the targets of LoRA, {lora.targets}; "
            "give names of its linear layers, such as q_proj, or all-linear"
        )
    return report


def _asked(lora: LoRA) -> dict[str, Any]:
    return {**asdict(lora), "names": lora.names}


def _key_of_adapters(config: Mapping[str, Any], lora: LoRA) -> str:
    return hashlib.sha256(json.dumps([key_of(config), _asked(lora)]).encode()).hexdigest()


def _release(package: str) -> str:
    """Return the release of a package, or "" without it."""
    installed = importlib.util.find_spec(package) is not None
    return importlib.metadata.version(package) if installed else ""


def parameters_in_diffusers(config: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the parameters of a model of diffusers, or None and why it was not counted."""
    release = _release("diffusers")
    if not (release and is_installed()):
        return None, "pip install torch diffusers counts its parameters"
    key = hashlib.sha256(f"{key_of(config)} {release}".encode()).hexdigest()
    report = _counted(key, json.dumps(config))
    return report.get("parameters"), str(report.get("why", ""))


def count_to_keep(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the count of a configuration as a run keeps it; empty if it is included.

    Raises:
        InputError: see `count_in_library`.
    """
    key = key_of(config)
    if key in included_counts():
        return {}
    return {"key": key, "count": json.dumps(count_in_library(config))}


def adapters_to_keep(config: Mapping[str, Any], lora: LoRA) -> Mapping[str, str]:
    """Return the count of a configuration's adapters as a run keeps it.

    Raises:
        InputError: see `adapters_in_library`.
    """
    report = adapters_in_library(config, lora)
    return {"key": _key_of_adapters(config, lora), "count": json.dumps(report)}


def take_kept_count(kept: object) -> None:
    """Use a count that a run keeps where transformers is not installed; ignore a bad one."""
    if not isinstance(kept, Mapping):
        return
    key, text = kept.get("key"), kept.get("count")
    if not (isinstance(key, str) and isinstance(text, str) and len(text) <= _LARGEST_BYTES):
        return
    with contextlib.suppress(InputError, ValueError, TypeError, LookupError, RecursionError):
        count = json.loads(text)
        if "adapted" in count:
            _check_adapters(count)
        else:
            facts_in_library("", count)
        _COUNTS_OF_RUNS[key] = count


def _check_adapters(report: Mapping[str, Any]) -> None:
    """Refuse what is not a result of `built_model.adapters`."""
    found = report["adapted"]
    names = ("adapters", "inputs", "outputs", "parameters")
    numbers = [found[part][name] for part in ("blocks", "outside") for name in names]
    flags = (found["attention"], report["stacked_experts"], report["by_peft"])
    if not all(type(each) is int and each >= 0 for each in (*numbers, report["linear"])):
        raise ValueError("a number of parameters is none")
    if not all(isinstance(each, bool) for each in flags):
        raise ValueError("a flag is none")


@lru_cache(maxsize=1)
def included_counts() -> Mapping[str, Mapping[str, Any]]:
    """Return the counts of the included models by the keys of their configurations."""
    file = data_folder("catalogue") / "counted_models.json"
    return {each["key"]: each["count"] for each in read_json_object(file, "counts")["models"]}


@lru_cache(maxsize=64)
def _counted(key: str, line: str) -> Mapping[str, Any]:
    file = _kept_file(key)
    if file is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            kept = json.loads(read_bytes(file, _LARGEST_BYTES))
            if isinstance(kept, dict) and {"kinds", "adapted", "failure"} & {*kept}:
                return kept
    count = run_program(line)
    if file is not None and count.get("failure") != "failed":  # which may be of this moment alone
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(count))
    return count


def _kept_file(key: str) -> Path | None:
    """Return the file of a count in the user's cache; None if this user has no folder for it."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return None
    counts = [importlib.metadata.version(name) for name in _LIBRARIES]
    counts += [hashlib.sha256(path.read_bytes()).hexdigest() for path in _SOURCES]
    name = hashlib.sha256(" ".join([key, *counts]).encode()).hexdigest()
    return caches / "joulefront" / "counted_models" / f"{name}.json"


def run_program(line: str) -> dict[str, Any]:
    """Return the answer of `built_model` to a configuration in JSON.

    Raises:
        InputError: the model takes more processor time than the limit, or the machine more time.
    """
    command = [sys.executable, "-P", str(_PROGRAM), str(LIMIT_CPU_S)]
    try:
        done = subprocess.run(
            command,
            input=line + "\n",
            capture_output=True,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=True,
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"transformers did not answer in {WAIT_LIMIT_S / 60:g} minutes, most of which it "
            "waited: this machine is very busy, or its disk very slow; try again"
        ) from error
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        if getattr(error, "returncode", 0) == -signal.SIGXCPU:
            raise InputError(
                "transformers did not build the model of this config in "
                f"{LIMIT_CPU_S} s of processor time; check its sizes"
            ) from error
        stderr = (getattr(error, "stderr", None) or str(error)).strip() or repr(error)
        return {"failure": "failed", "why": stderr.splitlines()[-1][:300], "transformers": ""}


def facts_in_library(model_type: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelFacts` that an answer of `built_model.count` gives.

    Raises:
        InputError: transformers could not build the model, or it has no layers.
    """
    library = f"transformers {report['transformers']}".strip()
    if "failure" in report:
        raise InputError(
            f"{library} cannot build the {model_type} model of this config: {report['why']}; "
            "correct the config, or install what is missing"
        )
    if not report["layers"]:
        raise InputError(
            f"no layers were found in {report['class']}, which {library} builds of this config"
        )
    given = report["sizes"]
    heads = given["heads"] or 1
    hidden = given["hidden"] or 1
    experts = given["experts"] if report["expert_parameters"] else 0
    dense = given["dense"] or 4 * hidden
    sizes: dict[str, Any] = {
        "layers": report["layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": given["kv_heads"] or heads,
        "head_dim": given["head_dim"] or max(1, hidden // heads),
        "vocab": given["vocab"] or 1,
        "dense": dense,
        "expert": (given["expert"] or dense) if experts else dense,
        "experts": experts or 0,
        "experts_per_token": min(given["experts_per_token"] or 1, experts) if experts else 0,
        "positions": given["positions"],
        "tied": report["tied"],
    }
    gated, unlike = _plain_blocks(sizes, report["kinds"])
    described = model_type in DESCRIBED and not unlike
    ran = {} if described else _layers_run(report, sizes)
    if ran:
        unlike = ()
    elif not unlike and not described:
        unlike = (_doubt_on_kept(report),)
    visited = max((kind["shared"] for kind in report["kinds"]), default=0)
    attending = sum(kind["layers"] for kind in report["kinds"] if kind["attends"])
    counts = ("parameters", "active_parameters", "matmul_parameters", "head_parameters")
    blocks = ("block_parameters", "expert_parameters", "largest_layer")
    return {
        **sizes,
        **{name: report[name] for name in (*counts, *blocks)},
        **ran,
        "model_type": model_type,
        "gated": gated,
        "learned_positions": report["learned_positions"],
        "qk_norm": report["qk_norm"],
        "attending": attending / report["layers"],
        "shared": visited // ((3 if gated else 2) * hidden),
        "doubts": (*unlike, *_other_doubts(sizes, report, described=described)),
    }


def _plain_blocks(
    sizes: Mapping[str, Any], kinds: list[Mapping[str, Any]]
) -> tuple[bool, tuple[str, ...]]:
    """Return if the blocks' MLPs have gates, and a doubt if a kind is not a plain block."""
    every = [_gates(sizes, kind) for kind in kinds]
    common = set.intersection(*every)
    gated = 3 in common or not common
    layers = sum(kind["layers"] for kind in kinds)
    unlike: dict[str, int] = {}
    for kind, gates in zip(kinds, every, strict=True):
        if (3 if gated else 2) not in gates:
            name = f"{kind['class']} {kind['type']}".strip()
            unlike[name] = unlike.get(name, 0) + kind["layers"]
    if not unlike:
        return gated, ()
    named = ", ".join(f"{number} {name}" for name, number in unlike.items())
    return gated, (
        f"{sum(unlike.values())} of {layers} layers ({named}) are not those of a plain "
        "transformer, so that activations and step time, which are computed as if they were, may "
        "be far off; the parameters are counted in transformers' own model",
    )


def _layers_run(report: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory and FLOPs of the layers, run on fake tensors; empty if in doubt.

    A layer without a call of attention runs by operators of torch here and by kernels of its own on
    a GPU, which keep and compute something else.
    """
    kinds = report["kinds"]
    if not all(kind["runs"].get("2", {}).get("calls_of_attention") for kind in kinds):
        return {}
    layers = sum(kind["layers"] for kind in kinds)

    def mean(name: str, size: str = "2") -> float:
        if not all(size in kind["runs"] for kind in kinds):
            return 0.0
        return sum(kind["layers"] * kind["runs"][size][name] for kind in kinds) / layers

    return {
        "kept_16": mean("kept_bytes"),
        "kept_32": mean("kept_bytes", "4"),
        "matmul_parameters": round(layers * mean("flops") / 2) + report["head_parameters"],
        "head_dim": max(1, round(mean("attention_flops") / (4 * sizes["heads"]))),
    }


def _doubt_on_kept(report: Mapping[str, Any]) -> str:
    why = next((kind["why_not_run"] for kind in report["kinds"] if "why_not_run" in kind), "")
    return (
        f"what the layers of {report['class']} keep for the backward pass could not be counted"
        + (f" ({why})" if why else "")
        + "; activations are those of a plain transformer, and may be far off"
    )


def _gates(sizes: Mapping[str, Any], kind: Mapping[str, Any]) -> set[int]:
    """Return the numbers of an MLP's matrices with which a plain block has a kind's products."""
    if not kind["attends"] or kind["type"] not in _ATTENTION or kind["unusual"]:
        return set()
    hidden, width = sizes["hidden"], sizes["heads"] * sizes["head_dim"]
    attention = hidden * (2 * width + 2 * sizes["kv_heads"] * sizes["head_dim"]) + kind["shared"]
    experts = sizes["experts_per_token"] * sizes["expert"] * hidden
    found = set()
    for matrices in (2, 3):
        expected = [attention + matrices * sizes["dense"] * hidden]
        if experts:
            expected.append(attention + hidden * sizes["experts"] + matrices * experts)
        if any(abs(kind["matmul"] / each - 1) < _SAME for each in expected):
            found.add(matrices)
    return found


def _other_doubts(
    sizes: Mapping[str, Any], report: Mapping[str, Any], *, described: bool
) -> list[str]:
    """Return doubts about the parts of a model beside the blocks of its text model.

    Those of a described model, as the encoder of a model of video, are computed.
    """
    doubts = []
    tables = (sizes["positions"] or 0) + 8 if report["learned_positions"] else 8
    other = report["other_parameters"]
    if report["is_encoder_decoder"]:
        doubts.append(
            "it has an encoder and a decoder, of which only the decoder's layers are computed; "
            "all parameters are counted"
        )
    elif (
        not described
        and other > tables * sizes["hidden"]
        and (report["is_nested"] or other > _SMALL * report["parameters"])
    ):
        doubts.append(
            f"{other / 1e9:.3g} billion parameters are outside the text model's layers (encoders "
            "of images or sound, projectors): they are counted, but the activations and the time "
            "of what they compute are left out"
        )
    if not report["head_parameters"]:
        doubts.append("no output projection was found, so that the memory of the logits is a guess")
    return doubts


def doubt_on_class(report: Mapping[str, Any], model_type: str) -> tuple[str, ...]:
    """Return the doubt on a model that is counted as the class that its configuration names."""
    if "counted_as" not in report:
        return ()
    return (
        f"transformers {report['transformers']} has no model_type {model_type}, so that it is "
        f"counted as {report['class']}, which its architectures name; its own code, which is never "
        "run, may have more",
    )


def doubts_of_unknown(config: Mapping[str, Any], model_type: str, version: str) -> tuple[str, ...]:
    """Return the doubt on a count by standard keys of a family that transformers does not have."""
    code = " (its own code, which auto_map names, is never run)" if "auto_map" in config else ""
    return (
        f"transformers {version} has no model_type {model_type}{code}, so that its parameters are "
        "counted by the standard keys and may be far off; install a release that has it",
    )
