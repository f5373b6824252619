"""Sharding, pipeline schedules, compilation and selective checkpointing by a framework's own keys.

What is written for a configuration is read back as that configuration.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.scripts import CPU, on_every_device
from tuner.problem.from_job import _runnable, problem_parts
from tuner.problem.job_request import JobRequest
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.rules import broken_rules
from tuner.search_spaces.space import load_space
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.frameworks.driver import read_driver
from tuner.workload.scripts.script_job import ScriptJob

NODE = replace(CPU, devices_per_node=8)
MEGATRON = Path(__file__).parents[3] / "scripts" / "megatron"
FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 64 --train-iters 500"
)
TITAN = (
    '[activation_checkpoint]\nmode = "none"\n[training]\nlocal_batch_size = 4\nsteps = 700\n'
    "[parallelism]\n"
)
AUTOMODEL = "step_scheduler:\n  local_batch_size: 2\n  global_batch_size: 64\n"
FSDP = "ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_RESHARD_AFTER_FORWARD=true"
MESH = (
    "ACCELERATE_USE_PARALLELISM_CONFIG=true PARALLELISM_CONFIG_DP_REPLICATE_SIZE=1 "
    "PARALLELISM_CONFIG_DP_SHARD_SIZE=8"
)


def looked_at(command: str, folder: Path) -> ScriptJob:
    """The job after a look that showed a plain torch loop."""
    blank = on_every_device(Script(command, cwd=folder), NODE)
    return replace(blank, frame=replace(blank.frame, kind="torch", measured=True))


def titan(folder: Path, text: str = TITAN) -> ScriptJob:
    (folder / "torchtitan").mkdir(exist_ok=True)
    (folder / "torchtitan" / "train.py").touch()
    (folder / "run.toml").write_text(text)
    return looked_at("torchtitan/train.py --job.config_file run.toml", folder)


def megatron(folder: Path, more: str = "") -> ScriptJob:
    return looked_at(f"pretrain_gpt.py {FLAGS} {more}", MEGATRON)


def automodel(folder: Path) -> ScriptJob:
    (folder / "f.yaml").write_text(AUTOMODEL)
    return looked_at("-m nemo_automodel.recipes.llm.train_ft --config f.yaml", folder)


def trainer(folder: Path) -> ScriptJob:
    (folder / "sft.py").write_text("from transformers import HfArgumentParser\n")
    return looked_at(f"{FSDP} python sft.py --per_device_train_batch_size 4", folder)


def accelerated(folder: Path) -> ScriptJob:
    (folder / "own.py").write_text("from accelerate import Accelerator\n")
    return looked_at(f"{FSDP} {MESH} python own.py", folder)


def axolotl(folder: Path) -> ScriptJob:
    (folder / "a.yaml").write_text("micro_batch_size: 2\nfsdp_version: 2\n")
    return looked_at("-m axolotl.cli.train a.yaml", folder)


def nanogpt(folder: Path) -> ScriptJob:
    (folder / "train.py").write_text(
        "gradient_accumulation_steps = 40\nbatch_size = 12\ncompile = True\n"
        "exec(open('configurator.py').read())\n"
    )
    return looked_at("train.py", folder)


def bridge(folder: Path) -> ScriptJob:
    (folder / "run.py").write_text("from megatron.bridge import recipes\n")
    degrees = "".join(
        f"model.{name}_parallel_size={n} "
        for name, n in (("tensor_model", 1), ("pipeline_model", 1), ("context", 1))
    )
    return looked_at(
        f"run.py {degrees} train.micro_batch_size=2 train.global_batch_size=64 "
        "model.virtual_pipeline_model_parallel_size=null model.recompute_granularity=null",
        folder,
    )


MAKERS = {
    made.__name__: made
    for made in (titan, megatron, automodel, trainer, accelerated, axolotl, nanogpt, bridge)
}


def applied(job: ScriptJob, folder: Path, **knobs: Any) -> ScriptJob:
    """The job of the command that is started for a configuration."""
    other = Configuration.of({**job.baseline.launch, **knobs})
    assert job.refused(other) == []
    start = job.start(other, folder / "probe", probe=False)
    env = " ".join(f"{name}={value}" for name, value in start.env.items())
    python = "" if start.words[0] == "-m" else "python "
    return looked_at(f"{env} {python}{shlex.join(start.words)}", Path(job.cwd))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("titan", {"sharding": "deepspeed"}),
    ("titan", {"sharding": "fsdp2_no_reshard"}),
    ("titan", {"sharding": "fsdp2", "hsdp_replicas": 2}),
    ("titan", {"sharding": "fsdp2_no_reshard", "hsdp_replicas": 4}),
    ("titan", {"compilation": "regional"}),
    *(
        ("titan", {"activation_checkpointing": level})
        for level in ("selective", "every_2", "every_4", "every_8", "full")
    ),
    *(
        (name, {"data_parallel": 4, "pipeline_parallel": 2, **schedule})
        for name in ("titan", "automodel")
        for schedule in (
            {},
            {"pipeline_schedule": "interleaved", "virtual_stages": 2},
            {"pipeline_schedule": "zero_bubble", "virtual_stages": 2},
        )
    ),
    (
        "megatron",
        {
            **{"data_parallel": 4, "pipeline_parallel": 2},
            **{"pipeline_schedule": "interleaved", "virtual_stages": 4},
        },
    ),
    ("megatron", {"activation_checkpointing": "selective"}),
    ("megatron", {"activation_checkpointing": "full"}),
    ("automodel", {"sharding": "fsdp2_no_reshard", "hsdp_replicas": 2}),
    ("automodel", {"compilation": "regional", "activation_checkpointing": "selective"}),
    ("automodel", {"compilation": "full"}),
    ("trainer", {"sharding": "fsdp2_no_reshard", "compilation": "full"}),
    ("accelerated", {"sharding": "fsdp2_no_reshard", "hsdp_replicas": 2}),
    ("accelerated", {"compilation": "regional"}),
    ("accelerated", {"compilation": "full"}),
    ("axolotl", {"hsdp_replicas": 4, "activation_checkpointing": "selective"}),
    ("axolotl", {"compilation": "full", "data_parallel": 4, "tensor_parallel": 2}),
    ("nanogpt", {"compilation": "none"}),
    ("bridge", {"activation_checkpointing": "selective"}),
    ("bridge", {"activation_checkpointing": "full"}),
    (
        "bridge",
        {
            **{"data_parallel": 4, "pipeline_parallel": 2},
            **{"pipeline_schedule": "interleaved", "virtual_stages": 2},
        },
    ),
]


@pytest.mark.parametrize(("name", "knobs"), CASES, ids=lambda part: str(part).replace(" ", ""))
def test_what_is_written_is_read_back(name: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    job = MAKERS[name](tmp_path)
    assert broken_rules(job.baseline, job, NODE) == []
    read = applied(job, tmp_path, **knobs)
    assert {knob: read.baseline.get(knob) for knob in knobs} == knobs
    assert broken_rules(read.baseline, read, NODE) == []
    # And back to where it came from.
    again = applied(read, tmp_path / "again", **_defaults(job, knobs))
    assert {knob: again.baseline.get(knob) for knob in knobs} == _defaults(job, knobs)


def _defaults(job: ScriptJob, knobs: dict[str, Any]) -> dict[str, Any]:
    return {knob: job.baseline.get(knob) for knob in knobs}


def test_ddp_and_hsdp_share_a_key_of_torchtitan(tmp_path: Path) -> None:
    job = titan(tmp_path, TITAN + "data_parallel_replicate_degree = 8\n"
                "data_parallel_shard_degree = 1\n")  # fmt: skip
    assert (job.baseline.get("sharding"), job.baseline.get("hsdp_replicas")) == ("deepspeed", 1)
    read = applied(job, tmp_path, sharding="fsdp2", hsdp_replicas=2)
    assert (read.baseline.get("sharding"), read.baseline.get("hsdp_replicas")) == ("fsdp2", 2)
    assert applied(read, tmp_path / "b", sharding="fsdp2", hsdp_replicas=1).baseline.get(
        "hsdp_replicas"
    ) == 1  # fmt: skip
    alone = Configuration.of({**read.baseline.launch, "hsdp_replicas": 8})
    assert read.refused(alone) == ["hsdp_replicas 8 leaves one rank of each group to shard over"]


def test_torchtitan_checkpoints_every_second_block_where_it_is_told_nothing(tmp_path: Path) -> None:
    job = titan(tmp_path, "[training]\nlocal_batch_size = 4\n")
    assert job.baseline.get("activation_checkpointing") == "every_2"
    assert job.start(job.baseline, tmp_path / "probe", probe=False).words == job.words


def test_a_layout_of_layers_today_is_kept(tmp_path: Path) -> None:
    job = megatron(tmp_path, "--num-layers-per-virtual-pipeline-stage 2")
    assert not job.offers["virtual_stages"].turned
    assert not job.offers["pipeline_schedule"].turned


def test_virtual_stages_divide_the_layers_too(tmp_path: Path) -> None:
    job = megatron(tmp_path)
    other = {"data_parallel": 2, "pipeline_parallel": 4, "virtual_stages": 4}
    refused = job.refused(Configuration.of(
        {**job.baseline.launch, **other, "pipeline_schedule": "interleaved"}
    ))  # fmt: skip
    assert refused == [
        "pipeline_parallel x virtual_stages = 16 does not divide num-layers = 8: each pipeline "
        "stage has equally many layers"
    ]


def test_megatrons_fsdp2_is_in_play_where_it_is_on(tmp_path: Path) -> None:
    assert not megatron(tmp_path).offers["sharding"].turned
    job = megatron(tmp_path, "--use-torch-fsdp2")
    assert job.baseline.get("sharding") == "fsdp2"
    read = applied(job, tmp_path, sharding="fsdp2_no_reshard")
    assert read.baseline.get("sharding") == "fsdp2_no_reshard"


def test_a_space_with_zero_stages_searches_fsdp2_where_that_is_what_there_is(
    tmp_path: Path,
) -> None:
    space = load_space("default")
    assert "sharding" not in space.choices
    narrowed = titan(tmp_path).narrowed(space)
    assert {*narrowed.choices["sharding"]} == {"deepspeed", "fsdp2", "fsdp2_no_reshard"}
    assert narrowed.choices.get("zero_stage", (0,)) == (0,)
    found = _runnable(problem_parts(JobRequest(titan(tmp_path), NODE, "default")))
    shardings = {c.get("sharding") for c in found.candidates}
    assert shardings == {*narrowed.choices["sharding"]}
    assert "sharding" in found.notes[0]
    assert "sharding" not in found.notes[1]
    fixed = titan(tmp_path).narrowed(load_space("clocks"))
    assert fixed.choices["sharding"] == ("deepspeed", "fsdp2")
    # Not a value that the framework cannot take.
    sharded = trainer(tmp_path).narrowed(load_space("clocks")).choices["sharding"]
    assert "deepspeed" not in sharded
    assert "sharding" not in megatron(tmp_path).narrowed(space).choices


def test_accelerates_mesh_holds_the_ranks_of_one_group(tmp_path: Path) -> None:
    job = accelerated(tmp_path)
    assert job.driven is not None
    assert job.driven.today["data_parallel"] == 8
    other = Configuration.of({**job.baseline.launch, "hsdp_replicas": 2})
    env = job.start(other, tmp_path / "probe", probe=False).env
    assert env["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert env["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "4"


def test_a_level_whose_key_is_gone_is_not_offered(tmp_path: Path) -> None:
    schemas = tmp_path / "axolotl" / "utils" / "schemas"
    schemas.mkdir(parents=True)
    keys = ("gradient_checkpointing", "micro_batch_size", "gradient_accumulation_steps")
    fields = "".join(f"    {key}: int = 1\n" for key in keys)
    (schemas / "config.py").write_text(f"class Input:\n{fields}")
    (schemas / "fsdp.py").write_text("class FSDPConfig:\n    offload_params: bool = False\n")
    job = axolotl(tmp_path)
    assert job.driver is not None
    assert "selective_checkpointing" in job.driver.gone
    assert job.offers["activation_checkpointing"].values == ("none", "full")
    assert job.offers["compilation"].values == ("none",)
    assert not job.offers["tensor_parallel"].turned
    start = job.start(
        Configuration.of({**job.baseline.launch, "activation_checkpointing": "full"}),
        tmp_path / "p",
    )
    assert yaml.safe_load(Path(start.words[-1]).read_text())["gradient_checkpointing"] is True


OWN: dict[str, Any] = {
    "framework": "mine",
    "recognise": {"modules": ["mine"]},
    "knobs": {"hsdp_replicas": {"key": "groups", "default": 1, "when": "sharding != 'deepspeed'"}},
}


@pytest.mark.parametrize(
    ("route", "sentence"),
    [({"when": "sharing != 1"}, "sharing"), ({"over": ["replicas"]}, "unknown knob 'replicas'")],
)
def test_a_wrong_condition_of_a_route_is_one_sentence(route: Any, sentence: str) -> None:
    read_driver(OWN, "mine.toml")
    knobs = {"hsdp_replicas": {**OWN["knobs"]["hsdp_replicas"], **route}}
    with pytest.raises(InputError, match=sentence):
        read_driver({**OWN, "knobs": knobs}, "mine.toml")
