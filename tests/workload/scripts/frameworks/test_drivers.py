"""Drivers of frameworks: their files, and what they make of a command and its file."""

from __future__ import annotations

import copy
import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.scripts import CPU, on_every_device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.rules import broken_rules
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.frameworks.bound_driver import Bound
from tuner.workload.scripts.frameworks.driver import (
    Driver,
    check_version,
    load_drivers,
    read_driver,
    shipped_drivers,
)
from tuner.workload.scripts.frameworks.keys import check_keys
from tuner.workload.scripts.frameworks.settings import Renamed, Wrapper, read_function
from tuner.workload.scripts.script_job import ScriptJob

pytestmark = pytest.mark.usefixtures("launchers_here")

NODE = replace(CPU, devices_per_node=4)
MEGATRON = Path(__file__).parents[3] / "scripts" / "megatron"
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 32 --train-iters 500"
)
TITAN = """# ours
[job]
dump_folder = "out"

[training]
local_batch_size = 4 # sequences
seq_len = 128
steps = 700

[parallelism]
data_parallel_shard_degree = -1

[activation_checkpoint]
mode = "none"
"""


def looked_at(script: Script, **seen: Any) -> ScriptJob:
    """The job after a look that showed a plain torch loop."""
    blank = on_every_device(script, NODE)
    frame = replace(blank.frame, kind="torch", measured=True, **seen)
    return replace(blank, frame=frame).declares(script.knobs)


def titan(folder: Path, words: str = "", text: str = TITAN) -> ScriptJob:
    (folder / "torchtitan").mkdir(exist_ok=True)
    (folder / "torchtitan" / "train.py").touch()
    (folder / "run.toml").write_text(text)
    command = f"torchtitan/train.py --job.config_file run.toml {words}"
    return looked_at(Script(command, cwd=folder))


def started(job: ScriptJob, folder: Path, *, probe: bool = False, **knobs: Any) -> tuple[str, ...]:
    configuration = Configuration(Settings({**job.baseline.launch, **knobs}))
    return job.start(configuration, folder / "probe", probe=probe).words


# ---- the files


@pytest.mark.parametrize("driver", shipped_drivers(), ids=lambda d: f"{d.name}{d.versions}")
def test_a_shipped_driver_survives_its_json_and_can_keep_the_batch(driver: Driver) -> None:
    assert read_driver(json.loads(json.dumps(driver.table)), "the study's framework") == driver
    if "micro_batch" in driver.knobs:
        assert {"gradient_accumulation", "global_batch"} & set(driver.knobs)


