"""Models of every family that transformers can build: their parameters, and the time of an answer.

`python -m benchmarks.models` builds the default configuration of each `model_type` that has a class
of text or of images and text, in this process by that class, and counts the same configuration, as
a JSON file would hold it, by `tuner.search_spaces.built_model`. Families whose defaults their own
class refuses are left out and named. Nothing was fitted to these counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import layers
from benchmarks.figures import Figure, arguments, publish
from tuner.search_spaces import built_model
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.library_count import facts_in_library
from tuner.search_spaces.model_facts import ModelFacts
from tuner.search_spaces.plain_decoder import is_plain

#: Model that is counted by its library: DeepSeek-V3, which transformers' defaults describe.
COUNTED = '{"model_type": "deepseek_v3"}'
#: Mappings of transformers whose families are compared.
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
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


def classes_of_families() -> dict[str, str]:
    """Return the class of transformers that builds each family."""
    from transformers.models.auto import modeling_auto

    classes: dict[str, str] = {}
    for mapping in MAPPINGS:
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


def fit_s(*arguments_: str) -> float:
    """Return the seconds of one `tuner fit`."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "tuner.cli", "fit", *arguments_, "--json"]
    subprocess.run(command, capture_output=True, check=False)
    return time.perf_counter() - started


def _fit_by_library_s() -> float:
    with TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(COUNTED)
        return fit_s(str(config), "--cluster", "h200-8")


def main() -> None:
    """Print the figures."""
    options = arguments("Models of every family that transformers can build.").parse_args()
    found = compare_families(classes_of_families())
    print(f"counted, with a doubt on activations and time: {', '.join(found.doubted)}")
    print(f"left out, their class refuses its defaults: {', '.join(found.refused)}")
    publish(
        [
            Figure("families_counted", len(found.counted), "count"),
            Figure("families_built", len(found.counted) + len(found.not_counted), "count"),
            Figure("parameters_wrong", len(found.wrong), "count"),
            Figure("silent_doubts", len(found.silent), "count"),
            Figure("families_doubted", len(found.doubted), "count"),
            Figure("fit_s", fit_s("qwen2.5-7b", "--cluster", "a100-8"), "s"),
            Figure("fit_s_by_library", _fit_by_library_s(), "s"),
            *layers.figures(),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
