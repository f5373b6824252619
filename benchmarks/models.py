"""Models of every family that transformers can build: their parameters, and the time of an answer.

`python -m benchmarks.models` builds the default configuration of each `model_type` that has a class
of text or of images and text, in this process by that class, and counts the same configuration, as
a JSON file would hold it, by `tuner.search_spaces.built_model`. Families whose defaults their own
class refuses are left out and named. Nothing was fitted to these counts. Where peft is installed,
what LoRA adds to models of each kind is compared with what peft trains, too; where diffusers is
installed, each of its models with a configuration that builds is counted. Files of a stranger are
timed: those that describe a model of a million layers, or expand to a gigabyte.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures import Figure, arguments, publish
from tuner.search_spaces import built_model
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.library_count import facts_in_library
from tuner.search_spaces.model_facts import ModelFacts
from tuner.search_spaces.model_reading import is_plain

#: Model that is counted by its library: DeepSeek-V3, which transformers' defaults describe.
COUNTED = '{"model_type": "deepseek_v3"}'
#: Mappings of transformers whose families are compared: of encoders and decoders, and of others.
STACKS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
MAPPINGS = (
    *STACKS,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)
#: Models of each kind whose adapters are compared with peft's: text, experts, images and text,
#: encoder and decoder, sound.
ADAPTED = (
    *("llama", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "mistral", "gemma", "gemma2"),
    *("gemma3_text", "qwen2", "qwen3", "olmo2", "granite", "cohere", "starcoder2", "stablelm"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "qwen2_vl", "gemma3", "llava"),
    *("t5", "bart", "mbart", "whisper", "speech_to_text"),
)
#: Targets of those adapters, with which DoRA has magnitudes.
KINDS_OF_TARGETS: tuple[dict[str, Any], ...] = (
    {"targets": "all-linear"},
    {"targets": "names", "names": ("q_proj", "v_proj", "query_key_value", "c_attn", "q", "v")},
    {"targets": "names", "names": ("fc1", "up_proj", "gate_proj", "dense_h_to_4h", "c_fc", "wi")},
    {"targets": r".*\.(0|1)\..*(q_proj|v_proj|query_key_value|c_attn|\.q|\.v)"},
    {"targets": "names", "names": ("q_proj", "query_key_value", "c_attn", "q"), "dora": True},
)


@dataclass
class Families:
    """Outcome of the comparison; lists of model types.

    Attributes:
        wrong: with another number of parameters than the model that transformers builds.
        not_counted: that transformers builds and that were refused.
        silent: plain decoders that their formula describes otherwise than the library.
        doubted: counted, with a doubt on activations and time.
        refused: whose own class cannot build its default configuration.
    """

    counted: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    not_counted: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    doubted: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def classes_of_families(mappings: Sequence[str] = MAPPINGS) -> dict[str, str]:
    """Return the class of transformers that builds each family."""
    from transformers.models.auto import modeling_auto

    classes: dict[str, str] = {}
    for mapping in mappings:
        for model_type, names in getattr(modeling_auto, mapping).items():
            classes.setdefault(model_type, names if isinstance(names, str) else names[0])
    return classes


def default_models(
    classes: Mapping[str, str],
) -> tuple[dict[str, tuple[dict[str, Any], int]], list[str]]:
    """Return (configuration, parameters) by model type, and the types that cannot be built."""
    import torch
    import transformers

    built: dict[str, tuple[dict[str, Any], int]] = {}
    refused = []
    for model_type, name in classes.items():
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
            with torch.device("meta"):
                model = getattr(transformers, name)(config)
            given = json.loads(json.dumps({**config.to_dict(), "model_type": model_type}))
        except Exception:  # a class may raise anything on defaults that do not fit it
            refused.append(model_type)
            continue
        built[model_type] = given, sum(weight.numel() for weight in model.parameters())
    return built, refused


def answers_of(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the answer of the counting program for each configuration."""
    lines = "".join(json.dumps(config) + "\n" for config in configs.values())
    command = [sys.executable, "-P", built_model.__file__]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(configs, answers, strict=True))