GOOD: dict[str, Any] = {
    "framework": "mine",
    "recognise": {"modules": ["mine"]},
    "command": {"option": "--{key} {value}"},
    "knobs": {"micro_batch": {"key": "batch"}, "tensor_parallel": {"key": "tp", "default": 1}},
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.update(knob={}), "unknown key 'knob'"),
        (lambda d: d.pop("framework"), "framework in mine.toml must be a text"),
        (lambda d: d["recognise"].clear(), "must have modules, scripts, launchers or imports"),
        (lambda d: d["knobs"].update(micro_bach={"key": "b"}), "did you mean 'micro_batch'"),
        (lambda d: d["knobs"]["micro_batch"].update(keys="x"), "unknown key 'keys'"),
        (lambda d: d["knobs"]["micro_batch"].clear(), "either a key or levels"),
        (lambda d: d["knobs"].update(zero_stage={"levels": {"7": {"a": 1}}}), "zero_stage"),
        (lambda d: d["command"].update(option="--x"), "must hold {key} and {value}"),
        (lambda d: d["command"].update(truth="yes"), "unknown truth 'yes'"),
        (lambda d: d.update(world={"divide": ["pipeline_parallel"]}), "not one of its knobs"),
        (lambda d: d.update(versions="2.x"), "must be like"),
        (lambda d: d.update(rules=[{"why": "w"}]), "either require, or divide and of"),
        (lambda d: d.update(rules=[{"why": "w", "require": "zero > 1"}]), "unknown knob 'zero'"),
        (lambda d: d.update(keys=[1]), "must be a list of texts"),
        (lambda d: d.update(probe={"env": {"LD_PRELOAD": "x.so"}}), "would start code of its own"),
        (lambda d: d.update(probe={"env": {"PYTHONPATH": "x"}}), "would start code of its own"),
        (lambda d: d.update(declared={"c": {"key": "c"}}), "has no values"),
        (lambda d: d.update(facts={"modle": "m"}), "did you mean 'model'"),
        (lambda d: d.update(renamed={"key": "a"}), "must be a list of tables"),
        (lambda d: d.update(renamed=[{"was": ["b"]}]), "key in .*must be a text"),
        (lambda d: d.update(renamed=[{"key": "a"}]), "must name what a was called"),
        (lambda d: d.update(renamed=[{"key": "a", "was": "b", "since": ">=1"}]), "like '0.12'"),
        (lambda d: d.update(renamed=[{"key": "a", "was": ["a"]}]), "a stands twice"),
        (
            lambda d: d.update(renamed=[{"key": "a", "was": "b"}, {"key": "b", "was": "a"}]),
            "stands twice",
        ),
        (lambda d: d.update(facts={"model": 5}), "must be a list of texts"),
        (lambda d: d.update(facts={"model": {"key": "m"}}), "unknown key 'key'"),
        (lambda d: d.update(facts={"lora_rank": {"default": "8"}}), "must be an integer"),
        (lambda d: d.update(facts={"precision": {"cases": {}}}), "must be a list of"),
        (lambda d: d.update(facts={"precision": {"cases": [["bf16"]]}}), "must be .value, "),
        (
            lambda d: d.update(facts={"precision": {"cases": [["bf61", {}]]}}),
            "unknown value 'bf61'",
        ),
        (lambda d: d.update(facts={"model": {"cases": [["llama", {}]]}}), "unknown value 'llama'"),
        (lambda d: d.update(facts={"lora": {"cases": [[["true"], {}]]}}), "unknown value"),
        *(
            (lambda d, v=v: d.update(declared={"c": {"key": "c", "values": v}}), "must be a list")
            for v in (5, True, "abc", {"a": 1})
        ),
    ],
)
def test_a_wrong_driver_is_one_sentence(change: Callable[[Any], Any], sentence: str) -> None:
    read_driver(GOOD, "mine.toml")
    data = copy.deepcopy(GOOD)
    change(data)
    with pytest.raises(InputError, match=sentence):
        read_driver(data, "mine.toml")


