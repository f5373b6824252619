"""Copies of JSON, YAML and TOML files with single keys changed."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.key_files import changed_text, parsed_file, read_key

YAML = """\
# how we train
model: gpt2   # small
data:
    workers: 2  # a comment that stays
    paths: [a, b]
attn: 'sdpa'
rate: 1e-4
"""
TOML = """\
# how we train
steps = 10
[data]
workers = 2  # a comment that stays
attn = "sdpa"
[data.deep]
compile = false
"""


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_yaml_keeps_comments_order_and_quotes(tmp_path: Path) -> None:
    path = written(tmp_path, "f.yaml", YAML)
    text = changed_text(path, {"data.workers": 8, "attn": "flash_attention_2"})
    assert text == (
        "# how we train\nmodel: gpt2   # small\ndata:\n  workers: 8    # a comment that stays\n"
        "  paths: [a, b]\nattn: 'flash_attention_2'\nrate: 1e-4\n"
    )
    assert changed_text(path, {"data.workers": 2}) == YAML
    small = changed_text(path, {"data.workers": 1e-05, "attn": "no"})
    assert yaml.safe_load(small)["data"]["workers"] == 1e-05
    assert yaml.safe_load(small)["attn"] == "no"  # which is false in YAML 1.1 without quotes
    assert path.read_text() == YAML


#: Files of the kinds that people report: of accelerate, LLaMA-Factory, axolotl and torchtitan.
ACCELERATE = """compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config: {zero_stage: 2, offload_optimizer_device: none}  # {not: a, table: in, a: comment}
distributed_type: 'MULTI_GPU'
downcast_bf16: 'no'
enable_cpu_affinity: off
machine_rank: 0
main_training_function: main
mixed_precision: 'no'   # bf16 overflows here: do not change
num_processes: 010
same_network: yes
"""
LLAMA_FACTORY = """### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct

### method
stage: sft
finetuning_type: lora

# learning_rate: 2e-5 was too low (see run 14)
learning_rate: 1e-4   # 科学记数法
num_train_epochs: 3.0
per_device_train_batch_size: 1
template: |
  {% for m in messages %}   # no comment
  learning_rate: 3e-4
  {% endfor %}
"""
AXOLOTL = """defaults: &defaults
  lr: &lr 0.0002
  micro_batch_size: 2   # per GPU
  optimizer: {name: adamw_torch, betas: [0.9, 0.95]}

train:
  <<: *defaults
  gradient_accumulation_steps: 8
eval:
  <<: *defaults
  micro_batch_size: 4
min_lr: *lr
datasets:
  # the small one first
  - path: mhenrichsen/alpaca_2k_test   # public
    type: alpaca

  # then ours
  - path: ./data
"""
TORCHTITAN = """# torchtitan Config.toml
# NOTE: this toml config is a preset for 64 A100 GPUs.

[job]
dump_folder = "./outputs"
description = '''
[training]
local_batch_size = 99   # not a key
'''
started = 2026-11-25T08:00:00Z

[training]
local_batch_size = 1   # [training] fits with 2, too
"seq.len" = 8192
steps = 1_000
\tdataset = "c4"

[[hooks]]   # two of one name
name = "a"
[[hooks]]
name = "b"