def compare_families(classes: Mapping[str, str]) -> Families:
    """Count each family and compare it with transformers' own model."""
    models, refused = default_models(classes)
    answers = answers_of({name: config for name, (config, _) in models.items()})
    found = Families(refused=refused)
    for name, (config, parameters) in models.items():
        try:
            facts = facts_in_library(name, answers[name])
        except InputError as error:
            print(f"{name}: {error}")
            found.not_counted.append(name)
            continue
        found.counted.append(name)
        if facts["parameters"] != parameters:
            found.wrong.append(name)
        if facts["doubts"]:
            found.doubted.append(name)
        if is_plain(config) and not _agree(config, facts):
            found.silent.append(name)
    return found


def _agree(config: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Return True if the formula describes a plain decoder as the library does."""
    ours = vars(ModelFacts.from_config(config))
    return all(ours[name] == value for name, value in facts.items())


def adapters_wrong(families: Iterable[str] = ADAPTED) -> list[str]:
    """Return the models and targets on which adapters are counted otherwise than peft adds them.

    Both ways of `built_model` are compared with the parameters that peft's own model trains; what
    peft refuses has to be refused. Experts that transformers stacks are peft's alone.
    """
    from copy import deepcopy

    import peft
    import transformers

    wrong = []
    for family in families:
        config = {**transformers.CONFIG_MAPPING[family]().to_dict(), "model_type": family}
        model, _ = built_model._model(json.loads(json.dumps(config)))
        for kind in KINDS_OF_TARGETS:
            lora = {"rank": 8, "names": (), "dora": False, "text_alone": False, **kind}
            given = peft.LoraConfig(
                r=8, target_modules=list(lora["names"]) or lora["targets"], use_dora=lora["dora"]
            )
            expected = None
            with suppress(Exception):
                adapted = peft.get_peft_model(deepcopy(model), given)
                trained = {id(w): w.numel() for w in adapted.parameters() if w.requires_grad}
                expected = sum(trained.values())
            for count in (built_model._adapters_as_peft, built_model._adapters_of_peft):
                found = _adapters(deepcopy(model), lora, count)
                by_rule = count is built_model._adapters_as_peft
                if found != expected and not (by_rule and _has_stacked_experts(model)):
                    wrong.append(f"{family} {kind} {count.__name__}: {found}, not {expected}")
    return wrong


def _adapters(model: Any, lora: dict[str, Any], count: Any) -> int | None:
    held = built_model._Model(model)
    inside = {id(module) for block in held.blocks for module in block.modules()}
    try:
        parts = count(held, lora, inside)
    except Exception:  # peft refuses targets by several
        return None
    return sum(parts[part]["parameters"] for part in ("blocks", "outside")) or None


def _has_stacked_experts(model: Any) -> bool:
    held = built_model._Model(model)
    every = (each for block in held.blocks for each in built_model._owned(block))
    return any(held.is_expert(*each) and each[2].dim() == 3 for each in every)


def fit_s(*arguments_: str) -> float:
    """Return the seconds of one `tuner fit`."""
    started = time.perf_counter()
    subprocess.run(_fit_command(*arguments_), capture_output=True, check=False)
    return time.perf_counter() - started


def fit_cpu_s(*arguments_: str) -> float:
    """Return the processor's seconds of one `tuner fit`, which others on the machine do not change.

    One that does not end within a minute has those of that minute.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        subprocess.run(
            _fit_command(*arguments_), capture_output=True, check=False, timeout=FILE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return FILE_LIMIT_S
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _fit_command(*arguments_: str) -> list[str]:
    return [sys.executable, "-m", "tuner.cli", "fit", *arguments_, "--json"]


def _fit_by_library_s() -> float:
    with TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(COUNTED)
        return fit_s(str(config), "--cluster", "h200-8")


def _fit_of_experts_s() -> float:
    """Return the processor's seconds of a model of 671 G parameters, which fits on no node."""
    with TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps({"model_type": "deepseek_v3"}))
        return fit_cpu_s(str(config), "--cluster", "a100-8")


def diffusers_models() -> dict[str, tuple[dict[str, Any], int]]:
    """Return (configuration, parameters) of each model of diffusers that its defaults build."""
    import diffusers
    import torch

    built = {}
    for name in sorted(dir(diffusers)):
        try:
            kind: Any = getattr(diffusers, name)
            if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
                continue
            with torch.device("meta"):
                model: Any = kind()
            config = {**json.loads(model.to_json_string()), "_class_name": name}
        except Exception:  # a class that needs another package, or sizes
            continue
        built[name] = config, sum(weight.numel() for weight in model.parameters())
    return built


def _diffusers_figures() -> list[Figure]:
    if find_spec("diffusers") is None:
        print("models of diffusers are not counted: diffusers is not installed in this Python")
        return []
    models = diffusers_models()
    answers = answers_of({name: config for name, (config, _) in models.items()})
    right = [n for n, (_, count) in models.items() if answers[n].get("parameters") == count]
    print("of diffusers, counted otherwise or refused:", *({*models} - {*right} or ["none"]))
    return [
        Figure("diffusers_counted", len(right), "count"),
        Figure("diffusers_built", len(models), "count"),
    ]


#: Seconds after which a file of a stranger is given up.
FILE_LIMIT_S = 60.0
#: Sizes of a small Llama, with which hostile configurations are written.
_SMALL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128} | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def hostile_files() -> dict[str, str]:
    """Return texts of files by name: of a stranger who wants the answer never to come."""
    small = json.dumps(_SMALL)[:-1]
    tenfold = "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    return {
        "layers.json": f'{small}, "num_hidden_layers": {10**9}}}',
        "many_layers.json": f'{small}, "num_hidden_layers": 1000000}}',
        "kinds.json": f'{small}, "layer_types": {json.dumps(["full_attention"] * 10**6)}}}',
        "vocabulary.json": f'{small}, "vocab_size": {10**12}}}',
        "experts.json": json.dumps({**_SMALL, "model_type": "mixtral", "num_local_experts": 10**7}),
        "digits.json": f'{small}, "vocab_size": {"9" * 4000}}}',
        "nested.json": '{"a":' * 100_000 + "1" + "}" * 100_000,
        "large.json": '{"x":"' + "a" * (8 << 20) + '"}',
        "laughs.yaml": f"a0: &a0 [x]\n{tenfold}model_name_or_path: *a9\nbase_model: *a9\n",
        "merged.yaml": "a: &a {k: 1}\nb: {<<: ["
        + ",".join(["*a"] * 20_000)
        + "]}\nbase_model: x\n",
        "deep.yaml": "base_model: " + "[" * 20_000 + "]" * 20_000,
        "cycle.yaml": "a: &a [*a]\nmodel_name_or_path: *a\nbase_model: *a\n",
        "deep.toml": "a = " + "[" * 50_000 + "]" * 50_000,
        "dots.toml": "a" + ".a" * 20_000 + " = 1\n",
        "digits.toml": "[job]\nsteps = " + "9" * 5000 + "\n",
    }