def nested(key: str, value: Any) -> dict[str, Any]:
    """Tables in which a key with dots has a value."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


ROWS = [(d, row, old) for d in shipped_drivers() for row in d.renamed for old in row.was]


@pytest.mark.parametrize(
    ("driver", "row", "old"), ROWS, ids=[f"{d.name}-{old}" for d, _, old in ROWS]
)
def test_a_key_is_read_by_its_earlier_name_and_written_as_it_stands(
    driver: Driver, row: Renamed, old: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(nested(old, 2)))
    option = next((option for option in driver.command.file if option != "first"), None)
    words = ("train", option, "run.json") if option else ("train", "run.json")
    settings = Bound(driver).settings(words, tmp_path, {})
    assert settings.get(row.key) == 2
    changed, _ = settings.changed({row.key: 4}, tmp_path / "probe")
    assert json.loads(Path(changed[-1]).read_text()) == nested(old, 4)
    file.write_text(json.dumps(nested(row.key, 3) | {"other": 1}))
    assert settings.get(row.key) == 3
    in_command = Bound(driver).settings((*words, f"--{old}", "8"), tmp_path, {})
    assert in_command.get(row.key) == 8 or "--" not in driver.command.option
    file.write_text("{}")
    changed, _ = settings.changed({row.key: 4}, tmp_path / "probe")
    assert json.loads(Path(changed[-1]).read_text()) == nested(row.key, 4)
    former = Bound(driver, former={row.key: old}).settings(words, tmp_path, {})
    changed, _ = former.changed({row.key: 4}, tmp_path / "probe")
    assert json.loads(Path(changed[-1]).read_text()) == nested(old, 4)
    bound = Bound(driver, "0", (), {}, {row.key: old})
    assert Bound.from_json(bound.to_json()) == bound
    assert Bound.from_json(bound.to_json()).former == bound.former


@pytest.mark.parametrize(
    ("version", "source", "former"),
    [
        ("0.11.0", None, {"batch": "old_batch"}),
        ("0.12", None, {}),
        ("1.0", None, {}),
        ("", None, {}),
        ("", "old_batch = 1", {"batch": "old_batch"}),
        ("", "older = 1", {"batch": "older"}),
        ("", "batch = old_batch = 1", {}),
        ("0.12", "old_batch = 1", {"batch": "old_batch"}),
        ("0.11", "batch = older = 1", {"batch": "older"}),
        ("", "nothing = 1", {}),
    ],
)
def test_an_earlier_release_is_given_a_key_by_its_earlier_name(
    version: str, source: str | None, former: dict[str, str], tmp_path: Path
) -> None:
    data = copy.deepcopy(GOOD)
    data["renamed"] = [{"key": "batch", "was": ["old_batch", "older"], "since": "0.12"}]
    data |= {"package": "mine-train", "keys": ["mine/config.py"]}
    (tmp_path / "mine").mkdir()
    if source is not None:
        (tmp_path / "mine" / "config.py").write_text(f"tp = 1\n{source}\n")
    if version:
        info = tmp_path / f"mine_train-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: mine-train\nVersion: {version}\n"
        )
    checked = check_keys(read_driver(data, "mine.toml"), [tmp_path])
    assert checked.former == former
    assert ("batch" in checked.gone) is (source == "nothing = 1")


def test_what_a_launcher_states_counts_where_a_framework_states_nothing(tmp_path: Path) -> None:
    text = (
        'framework = "mine"\nlaunched_by = "accelerate"\n[recognise]\nmodules = ["mine"]\n'
        '[facts]\nfsdp = "shard"\nfsdp_version = "version"\n'
    )
    (tmp_path / "mine.toml").write_text(text)
    (driver,) = load_drivers(tmp_path / "mine.toml")
    assert driver.facts["fsdp_version"].keys == ("version",)
    assert driver.facts["launcher_zero_stage"].keys == ("env:ACCELERATE_DEEPSPEED_ZERO_STAGE",)
    assert read_driver(json.loads(json.dumps(driver.table)), "the study's framework") == driver
    (tmp_path / "mine.toml").write_text(text.replace("accelerate", "acelerate"))
    with pytest.raises(InputError, match=r"unknown launched_by 'acelerate' in mine\.toml; did"):
        load_drivers(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("versions", "version", "within"),
    [
        (">=0.2,<0.3", "0.2.2", True),
        (">=0.2,<0.3", "0.3", False),
        (">=0.2,<0.3", "0.3.0rc1", False),
        ("", "1", True),
        ("==2.0", "2", True),
    ],
)
def test_versions(versions: str, version: str, within: bool) -> None:
    assert check_version(versions, version) is within


# ---- flags


def test_megatron_flags_are_read_and_set(tmp_path: Path) -> None:
    job = looked_at(Script(f"pretrain_gpt.py {FLAGS} --save ck", cwd=MEGATRON))
    assert job.driver is not None
    assert job.driver.driver.name == "megatron-lm"
    assert (job.global_batch, job.steps, job.sequence_length) == (32, 500, 32)
    assert (job.baseline.data_parallel, job.baseline.micro_batch) == (4, 2)
    assert job.start(job.baseline, tmp_path, probe=False).words == job.words
    words = started(
        job, tmp_path, data_parallel=1, tensor_parallel=2, pipeline_parallel=2, micro_batch=8,
        activation_checkpointing="full", zero_stage=1,
    )  # fmt: skip
    text = " ".join(words)
    assert "--micro-batch-size 8 --global-batch-size 32" in text
    assert text.endswith(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--use-distributed-optimizer --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    )
    assert "--save ck" in text
    assert "--save" not in started(job, tmp_path, probe=True)
    assert ScriptJob.from_json(job.to_json()) == job
    assert not job.needs_hook


def test_what_megatron_does_with_memory_is_read_from_its_command() -> None:
    plain, sharded = (
        looked_at(Script(f"pretrain_gpt.py {FLAGS}{more}", cwd=MEGATRON)).program
        for more in ("", " --sequence-parallel")
    )
    assert plain.fp32_gradients
    assert not plain.sequence_sharded
    assert sharded == replace(plain, sequence_sharded=True)


def test_what_stands_in_the_command_is_taken_away(tmp_path: Path) -> None:
    today = (
        f"{FLAGS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    job = looked_at(Script(f"pretrain_gpt.py {today} --use-distributed-optimizer", cwd=MEGATRON))
    assert job.baseline.get("activation_checkpointing") == "full"
    assert job.baseline.zero_stage == 1
    words = started(job, tmp_path, activation_checkpointing="none", zero_stage=0)
    assert not [word for word in words if "recompute" in word or "distributed" in word]


def test_rules_of_the_framework_refuse_with_their_reason() -> None:
    job = looked_at(Script(f"pretrain_gpt.py {FLAGS}", cwd=MEGATRON))
    refused = job.refused(
        Configuration.of({**job.baseline.launch, "data_parallel": 1, "tensor_parallel": 8})
    )
    assert refused == [
        "tensor_parallel = 8 does not divide num-attention-heads = 4: each rank of a "
        "tensor-parallel group holds whole attention heads"
    ]


def test_a_setting_that_is_no_level_is_kept(tmp_path: Path) -> None:
    command = f"pretrain_gpt.py {FLAGS} --recompute-granularity full --recompute-method block"
    job = looked_at(Script(command, cwd=MEGATRON))
    offer = job.offers["activation_checkpointing"]
    assert not offer.turned
    assert "recompute-granularity=full, recompute-method=block of today is kept" in offer.why
    assert "block" in started(job, tmp_path, micro_batch=4)


def test_a_placeholder_goes_before_the_driver(tmp_path: Path) -> None:
    flags = FLAGS.replace("--micro-batch-size 2", "--micro-batch-size {micro_batch=2}")
    job = looked_at(Script(f"pretrain_gpt.py {flags}", cwd=MEGATRON))
    assert job.baseline.micro_batch == 2
    assert "--micro-batch-size 4" in " ".join(started(job, tmp_path, micro_batch=4))


def test_knobs_that_the_space_lacks_are_those_of_the_framework(tmp_path: Path) -> None:
    script = Script(f"pretrain_gpt.py {FLAGS}", cwd=MEGATRON)
    script = replace(script, knobs=script.framework_knobs)
    job = looked_at(script)
    assert "overlap_grad_reduce" in {knob.name for knob in job.knobs}
    assert job.baseline.get("overlap_grad_reduce") == "false"
    assert "--overlap-grad-reduce" in started(job, tmp_path, overlap_grad_reduce="true")
    assert job.start(job.baseline, tmp_path, probe=False).words == job.words


def test_todays_value_of_such_a_knob_goes_before_its_default(tmp_path: Path) -> None:
    script = Script(f"pretrain_gpt.py {FLAGS} --overlap-grad-reduce", cwd=MEGATRON)
    job = looked_at(replace(script, knobs=script.framework_knobs))
    assert job.baseline.get("overlap_grad_reduce") == "true"
    assert "--overlap-grad-reduce" not in started(job, tmp_path, overlap_grad_reduce="false")


# ---- files


def test_a_toml_file_is_read_and_written(tmp_path: Path) -> None:
    job = titan(tmp_path)
    assert job.driver is not None
    assert (job.global_batch, job.steps, job.sequence_length) == (16, 700, 128)
    assert job.baseline.get("sharding") == "fsdp2"
    words = started(
        job, tmp_path, data_parallel=2, tensor_parallel=2, micro_batch=2,
        sharding="fsdp2_no_reshard", activation_checkpointing="full",
    )  # fmt: skip
    text = Path(words[-1]).read_text()
    data = tomllib.loads(text)
    assert data["training"] == {
        **{"local_batch_size": 2, "seq_len": 128, "steps": 700, "global_batch_size": 16}
    }
    assert data["parallelism"] == {
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 2,
        "fsdp_reshard_after_forward": "never",
    }
    assert data["activation_checkpoint"] == {"mode": "full"}
    assert (tmp_path / "run.toml").read_text() == TITAN


def test_a_flag_over_the_file_is_changed_where_it_stands(tmp_path: Path) -> None:
    job = titan(tmp_path, "--training.local-batch-size 2 --training.global_batch_size=32")
    assert (job.baseline.micro_batch, job.global_batch) == (2, 32)
    words = started(job, tmp_path, micro_batch=8)
    assert "--training.local-batch-size 8 --training.global_batch_size=32" in " ".join(words)


def test_one_rank_that_shards_by_default_is_a_valid_baseline(tmp_path: Path) -> None:
    text = TITAN.replace("shard_degree = -1", "shard_degree = -1\ntensor_parallel_degree = 4")
    job = titan(tmp_path, text=text)
    assert (job.baseline.data_parallel, job.baseline.get("sharding")) == (1, "fsdp2")
    assert broken_rules(job.baseline, job, NODE) == []
    assert job.refused(job.baseline) == []
    other = Configuration.of({**job.baseline.launch, "sharding": "fsdp2_no_reshard"})
    assert job.refused(other) == ["sharding over one replica repeats today's fsdp2"]


def test_ddp_is_kept_at_each_number_of_replicas(tmp_path: Path) -> None:
    text = TITAN.replace(
        "shard_degree = -1", "shard_degree = 1\ndata_parallel_replicate_degree = 4"
    )
    job = titan(tmp_path, text=text)
    assert job.baseline.get("sharding") == "deepspeed"
    assert job.baseline.get("hsdp_replicas") == 1
    words = started(job, tmp_path, data_parallel=2)
    assert tomllib.loads(Path(words[-1]).read_text())["parallelism"] == {
        "data_parallel_shard_degree": 1,
        "data_parallel_replicate_degree": 2,
    }


@pytest.mark.parametrize("form", ["run.yaml", "--config run.yaml"])
def test_the_yaml_of_a_trainer(tmp_path: Path, form: str) -> None:
    (tmp_path / "sft.py").write_text("from transformers import HfArgumentParser\n")
    (tmp_path / "run.yaml").write_text(
        "per_device_train_batch_size: 4 # fits\nlearning_rate: 1e-4\n"
    )
    job = looked_at(Script(f"sft.py {form}", cwd=tmp_path))
    assert (job.baseline.micro_batch, job.global_batch) == (4, 16)
    words = started(job, tmp_path, micro_batch=2, activation_checkpointing="full")
    text = Path(words[-1]).read_text()
    assert text.startswith("per_device_train_batch_size: 2 # fits\nlearning_rate: 1e-4\n")
    assert yaml.safe_load(text)["gradient_accumulation_steps"] == 2
    assert yaml.safe_load(text)["gradient_checkpointing"] is True


def test_the_file_of_an_option_is_not_the_one_with_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "sft.py").write_text("from transformers import HfArgumentParser\n")
    (tmp_path / "ds.json").write_text("{}")
    job = looked_at(Script("sft.py --deepspeed ds.json", cwd=tmp_path))
    words = started(job, tmp_path, micro_batch=4, activation_checkpointing="full")
    assert words[:3] == ("sft.py", "--deepspeed", "ds.json")
    assert words[3:] == (
        *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"),
        *("--gradient_checkpointing", "True"),
    )


def test_llama_factory_and_axolotl_take_their_yaml(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(
        "per_device_train_batch_size: 1\ncutoff_len: 64\nmax_steps: 9\n"
    )
    job = looked_at(
        Script("llamafactory-cli train f.yaml gradient_accumulation_steps=8", cwd=tmp_path)
    )
    assert (job.global_batch, job.sequence_length, job.steps) == (32, 64, 9)
    words = started(job, tmp_path, micro_batch=4)
    assert words[-1] == "gradient_accumulation_steps=2"
    assert yaml.safe_load(Path(words[-2]).read_text())["per_device_train_batch_size"] == 4
    (tmp_path / "a.yaml").write_text("micro_batch_size: 2\nsequence_len: 64\n")
    script = Script("axolotl train a.yaml", cwd=tmp_path)
    job = looked_at(Script("torchrun --nproc-per-node 4 -m axolotl.cli.train a.yaml", cwd=tmp_path))
    assert script.framework_of_command is not None
    words = started(job, tmp_path, data_parallel=2, sequence_parallel=2, micro_batch=4)
    assert yaml.safe_load(Path(words[-1]).read_text()) == {
        **{"micro_batch_size": 4, "sequence_len": 64, "context_parallel_size": 2}
    }


def test_litgpt_is_told_the_ranks_by_which_it_divides_the_batch(tmp_path: Path) -> None:
    command = (
        "-m litgpt finetune_full base --devices 4 --train.global_batch_size 32 "
        "--train.micro_batch_size 2"
    )
    job = looked_at(Script(command, cwd=tmp_path))
    assert (job.global_batch, job.baseline.accumulation(job.global_batch)) == (32, 4)
    words = started(job, tmp_path, data_parallel=2, micro_batch=4)
    assert words[4:6] == ("--devices", "2")
    assert words[-3:] == ("32", "--train.micro_batch_size", "4")


# ---- recognition and keys


def test_a_script_of_no_framework_has_no_driver(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n# HfArgumentParser\n")
    assert Script("train.py", cwd=tmp_path).framework_of_command is None
    with pytest.raises(InputError, match="no framework is recognised"):
        _ = Script("train.py", cwd=tmp_path).framework_knobs


def test_keys_are_looked_up_in_the_sources_and_a_gone_one_is_not_set(tmp_path: Path) -> None:
    config = tmp_path / "torchtitan" / "config"
    config.mkdir(parents=True)
    (config / "job_config.py").write_text(
        "class Training:\n    local_batch_size: int = 8\n    seq_len: int = 1\n"
        "class JobConfig:\n    training: Training\n"
    )
    job = titan(tmp_path)
    assert job.driver is not None
    assert "parallelism.tensor_parallel_degree" in job.driver.gone
    assert "training.local_batch_size" not in job.driver.gone
    offer = job.offers["tensor_parallel"]
    assert (offer.turned, offer.why) == (
        False,
        "torchtitan has no parallelism.tensor_parallel_degree",
    )


def test_a_key_is_a_word_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import os\nprefix = 'MY_'\nos.environ[prefix + 'STAGE'] = '1'\n"
        "p.add_argument('--on-x', '--x-on')\nclass Made:\n    from_field: int = 1\n"
    )
    data = copy.deepcopy(GOOD)
    data["knobs"] = {"micro_batch": {"key": "env:MY_STAGE"}, "tensor_parallel": {"key": "x_on"}}
    data["declared"] = {"d": {"key": "from-field", "values": [1, 2]}}
    data["keys"] = ["a.py"]
    assert check_keys(read_driver(data, "mine.toml"), [tmp_path]).gone == ()
    data["knobs"]["tensor_parallel"]["key"] = "made.nowhere"
    assert check_keys(read_driver(data, "mine.toml"), [tmp_path]).gone == ("made.nowhere",)
    data["keys"] = ["a.py", "b.py"]  # which is not installed and may declare it
    assert check_keys(read_driver(data, "mine.toml"), [tmp_path]).gone == ()


@pytest.mark.parametrize(
    "pattern", ["../*.py", "a/../../*.py", "/etc/*", "**/*.py", "a/**/b/*.py", "many/*", "big.py"]
)
def test_a_drivers_files_are_few_and_below_the_path(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(201):
        (tmp_path / "many" / f"{number}.py").touch()
    with (tmp_path / "big.py").open("wb") as file:
        file.truncate(4 * 2**20 + 1)
    data = copy.deepcopy(GOOD)
    data["keys"] = [pattern]
    driver = read_driver(data, "mine.toml")
    with pytest.raises(
        InputError, match=r"without \.\. and \*\*|more than 200 files, or one of more"
    ):
        check_keys(driver, [tmp_path])
    (tmp_path / "many" / "0.py").unlink()
    if pattern == "many/*":
        assert len(check_keys(driver, [tmp_path]).files) == 200


def test_a_driver_of_the_users_own_needs_no_code(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'framework = "mine"\n[recognise]\nimports = ["mine"]\n[command]\noption = "{key}={value}"\n'
        '[knobs.micro_batch]\nkey = "tokens"\ntimes = ["sequence_length"]\n'
        '[knobs.gradient_accumulation]\nkey = "acc"\ndefault = 2\n'
        '[facts]\nsequence_length = "len"\n'
    )
    (tmp_path / "go.py").touch()
    own = Path(tmp_path / "mine.toml")
    job = looked_at(Script("go.py len=10 tokens=40", cwd=tmp_path, framework=own))
    assert (job.baseline.micro_batch, job.global_batch) == (4, 32)
    assert started(job, tmp_path, micro_batch=8) == ("go.py", "len=10", "tokens=80", "acc=1")


def test_a_function_that_configures_is_called_by_a_generated_module(tmp_path: Path) -> None:
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "train.py").touch()
    (tmp_path / "mine_registry.py").write_text(
        "from types import SimpleNamespace as N\n"
        "def small():\n"
        "    parallelism = N(tensor_parallel_degree=1, data_parallel_shard_degree=-1)\n"
        "    training = N(local_batch_size=4, global_batch_size=32, seq_len=64, steps=70)\n"
        "    return N(parallelism=parallelism, training=training)\n"
    )
    own = next(d for d in shipped_drivers() if d.wrapper is not None)
    shipped = Path(__file__).parents[4] / "workload/scripts/frameworks/torchtitan.toml"
    command = "torchtitan/train.py --module mine_registry --config small"
    job = looked_at(Script(command, cwd=tmp_path, framework=shipped))
    assert job.driver is not None
    assert job.driver.driver == own
    assert (job.baseline.micro_batch, job.global_batch, job.steps) == (4, 32, 70)
    start = job.start(
        Configuration.of({**job.baseline.launch, "micro_batch": 2, "data_parallel": 2,
                          "tensor_parallel": 2}), tmp_path / "probe", probe=False,
    )  # fmt: skip
    assert start.words[1:] == ("--module", "joulefront_config", "--config", "small")
    source = (tmp_path / "probe" / "joulefront_config.py").read_text()
    space: dict[str, Any] = {}
    sys.path.insert(0, str(tmp_path))
    try:
        exec(compile(source, "joulefront_config.py", "exec"), space)
        made = space["small"]()
    finally:
        sys.path.remove(str(tmp_path))
    assert made.parallelism.tensor_parallel_degree == 2
    assert made.training.local_batch_size == 2


def test_the_users_function_gets_no_secret_of_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-tuner")
    (tmp_path / "ours.py").write_text(
        "import os\nfrom types import SimpleNamespace as N\n\n\ndef small():\n"
        "    return N(token=os.environ.get('RAY_AUTH_TOKEN', 'none'))\n"
    )
    wrapper = Wrapper("--module", "--config", ("{module}",))
    words = ("train.py", "--module", "ours", "--config", "small")
    assert read_function(wrapper, words, ("token",), (tmp_path,), tmp_path) == {"token": "none"}


def test_stages_of_torchtitan_count_embedding_and_head_and_those_of_megatron_do_not() -> None:
    drivers = {driver.name: driver.partition for driver in shipped_drivers()}
    assert drivers["torchtitan"] == "ends"
    assert drivers["megatron-lm"] == "blocks"
