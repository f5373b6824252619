"""Training jobs: model, batch, sequence length and number of steps.

A `TrainingJob` gives its model by a Hugging Face `config.json`, so that any architecture can be
described offline, and fixes the global batch: micro-batch x accumulation x data parallelism always
equals it, so that no choice of the tuner changes what the model learns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.data_files import (
    check_keys,
    data_folder,
    find_file,
    included_names,
    parse_toml,
    read_json_object,
)
from tuner.search_spaces.errors import LARGEST, InputError, InvalidValue, check_integer, reason
from tuner.search_spaces.knob_declarations import Knob, check_knobs, read_knobs
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.options import check_options, limited
from tuner.search_spaces.program import LoRA, Program
from tuner.search_spaces.safe_files import read_text
from tuner.search_spaces.today_facts import TodayFacts
from tuner.search_spaces.typed_json import names_a_file, plain_text, whole_number

Precision = Literal["fp32", "bf16", "fp16"]
_OPTIONAL = ("precision", "learning_rate", "seed", "frames")


@dataclass(frozen=True)
class TrainingJob:
    """Model to train and amount of training.

    Attributes:
        sequence_length: tokens per sequence, including those of its video.
        global_batch: sequences per optimizer step, over all replicas.
        steps: number of optimizer steps to the solution; None if the length is unknown.
        frames: video frames per sequence, for a model that encodes them; 0 for text alone.
        steps_at: number of optimizer steps to the solution at other global batches.
        noise_scale: the gradient noise scale, sequences, which gives the steps at any global batch
            (McCandlish et al. 2018, arXiv 1812.06162, section 2): min_steps x (1 + noise_scale
            / global batch). 0 if unknown.
        knobs: knobs that the user declares, in the order of `check_knobs`.
        program: what the training program does that no knob states, for predictions.
    """

    name: str
    model: Mapping[str, Any] = field(hash=False)
    sequence_length: int
    global_batch: int
    steps: int | None = None
    precision: Precision = "bf16"
    learning_rate: float = limited(default=1e-4, above=0)
    seed: int = limited(default=0, least=0)
    frames: int = limited(default=0, least=0)
    steps_at: Mapping[int, int] = field(default_factory=dict, hash=False)
    noise_scale: float = limited(default=0.0, least=0)
    min_steps: float = limited(default=0, least=0)
    knobs: tuple[Knob, ...] = ()
    lora: LoRA | None = None
    program: Program = field(default_factory=Program)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidValue("name of a job", self.name, "text")
        if not isinstance(self.model, Mapping):
            raise InvalidValue(f"model in job {self.name!r}", self.model, "a table")
        self._check_batches()
        where = f"in job {self.name!r}"
        if not self.model or "model_type" not in self.model:
            raise InputError(
                f'job {self.name!r} has no model; give [model] config = "PATH of a Hugging Face '
                'config.json" (it must hold model_type)'
            )
        for name in ("sequence_length", "global_batch"):
            check_integer(f"{name} {where}", getattr(self, name))
        if self.steps is not None:
            check_integer(f"steps {where}", self.steps)
        check_options(self, where)
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise InvalidValue(f"precision {where}", self.precision, "one of fp32, bf16, fp16")
        if self.lora is not None:
            self.lora.check(self.model, f"job {self.name!r}")
        if self.program.pure_bf16 and self.precision != "bf16":
            raise InputError(f'pure_bf16 {where} needs precision = "bf16", not {self.precision}')

    def _check_batches(self) -> None:
        where, table = f"in job {self.name!r}", {}
        if not isinstance(self.steps_at, Mapping):
            raise InvalidValue(f"steps_at {where}", self.steps_at, "a table of batch = steps")
        for size, steps in self.steps_at.items():
            if not (batch := whole_number(str(size))):
                raise InvalidValue(f"a size of steps_at {where}", size, "an integer of at least 1")
            table[batch] = check_integer(f"steps_at {size} {where}", steps)
        object.__setattr__(self, "steps_at", dict(sorted(table.items())))
        if bool(self.noise_scale) != bool(self.min_steps):
            raise InputError(f"noise_scale and min_steps {where} are given together or not at all")
        if table and self.noise_scale:
            raise InputError(f"give steps_at or noise_scale {where}, not both")
        if table and table.get(self.global_batch) != self.steps:
            raise InputError(
                f"steps_at {where} must hold the job's own global batch {self.global_batch} "
                f"with its {self.steps} steps"
            )

    def steps_with(self, global_batch: int) -> int | None:
        """Return the number of optimizer steps to the solution at a global batch, or None."""
        if global_batch == self.global_batch:
            return self.steps
        if self.noise_scale:
            return math.ceil(self.min_steps * (1 + self.noise_scale / global_batch))
        return self.steps_at.get(global_batch)

    def lasting(self, steps: int | None) -> Self:
        """Return this job with a length if its own is unknown."""
        return self if self.steps is not None else replace(self, steps=steps)

    @property
    def global_batches(self) -> tuple[int, ...]:
        """Global batches to choose from: the table's, or the job's own and four around it."""
        if self.noise_scale:
            quarters = [self.global_batch * n for n in (1, 2, 4, 8, 16)]
            return tuple(n // 4 for n in quarters if n % 4 == 0)
        return tuple(self.steps_at) or (self.global_batch,)

    def at(self, configuration: Configuration) -> Self:
        """Return this job at a configuration's global batch, with its steps there."""
        chosen = configuration.get("global_batch")
        if chosen is None or chosen == self.global_batch:
            return self
        steps = self.steps_with(chosen) if isinstance(chosen, int) else None
        if steps is None:
            legal = ", ".join(map(str, self.global_batches))
            raise InvalidValue("global_batch", chosen, f"one of {legal}")
        assert isinstance(chosen, int)
        own: dict[str, Any] = {"steps_at": {}, "noise_scale": 0.0, "min_steps": 0}
        return replace(self, global_batch=chosen, steps=steps, **own)

    @property
    def compiled(self) -> bool:
        """True if the program compiles its model unless a knob decides."""
        return False

    @property
    def on_deepspeed(self) -> bool:
        """True if DeepSpeed trains it, so that its rules and ops are needed."""
        return True

    @property
    def request_fields(self) -> dict[str, Any]:
        """The field of a request that holds the tuned training."""
        return {"job": self}

    def started_by(self, built_in: Callable[[TrainingJob], Any]) -> Any:
        """Return the job that starts the ranks: this one if it can, else the result of
        `built_in`."""
        return built_in(self)

    @property
    def splits_model(self) -> bool:
        """True if the program can divide any model among its ranks."""
        return True

    @property
    def trains_synthetic_data(self) -> bool:
        """True if the program trains made-up data, in place of the user's own program."""
        return True

    @property
    def counts_batches(self) -> bool:
        """True if the program's first steps show the size of its batches."""
        return False

    @property
    def first_step_s(self) -> float:
        """Seconds from an earlier launch to its first step; 0 if there was none."""
        return 0.0

    @property
    def needed_folder(self) -> str:
        """The folder that every node must have; "" if there is none."""
        return ""

    @property
    def stated(self) -> Mapping[str, Value]:
        """The knobs that the user's command states, with today's values."""
        return {}

    def today_facts(self, today: Configuration | None = None) -> TodayFacts | None:
        """Return today's training, by default the command's; None without a command."""
        return None

    @property
    def is_modelled(self) -> bool:
        """True if the analytic models can predict it: model and sequence length are known."""
        return bool(self.model and self.sequence_length)

    def to_json(self) -> dict[str, Any]:
        """Return plain types for JSON, which the built-in training program reads."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "model": dict(self.model),
            "steps_at": {str(size): steps for size, steps in self.steps_at.items()},
            "knobs": {knob.name: knob.to_table() for knob in self.knobs},
            "lora": self.lora.to_table() if self.lora else None,
            "program": self.program.to_table(),
        }
        optional = ("steps_at", "noise_scale", "min_steps", "knobs", "lora", "program")
        return {name: value for name, value in data.items() if value or name not in optional}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainingJob:
        """Read the output of `to_json`."""
        try:
            given = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
            if given.get("knobs"):
                given["knobs"] = read_knobs(given["knobs"], "the job")
            if given.get("lora"):
                given["lora"] = LoRA.from_table(given["lora"], "the job")
            if "program" in given:
                given["program"] = Program.from_table(given["program"], "the job")
            return cls(**given)
        except TypeError as error:
            raise InputError(f"this is not a job: {error}") from error

    @classmethod
    def from_toml(cls, path: str | Path) -> TrainingJob:
        """Read a job file."""
        path = Path(path)
        try:
            data = parse_toml(read_text(path))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the job {path}: {reason(error)}") from error
        except (ValueError, RecursionError) as error:
            if path.suffix != ".json":
                raise InputError(f"{path} is not valid TOML: {error}") from error
            raise InputError(
                f"{path} is not a job: a job is a TOML file that gives the batch and the steps, "
                f'and names the model by [model] config = "{path.name}"'
            ) from error
        check_keys(data, (*cls.__dataclass_fields__, "tokens"), path.name)
        name = str(data.get("name") or path.stem)
        table = data.get("model")
        if not isinstance(table, dict) or "config" not in table:
            raise InputError(
                f'job {name!r} has no model; give [model] config = "PATH of a Hugging Face '
                "config.json, or one of " + ", ".join(included_names("models", ".json")) + '"'
            )
        check_keys(table, ("config",), f"[model] of {path.name}")
        model = _load_model(table["config"], path.parent)
        sequence_length, global_batch = (
            check_integer(f"{key} in {path.name}", data.get(key))
            for key in ("sequence_length", "global_batch")
        )
        names = ("steps_at", "noise_scale", "min_steps")
        by_batch: dict[str, Any] = {k: data[k] for k in names if k in data}
        if by_batch and ("steps" in data or "tokens" in data):
            raise InputError(
                f"{path.name} gives the steps by {next(iter(by_batch))}; leave steps and tokens out"
            )
        if not by_batch and ("steps" in data) == ("tokens" in data):
            raise InputError(f"{path.name} must give either steps or tokens to the solution")
        if by_batch:
            steps = _steps_by_batch(by_batch, global_batch, path.name)
        elif "steps" in data:
            steps = data["steps"]
        else:
            tokens = check_integer(f"tokens in {path.name}", data["tokens"], most=LARGEST**2)
            steps = -(-tokens // (global_batch * sequence_length))
        optional = by_batch | {k: data[k] for k in _OPTIONAL if k in data}
        if "knobs" in data:
            optional["knobs"] = check_knobs(read_knobs(data["knobs"], path.name))
        if "lora" in data:
            optional["lora"] = LoRA.from_table(data["lora"], path.name)
        if "program" in data:
            optional["program"] = Program.from_table(data["program"], path.name)
        return cls(name, model, sequence_length, global_batch, steps, **optional)


def _steps_by_batch(given: Mapping[str, Any], global_batch: int, where: str) -> int:
    if "steps_at" in given:
        table = given["steps_at"]
        if not isinstance(table, dict) or str(global_batch) not in table:
            raise InputError(
                f"[steps_at] of {where} must hold the job's own global batch {global_batch}"
            )
        return table[str(global_batch)]
    for name in ("noise_scale", "min_steps"):
        value = given.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e18:
            raise InvalidValue(f"{name} in {where}", value, "a number above 0")
    return math.ceil(float(given["min_steps"]) * (1 + float(given["noise_scale"]) / global_batch))


def _load_model(config: Any, beside: Path) -> dict[str, Any]:
    if isinstance(config, dict):
        return config
    if not isinstance(config, str):
        raise InvalidValue("model.config", config, "a path, a shipped model's name, or a table")
    shipped = data_folder("models") / f"{config}.json"
    source = shipped if names_a_file(shipped) else beside / config
    if not names_a_file(source):
        raise InputError(
            f"model config {config!r} is neither a file nor one of "
            + ", ".join(included_names("models", ".json"))
        )
    return read_json_object(source, f"model config {config!r}")


def job_names() -> list[str]:
    """Return the names of the jobs that joulefront includes."""
    return included_names("jobs")


def job_of(job: TrainingJob | str | Path | None) -> TrainingJob:
    """Return a job, by shipped name or path where it is not given itself."""
    return load_job(job) if job is None or isinstance(job, str | Path) else job


def load_job(name_or_path: str | Path | None = None) -> TrainingJob:
    """Load a job by shipped name or by path; by default that of a machine without a GPU."""
    text = str(name_or_path or "tiny-gpt")
    if text.endswith(".py"):
        raise InputError(f"{text} is a script: tuner optimize -- {text}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not names_a_file(Path(text)):
        raise InputError(
            f"{text!r} is neither a file nor a built-in job (`tuner list jobs`); a Hugging Face "
            "model is named in a job file by its config.json (docs/quickstart-laptop.md), and "
            f"`tuner fit {text}` predicts one alone"
        )
    file, _ = find_file("jobs", text, "job", other=("or the path of a job.toml",))
    with resources.as_file(file) as path:
        job = TrainingJob.from_toml(path)
    plain_text(job.name, f"the name of the job in {text}")
    return job


def steps_a_job_step(configuration: Configuration, job: TrainingJob | None) -> float:
    """Return the steps at the configuration's global batch that replace one of the job's."""
    if job is None or job.steps is None:
        return 1.0
    return (job.at(configuration).steps or job.steps) / job.steps