def _hostile_figures() -> list[Figure]:
    seconds: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for name, text in hostile_files().items():
            file = Path(folder, name)
            file.write_text(text)
            seconds[name] = fit_cpu_s(str(file), "--cluster", "a100-8")
    print(
        *(f"{name} ends in {taken:.1f} s of the processor" for name, taken in seconds.items()),
        sep="\n",
    )
    return [Figure("hostile_files_ended_s", max(seconds.values()), "s")]


def _adapter_figures() -> list[Figure]:
    if find_spec("peft") is None:
        print("adapters are not compared: peft is not installed in this Python")
        return []
    wrong = adapters_wrong()
    print("adapters otherwise than peft's:", *(wrong or ["none"]), sep="\n  ")
    return [Figure("lora_parameters_wrong", len(wrong), "count")]


def main() -> None:
    options = arguments(__doc__, "models").parse_args()
    found = compare_families(classes_of_families())
    stacks = {*classes_of_families(STACKS)}
    print(f"counted, with a doubt on activations and time: {', '.join(found.doubted)}")
    print(f"left out, their class refuses its defaults: {', '.join(found.refused)}")
    publish(
        [
            Figure("families_counted", len(found.counted), "count"),
            Figure("families_built", len(found.counted) + len(found.not_counted), "count"),
            Figure("parameters_wrong", len(found.wrong), "count"),
            Figure("encoder_decoder_wrong", len({*found.wrong} & stacks), "count"),
            *_adapter_figures(),
            Figure("silent_doubts", len(found.silent), "count"),
            Figure("families_doubted", len(found.doubted), "count"),
            Figure("fit_s", fit_s("qwen2.5-7b", "--cluster", "a100-8"), "s"),
            Figure("fit_s_by_library", _fit_by_library_s(), "s"),
            Figure("fit_cpu_s_experts", _fit_of_experts_s(), "s"),
            *_hostile_figures(),
            *_diffusers_figures(),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
