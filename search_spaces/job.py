"""Training jobs: model, batch, sequence length and number of steps.

A `TrainingJob` gives its model by a Hugging Face `config.json`, so that any architecture can be
described offline, and fixes the global batch: micro-batch x accumulation x data parallelism always
equals it, so that no choice of the tuner changes what the model learns. `Program` holds what no
knob states of its program, and `TodayFacts` how a script trains today, each with its source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
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
from tuner.search_spaces.fields import (
    check_fields,
    check_options,
    limited,
    names_a_file,
    plain_text,
    whole_number,
)
from tuner.search_spaces.knob_declarations import Knob, check_knobs, read_knobs
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.safe_files import read_text


@dataclass(frozen=True)
class TodayFacts:
    """Today's training of a script; 0, or None for its steps, if unknown.

    Attributes:
        sources: where a value comes from, a phrase, by its name.
    """

    ranks: int
    replicas: int
    global_batch: int
    micro_batch: int
    accumulation: int
    steps: int | None
    knobs: Mapping[str, Value]
    sources: Mapping[str, str]

    @property
    def lines(self) -> tuple[str, ...]:
        """Ranks and batch, length, and today's knobs if there are any."""
        batch = "global batch unknown (--global-batch N tells it)"
        if self.global_batch:
            micro, times = self.micro_batch or "?", self.accumulation or "?"
            batch = f"global batch {self.global_batch} = micro-batch {micro} x accumulation {times}"
            batch += f" x {self.replicas} replica{'s' * (self.replicas != 1)}"
        of = self._batch_sources({})
        length = "unknown, so energy and time are per optimizer step (--steps N gives the total)"
        if self.steps:
            length = f"{self.steps:,} optimizer steps{self._source('steps')}"
        plural = "s" * (self.ranks != 1)
        return (
            f"today: {self.ranks} rank{plural}{self._source('ranks')}, {batch}"
            + (f" ({of})" if of else ""),
            f"length: {length}",
            *self._knob_lines({}),
        )

    def _knob_lines(self, told: Mapping[str, Value]) -> tuple[str, ...]:
        knobs = [
            f"{name}={value}{self._source(name)}"
            for name, value in self.knobs.items()
            if name not in ("data_parallel", "micro_batch")  # in the first line
            if told.get(name) != value
        ]
        return (f"today's knobs: {', '.join(knobs)}",) if knobs else ()

    def changed_lines(self, before: TodayFacts) -> tuple[str, ...]:
        """Return the lines that differ from earlier ones: of the knobs those that are new or have
        another value, and a proof where it is all that changed of the batch."""
        of_knobs = self._knob_lines(before.knobs)
        here, there = replace(self, knobs={}), replace(before, knobs={})
        proven = self._batch_sources(before.sources)
        if proven and replace(here, sources={}) == replace(there, sources={}):
            return (f"proven: {proven}", *of_knobs)
        changed = [line for line in here.lines if line not in there.lines]
        return (*changed, *of_knobs)

    def _batch_sources(self, told: Mapping[str, str]) -> str:
        # Where the parts of the batch come from, without what was told.
        found: dict[str, list[str]] = {}
        for name in ("micro_batch", "accumulation"):
            if name in self.sources and self.sources[name] != told.get(name):
                found.setdefault(self.sources[name], []).append(name.replace("_", "-"))
        return "; ".join(f"{' and '.join(names)}: {source}" for source, names in found.items())

    def _source(self, name: str) -> str:
        return f" ({self.sources[name]})" if name in self.sources else ""

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values, null for unknown ones."""
        unknown = ("global_batch", "micro_batch", "accumulation", "steps")
        data = {**vars(self), "knobs": dict(self.knobs), "sources": dict(self.sources)}
        return {n: None if n in unknown and not value else value for n, value in data.items()}


#: Legal values of `dropout`.
DROPOUTS = ("none", "hidden", "all")
#: Legal values of `partition`.
PARTITIONS = ("blocks", "ends", "parameters", "flops")
#: Legal values of `optimizer`.
OPTIMIZERS = ("adamw", "adamw_32bit", "adamw_8bit")


@dataclass(frozen=True, kw_only=True)
class Program:
    """Behaviour of a training program that no knob states.

    Attributes:
        fused_attention: True if attention runs in a fused kernel, which stores no scores and skips
            those that the causal mask hides.
        tf32: True if fp32 products run on tensor cores (torch.backends.cuda.matmul.allow_tf32, or
            TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which NVIDIA's PyTorch containers set).
        dropout: what drops values, whose masks are kept: "none", "hidden" (the outputs of a block's
            two halves, in a model without gate), or "all" (scores too, if attention stores them).
        copies: number of copies of a rank's parameters that the engine keeps beside them.
        logits: False if the program makes no logits (its loss reads the last block's output).
        vocabulary_parallel_loss: True for Megatron-LM's loss, whose passes over the logits are
            kernels of their own.
        sequence_sharded: True if tensor-parallel ranks divide what is between their products, too
            (Megatron's --sequence-parallel; torchtitan always does).
        fused_blocks: True if norms keep their input alone and a gated MLP its two inputs and their
            product (Transformer Engine, Megatron-Core).
        fp32_gradients: True if gradients accumulate in fp32 (Megatron's
            --accumulate-allreduce-grads-in-fp32, its default in bf16).
        fused_loss: True if the loss keeps 16-bit logits and their gradient in their place.
        optimizer: "adamw", whose moments are as wide as what it updates; "adamw_32bit", whose
            moments are always fp32 (bitsandbytes' AdamW32bit); or "adamw_8bit" (bitsandbytes' or
            torchao's AdamW8bit).
        pure_bf16: True if weights and gradients are bf16 without fp32 weights, and with "adamw" the
            moments too (DeepSpeed's bf16_master_weights_and_grads with bf16_optimizer_states).
        partition: what pipeline stages have equal shares of: "blocks" alone (Megatron-LM,
            DeepSpeed's type:REGEX, the built-in program), blocks with the embedding and the head
            as one each ("ends", torchtitan), "parameters" (DeepSpeed's default), or "flops".
        frozen_16bit: True if what of a quantized model is not quantized stays in 16 bits (qlora.py
            with --bf16). False for PEFT's prepare_model_for_kbit_training, which makes embeddings,
            norms and head fp32, and with them the values between the layers.
    """

    fused_attention: bool = True
    tf32: bool = False
    dropout: Literal["none", "hidden", "all"] = "all"
    copies: int = 0
    logits: bool = True
    vocabulary_parallel_loss: bool = False
    sequence_sharded: bool = False
    fused_blocks: bool = False
    fp32_gradients: bool = False
    fused_loss: bool = False
    optimizer: Literal["adamw", "adamw_32bit", "adamw_8bit"] = "adamw"
    pure_bf16: bool = False
    partition: Literal["blocks", "ends", "parameters", "flops"] = "blocks"
    frozen_16bit: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "program")
        if self.dropout not in DROPOUTS:
            legal = f"one of {', '.join(DROPOUTS)}"
            raise InvalidValue("dropout of a program", self.dropout, legal)
        if self.optimizer not in OPTIMIZERS:
            legal = f"one of {', '.join(OPTIMIZERS)}"
            raise InvalidValue("optimizer of a program", self.optimizer, legal)
        if self.partition not in PARTITIONS:
            legal = f"one of {', '.join(PARTITIONS)}"
            raise InvalidValue("partition of a program", self.partition, legal)
        if self.copies < 0:
            raise InvalidValue("copies of a program", self.copies, "an integer of at least 0")
        if self.pure_bf16 and self.fp32_gradients:
            raise InputError("pure_bf16 and fp32_gradients of a program exclude each other")

    @classmethod
    def from_table(cls, data: Any, where: str) -> Program:
        """Read the table that `to_table` makes, or a subset of its keys."""
        if not isinstance(data, Mapping):
            raise InvalidValue(f"[program] of {where}", data, "a table")
        check_keys(data, cls.__dataclass_fields__, f"[program] of {where}")
        return cls(**data)

    def to_table(self) -> dict[str, Any]:
        """Return the differences from the built-in training program."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


#: Targets that are no names of modules.
TARGETS = ("attention", "all-linear")
#: Bytes per frozen weight of a block's linear layers (QLoRA: Dettmers et al. 2023, arXiv
#: 2305.14314, section 3; bitsandbytes 0.50.2): 4 bits and an fp32 scale per 64 weights, which
#: double quantization stores in 8 bits, with an fp32 scale per 256. None: as computed with. The
#: scale of a row of an 8-bit matrix is left out (LLM.int8: Dettmers et al. 2022, arXiv 2208.07339).
QUANTIZED = {
    **{"none": None, "nf4": 0.5 + 4 / 64, "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256)},
    "int8": 1.0,
}


@dataclass(frozen=True)
class LoRA:
    """Table `[lora]` of a job: low-rank adapters (Hu et al. 2021, arXiv 2106.09685).

    A linear layer y = W x of `n` inputs and `m` outputs becomes y = W x + B A x, where A is (rank,
    n) and B is (m, rank). Only A and B are trained: rank x (n + m) parameters. What is adapted
    decides what the model learns, so no search changes it.

    Attributes:
        rank: rank of every adapter. The product B A is added as it is: alpha equals the rank.
        targets: "attention" adapts the linear layers of attention, "all-linear" those of the MLP
            too; else names of modules with commas between them, or a regular expression of their
            paths, as peft reads them. Embedding and output projection stay frozen.
        quantization: how frozen weights of the blocks' linear layers are stored: "none", "nf4",
            "nf4-double" (QLoRA) or "int8". Embedding, norms and output projection are never
            quantized.
        dora: each adapter has a magnitude of each output, too (Liu et al. 2024, arXiv 2402.09353).
        text_alone: encoders of images or sound beside the language model have no adapters.
    """

    rank: int
    targets: str = "attention"
    quantization: str = "none"
    dora: bool = False
    text_alone: bool = False

    def __post_init__(self) -> None:
        check_integer("rank of [lora]", self.rank)
        if not isinstance(self.targets, str) or not self.targets.strip(" ,"):
            legal = f"{', '.join(TARGETS)} or names of modules, such as q_proj,v_proj"
            raise InvalidValue("targets of [lora]", self.targets, legal)
        if self.quantization not in list(QUANTIZED):
            legal = "one of " + ", ".join(QUANTIZED)
            raise InvalidValue("quantization of [lora]", self.quantization, legal)
        for name in ("dora", "text_alone"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValue(f"{name} of [lora]", getattr(self, name), "true or false")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules; empty for `TARGETS` and for a regular expression."""
        if self.targets in TARGETS or re.search(r"[()\[\]\\|*+?^$]", self.targets):
            return ()
        return tuple(name.strip() for name in self.targets.split(",") if name.strip())

    def to_table(self) -> dict[str, Any]:
        """Return the table, which the built-in training program reads too."""
        usual = {"quantization": "none", "dora": False, "text_alone": False}
        return {k: v for k, v in asdict(self).items() if k not in usual or v != usual[k]}

    @classmethod
    def from_table(cls, table: Any, where: str) -> LoRA:
        """Read the table `[lora]` of a job."""
        if not isinstance(table, Mapping):
            raise InvalidValue(f"lora in {where}", table, "a table with a rank")
        check_keys(table, cls.__dataclass_fields__, f"[lora] of {where}")
        if "rank" not in table:
            raise InputError(f"[lora] of {where} lacks its rank, such as rank = 16")
        return cls(**table)


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