[parallelism]
data_parallel_shard_degree = -1
[training.optimizer]
lr = 3e-4
"""


def data_of(name: str, text: str) -> object:
    return tomllib.loads(text) if name.endswith(".toml") else yaml.safe_load(text)


def comments(text: str) -> list[str]:
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


@pytest.mark.parametrize(
    ("name", "text", "changes", "path"),
    [
        ("accelerate.yaml", ACCELERATE, {"num_processes": 4}, "num_processes"),
        ("accelerate.yaml", ACCELERATE, {"mixed_precision": "no "}, "mixed_precision"),
        ("accelerate.yaml", ACCELERATE, {"deepspeed_config.zero_stage": 3}, "deepspeed_config"),
        ("llama3.yaml", LLAMA_FACTORY, {"learning_rate": 1e-05}, "learning_rate"),
        ("llama3.yaml", LLAMA_FACTORY, {"new.deep": "off"}, "new"),
        ("axolotl.yaml", AXOLOTL, {"train.micro_batch_size": 8}, "train"),
        ("axolotl.yaml", AXOLOTL, {"eval.micro_batch_size": 8, "eval.new.x": 1}, "eval"),
        ("titan.toml", TORCHTITAN, {"training.local_batch_size": 2, "training.new": 1}, "training"),
        ("titan.toml", TORCHTITAN, {"training.optimizer.lr": 1e-05}, "training"),
        ("titan.toml", TORCHTITAN, {"compile.enable": True}, "compile"),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_users_file_changes_in_one_key(
    tmp_path: Path,
    name: str,
    text: str,
    changes: dict[str, object],
    path: str,
    ending: str,
    mark: str,
) -> None:
    file = tmp_path / name
    file.write_bytes((mark + text.replace("\n", ending)).encode())
    changed = changed_text(file, changes, may_add=True)
    before, after = data_of(name, text), data_of(name, changed)
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert before.pop(path, None) != after.pop(path)
    assert before == after
    assert list(before) == list(after)
    file.write_text(changed)
    for key, value in changes.items():
        assert read_key(file, key) == value
    assert comments(changed) == comments(text)


def test_a_file_without_a_suffix_is_yaml_as_accelerate_reads_it(tmp_path: Path) -> None:
    path = written(tmp_path, "accelerate", YAML)
    text = changed_text(path, {"data.workers": 8, "data.new": True}, may_add=True)
    assert yaml.safe_load(text)["data"] == {"workers": 8, "paths": ["a", "b"], "new": True}


def test_toml_keeps_everything_else(tmp_path: Path) -> None:
    path = written(tmp_path, "f.toml", TOML)
    changes = {"data.workers": 8, "data.deep.compile": True, "steps": 1e-05, "data.attn": 'a"b'}
    text = changed_text(path, changes)
    assert tomllib.loads(text) == {
        "steps": 1e-05,
        "data": {"workers": 8, "attn": 'a"b', "deep": {"compile": True}},
    }


def test_json_keeps_its_order(tmp_path: Path) -> None:
    path = written(tmp_path, "f.json", '{"z": {"b": 1, "a": 2}, "c": "auto"}')
    assert json.loads(changed_text(path, {"z.a": 3})) == {"z": {"b": 1, "a": 3}, "c": "auto"}
    assert list(json.loads(changed_text(path, {"z.a": 3}))["z"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "text", "key", "reason"),
    [
        ("f.yaml", YAML, "data.worker", "f.yaml has no key data.worker; add it"),
        ("f.yaml", YAML, "data", "not a number, a text or a truth value"),
        ("f.yaml", "a: 1\nb: &x [*x]\n", "a", "holds itself"),
        ("f.yaml", "a: [\n", "a", "not valid YAML"),
        ("f.yaml", "a: 1\n---\nb: 1\n", "a", "not valid YAML"),
        ("f.yaml", "a: &x 1\nb: &x 2\n", "a", "not valid YAML: found duplicate anchor"),
        ("f.yaml", "a:\n\t- 1\n", "a", "not valid YAML"),
        ("f.toml", "a =\n", "a", "not valid TOML"),
        ("f.json", "[1]", "a", "has no key a"),
        ("f.json", "{", "a", "not valid JSON"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, text: str, key: str, reason: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(InputError, match=reason) as error:
        changed_text(path, {key: 7})
    assert "\n" not in str(error.value)


def test_what_aliases_share_changes_in_one_place(tmp_path: Path) -> None:
    path = written(tmp_path, "axolotl.yaml", AXOLOTL)
    changed = yaml.safe_load(changed_text(path, {"defaults.lr": 1, "train.optimizer.name": "x"}))
    expected = yaml.safe_load(AXOLOTL)
    betas = [0.9, 0.95]
    expected["defaults"]["lr"], expected["train"]["optimizer"] = 1, {"name": "x", "betas": betas}
    assert changed["eval"]["optimizer"] == {"name": "adamw_torch", "betas": betas}
    expected["eval"]["optimizer"] = expected["defaults"]["optimizer"] = changed["eval"]["optimizer"]
    assert changed == expected
    path = written(tmp_path, "f.yaml", "base: &x {a: 1, b: 2}\nmine:\n  <<: *x\n  c: 3\nhis: *x\n")
    assert yaml.safe_load(changed_text(path, {"mine.a": 7, "his.b": 8})) == {
        "base": {"a": 1, "b": 2},
        "mine": {"a": 7, "b": 2, "c": 3},
        "his": {"a": 1, "b": 8},
    }


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # tomlkit writes the new table before z, which would then be a key of it.
        ("f.toml", "a.b = 1\nz = 2\nd = 2026-11-25\n", "z = 2\nd = 2026-11-25\n"),
        # The last one of a key is PyYAML's, and ruamel.yaml refuses the file.
        ("f.yaml", "a: {b: 1}\nz: 1\nz: 2\n", "z: 2\n"),
        # A plain no is false.
        ("f.yaml", "no: 1\nz: 2\n", "false: 1\nz: 2\n"),
    ],
)
def test_a_file_that_cannot_be_edited_changes_in_its_key_alone(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    key = "no" if "no" in text else "a.new.x"
    changed = data_of(name, changed_text(written(tmp_path, name, text), {key: 7}, may_add=True))
    assert isinstance(changed, dict)
    table = changed.pop(key.partition(".")[0])
    assert (table if key == "no" else table["new"]["x"]) == 7
    assert changed == data_of(name, expected)


@pytest.mark.parametrize("name", ["/dev/stdin.yaml", "missing.json"])
def test_a_file_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is not a file"):
        read_key(tmp_path / name, "a")


NAMES = st.text("abcdeyno_", min_size=1, max_size=4)
SCALARS = st.one_of(
    st.integers(-9, 99),
    st.booleans(),
    st.sampled_from(["no", "a: b", "# x", "1e3", "", "yes", "~"]),
)


@settings(deadline=None, max_examples=60)
@given(
    data=st.dictionaries(
        NAMES,
        st.one_of(SCALARS, st.dictionaries(NAMES, SCALARS, min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    ),
    name=NAMES,
    value=SCALARS,
    kind=st.sampled_from(["yaml", "json", "toml"]),
)
def test_any_file_reads_as_changed(
    tmp_path_factory: pytest.TempPathFactory,
    data: dict[str, object],
    name: str,
    value: object,
    kind: str,
) -> None:
    path = tmp_path_factory.getbasetemp() / f"f.{kind}"
    for section in ((), *((key,) for key, held in data.items() if isinstance(held, dict))):
        held = data[section[0]] if section else data
        assert isinstance(held, dict)
        path.write_text(
            {"yaml": yaml.safe_dump, "json": json.dumps, "toml": write_toml}[kind](data)
        )
        path.write_text(changed_text(path, {".".join((*section, name)): value}, may_add=True))
        expected = {**held, name: value}
        assert parsed_file(path) == ({**data, section[0]: expected} if section else expected)
