"""What is to be trained, and how much of it.

A `TrainingJob` names its model by a Hugging Face `config.json`, so that any architecture can be
named offline, and fixes the global batch: micro-batch x accumulation x data parallelism always
equals it, so that no choice of the tuner changes what the model learns.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from search_spaces.errors import InputError, InvalidValue, UnknownName

__all__ = ["TrainingJob", "job_names", "load_job"]

Precision = Literal["fp32", "bf16", "fp16"]
_FIELDS = {
    "name",
    "model",
    "sequence_length",
    "global_batch",
    "steps",
    "tokens",
    "precision",
    "learning_rate",
    "seed",
}


@dataclass(frozen=True)
class TrainingJob:
    """What is to be trained and how much of it.

    Attributes:
        name: what the job is called in reports.
        model: the model's Hugging Face configuration, as its `config.json` holds it.
        sequence_length: tokens a sequence.
        global_batch: sequences an optimizer step, over all replicas.
        steps: optimizer steps that make the solution.
        precision: "fp32", "bf16" or "fp16".
        learning_rate: for the built-in training program.
        seed: for weights and data.
    """

    name: str
    model: Mapping[str, Any] = field(hash=False)
    sequence_length: int
    global_batch: int
    steps: int
    precision: Precision = "bf16"
    learning_rate: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        where = f"in job {self.name!r}"
        if not self.model or "model_type" not in self.model:
            raise InputError(
                f'job {self.name!r} has no model; give [model] config = "PATH of a Hugging Face '
                'config.json" (it must hold model_type)'
            )
        for name in ("sequence_length", "global_batch", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidValue(f"{name} {where}", value, "an integer of at least 1")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise InvalidValue(f"seed {where}", self.seed, "an integer of at least 0")
        rate = self.learning_rate
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
            raise InvalidValue(f"learning_rate {where}", rate, "a number above 0")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise InvalidValue(f"precision {where}", self.precision, "one of fp32, bf16, fp16")

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    def to_json(self) -> dict[str, Any]:
        """Plain types; what the built-in training program reads."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["model"] = dict(self.model)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainingJob:
        """Read what `to_json` wrote.

        Raises:
            InputError: a field is missing or is not legal.
        """
        try:
            return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})
        except TypeError as error:
            raise InputError(f"this is not a job: {error}") from error

    @classmethod
    def from_toml(cls, path: str | Path) -> TrainingJob:
        """Read a job file.

        Raises:
            InputError: the file is missing, is not TOML, has an unknown key, no model, or no size.
        """
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the job {path}: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is not valid TOML: {error}") from error
        for key in data:
            if key not in _FIELDS:
                raise UnknownName(f"key in {path.name}", key, _FIELDS)
        name = str(data.get("name") or path.stem)
        table = data.get("model")
        if not isinstance(table, dict) or "config" not in table:
            raise InputError(
                f'job {name!r} has no model; give [model] config = "PATH of a Hugging Face '
                "config.json, or one of " + ", ".join(_names("models", ".json")) + '"'
            )
        for key in table:
            if key != "config":
                raise UnknownName(f"key in [model] of {path.name}", key, ["config"])
        model = _load_model(table["config"], path.parent)
        sequence_length = data.get("sequence_length")
        global_batch = data.get("global_batch")
        for key, value in (("sequence_length", sequence_length), ("global_batch", global_batch)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidValue(f"{key} in {path.name}", value, "an integer of at least 1")
        assert isinstance(sequence_length, int)
        assert isinstance(global_batch, int)
        if ("steps" in data) == ("tokens" in data):
            raise InputError(f"{path.name} must give either steps or tokens to the solution")
        if "steps" in data:
            steps = data["steps"]
        else:
            tokens = data["tokens"]
            if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
                raise InvalidValue(f"tokens in {path.name}", tokens, "an integer of at least 1")
            steps = -(-tokens // (global_batch * sequence_length))
        optional = {k: data[k] for k in ("precision", "learning_rate", "seed") if k in data}
        return cls(
            name=name,
            model=model,
            sequence_length=sequence_length,
            global_batch=global_batch,
            steps=steps,
            **optional,
        )


def _data_folder(kind: str) -> Any:
    return resources.files("search_spaces") / "data" / kind


def _names(kind: str, suffix: str) -> list[str]:
    return sorted(
        entry.name.removesuffix(suffix)
        for entry in _data_folder(kind).iterdir()
        if entry.name.endswith(suffix)
    )


def _load_model(config: Any, beside: Path) -> dict[str, Any]:
    """A model's configuration: inline, by the name of one shipped, or by path."""
    if isinstance(config, dict):
        return config
    if not isinstance(config, str):
        raise InvalidValue("model.config", config, "a path, a shipped model's name, or a table")
    shipped = _data_folder("models") / f"{config}.json"
    source = shipped if shipped.is_file() else beside / config
    if not source.is_file():
        raise InputError(
            f"model config {config!r} is neither a file nor one of "
            + ", ".join(_names("models", ".json"))
        )
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the model config {config!r}: {error}") from error
    if not isinstance(data, dict):
        raise InvalidValue(f"model config {config!r}", type(data).__name__, "a JSON object")
    return data


def job_names() -> list[str]:
    """The jobs that joulefront ships."""
    return _names("jobs", ".toml")


def load_job(name_or_path: str | Path | None = None) -> TrainingJob:
    """A job by shipped name or by path; with none, the default job of a machine without a GPU.

    Raises:
        InputError: neither a shipped name nor a readable job file.
    """
    text = str(name_or_path or "tiny-gpt")
    if text in job_names():
        with resources.as_file(_data_folder("jobs") / f"{text}.toml") as path:
            return TrainingJob.from_toml(path)
    if not Path(text).is_file():
        raise UnknownName("job", text, [*job_names(), "or the path of a job.toml"])
    return TrainingJob.from_toml(text)
