"""Copies of JSON, YAML and TOML files with single keys changed."""

from __future__ import annotations

import base64
import json
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scripts import script_job
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError
from tuner.workload.hook import engine
from tuner.workload.scripts.key_files import (
    changed_text,
    is_deepspeed_file,
    parsed_file,
    read_deepspeed,
    read_key,
    repeated_keys,
)
from tuner.workload.scripts.script_facts import ScriptFacts

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


#: Files of a stranger that a parser would take long over, or much memory.
LAUGHS = (
    "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    + "base_model: *a9\n"
)
HOSTILE = {
    "laughs.yaml": (LAUGHS, "10,000 by aliases"),
    "laughs_of_merging.yaml": (
        "a0: &a0 {k: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 30)),
        "10,000 by aliases",
    ),
    "merged.yaml": (f"a: &a {{k: 1}}\nb: {{<<: [{','.join(['*a'] * 20000)}]}}\n", "by aliases"),
    "cycle.yaml": ("a: &a [*a]\n", "names holds itself"),
    "deep_cycle.yaml": ("a: &a {b: [c, {d: *a}]}\n", "names holds itself"),
    "brackets.yaml": ("a: " + "[" * 500_000, "64 tables or lists"),
    "dashes.yaml": ("- " * 500_000 + "a\n", "64 tables or lists"),
    "questions.yaml": ("? " * 300_000 + "a\n", "64 tables or lists"),
    "many.yaml": ("[" + "a," * 500_000 + "]", "100,000 values"),
    "sexagesimal.yaml": ("a: " + ":".join(["59"] * 300_000), "a number of 899,999 characters"),
    "digits.yaml": ("a: " + "9" * 5000, "a number of 5,000 characters"),
    "tag.yaml": ("a: !!python/object/apply:os.system ['touch PWNED']\n", "could not determine"),
    "big.yaml": ("a: b\n" * 300_000, "more than 1 MiB"),
    "dots.toml": ("a" + ".a" * 20_000 + " = 1\n", "more than 64 names with dots"),
    "quoted.toml": ("a" + ' . "b.c"' * 20_000 + " = 1\n", "more than 64 names with dots"),
    "table.toml": ("[a" + ".a" * 20_000 + "]\n", "more than 64 names with dots"),
    "word.toml": ("a" * 2**20, "is not valid TOML"),
    "brackets.toml": ("a = " + "[" * 50_000 + "]" * 50_000, "is not valid TOML"),
    "digits.toml": ("a = " + "9" * 5000, "is not valid TOML"),
    "brackets.json": ("[" * 500_000, "is not valid JSON"),
    "error.yaml": ("a: " + "&" * 100_000, "is not valid YAML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_a_stranger_is_refused_in_one_short_sentence(name: str, tmp_path: Path) -> None:
    text, sentence = HOSTILE[name]
    path = written(tmp_path, name, text)
    began = time.process_time()
    with pytest.raises(InputError) as caught:
        parsed_file(path)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))
    assert "\n" not in str(caught.value)
    repeated_keys(path) if path.stat().st_size <= 2**20 else None
    assert time.process_time() - began < 2.0
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "a: &x {k: 1}\nb: {<<: *x, m: 2}\n", {"a": {"k": 1}, "b": {"k": 1, "m": 2}}),
        ("a.yaml", "\n".join(f"k{n}: {n}" for n in range(9000)), {f"k{n}": n for n in range(9000)}),
        ("a.yaml", "a: " + "x" * 200_000, {"a": "x" * 200_000}),
        ("a.yaml", "a: 1:30\nb: 1_000\n", {"a": 90, "b": 1000}),
        ("a.yaml", "a: '" + "9" * 5000 + "'", {"a": "9" * 5000}),
        ("a.yaml", "", None),
        ("a.toml", "a.b.c = [0.1, 0.2]\n", {"a": {"b": {"c": [0.1, 0.2]}}}),
        ("a.toml", f"a = [{', '.join(['0.5'] * 500)}]", {"a": [0.5] * 500}),
        ("a.toml", "a = '" + ". " * 500 + "'", {"a": ". " * 500}),
    ],
)
def test_a_usual_file_is_read(name: str, text: str, expected: object, tmp_path: Path) -> None:
    assert parsed_file(written(tmp_path, name, text)) == expected


def test_a_file_is_parsed_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "a: 1\n")
    assert parsed_file(path) is parsed_file(path)
    path.write_text("a: 2\n")
    assert parsed_file(path) == {"a": 2}


def test_keys_that_stand_twice_at_the_top_alone(tmp_path: Path) -> None:
    text = "a: 1\nb: {c: 1, c: 2}\na: [x, {a: 1}]\nd: &d e\nf: *d\nd: " + "y" * 999
    assert repeated_keys(written(tmp_path, "a.yaml", text)) == [
        ("a", "a table"),
        ("d", "y" * 77 + "..."),
    ]
    assert repeated_keys(written(tmp_path, "b.yaml", "- a: 1\n  a: 2\n")) == []
    assert repeated_keys(written(tmp_path, "b.json", '{"a": 1, "a": 2}')) == [("a", "2")]


EXPECTED = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 200000000},
}
PLAIN = json.dumps(EXPECTED, indent=2)
COMMENTS = """{
  // copied from the wiki, tuned by hand
  "train_batch_size": 16,
  "gradient_accumulation_steps": 4,   # 2 GPUs
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
  /* stage 3 was too slow */
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8,},
}
"""
FORMS = {
    "plain": PLAIN,
    "comments and commas at the end": COMMENTS,
    "Windows' line ends": PLAIN.replace("\n", "\r\n"),
    "a byte order mark": "\ufeff" + PLAIN,
    "a mark, line ends and comments": "\ufeff" + COMMENTS.replace("\n", "\r\n"),
    "keys without quotes": COMMENTS.replace('"train_batch_size"', "train_batch_size"),
    "no commas": PLAIN.replace(",\n", "\n"),
    "no outer braces": PLAIN.strip("{}"),
    "single quotes": PLAIN.replace('"', "'"),
    "a text without quotes": PLAIN.replace('"AdamW",', "AdamW"),
    "a text of several lines": PLAIN.replace('"AdamW"', "'''\nAdamW\n'''"),
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS.keys())
def test_every_form_that_deepspeed_reads_is_read(text: str, tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    path = tmp_path / "ds.json"
    path.write_bytes(text.encode())
    assert read_deepspeed(path) == EXPECTED
    assert is_deepspeed_file(path)
    # In the rank, by path and as DeepSpeed's base64.
    assert engine._read_config({"args": SimpleNamespace(deepspeed_config=str(path))}) == EXPECTED
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert engine._read_config({"config": encoded}) == EXPECTED


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"train_batch_size": 16, "train_batch_size": 32}', "'train_batch_size' stands twice"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "the key 'stage' stands twice"),
        ('{"train_batch_size": 16', "not a valid DeepSpeed configuration"),
        ("[1, 2]", "it holds no object"),
        ("two words", "it holds no object"),
        ("", "holds no setting"),
        ("{}", "holds no setting"),
        (" " * 2**22 + "{}", "too large"),
        ("[" * 100_000, "not a valid DeepSpeed configuration"),
    ],
)
def test_what_deepspeed_refuses_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_deepspeed(path)
    assert not is_deepspeed_file(path)


def test_a_file_that_is_no_text_or_not_there_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe{\x00}\x00")
    with pytest.raises(InputError, match="not a valid DeepSpeed configuration"):
        read_deepspeed(tmp_path / "ds.json")
    with pytest.raises(InputError, match="No such file"):
        read_deepspeed(tmp_path / "none.json")


def test_without_hjson_plain_json_is_read_and_comments_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "ds.json"
    path.write_text(FORMS["a byte order mark"])
    assert read_deepspeed(path) == EXPECTED
    path.write_text(COMMENTS)
    with pytest.raises(InputError, match="comments need hjson, which DeepSpeed installs"):
        read_deepspeed(path)
    path.write_text('{"a": 1, "a": 2}')
    with pytest.raises(InputError, match=r"the key 'a' stands twice$"):
        read_deepspeed(path)


@pytest.mark.extra("tuner.workload.scripts.deepspeed_config")
def test_a_script_with_a_commented_file_is_changed_in_a_copy(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    (tmp_path / "ds.json").write_text(COMMENTS)
    frame = ScriptFacts("deepspeed", config=EXPECTED, micro_batch=2, accumulation=4, follows=True)
    knob = "ds.json:zero_optimization.reduce_bucket_size=100000000,200000000"
    job = script_job("train.py --ds ds.json", tmp_path, frame, [knob], global_batch=16)
    assert job.baseline.get("reduce_bucket_size") == 200000000
    chosen = Configuration.of(data_parallel=2, micro_batch=4, zero_stage=3)
    start = job.start(chosen, tmp_path / "p")
    written = json.loads(Path(start.words[-1]).read_text())
    assert written["zero_optimization"]["stage"] == 3
    assert written["optimizer"] == EXPECTED["optimizer"]
    assert (tmp_path / "ds.json").read_text() == COMMENTS


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        ('{"zero_optimization": {"stage": "auto"}}', "stage is 'auto'", "0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage is 4", "0, 1, 2 or 3"),
        (
            '{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}',
            "zero_optimization.offload_optimizer is 'cpu'",
            '{"device": "cpu"}',
        ),
        ('{"zero_optimization": 3}', "zero_optimization is 3", "an object"),
        ('{"train_batch_size": "8"}', "train_batch_size is '8'", 'or "auto"'),
        ('{"gradient_accumulation_steps": 0}', "is 0", "at least 1"),
        ('{"zero_optimization": {}, "bf16": true}', "bf16 is True", "an object"),
        ('{"zero_optimization": {}, "optimizer": "AdamW"}', "optimizer is 'AdamW'", "an object"),
        ('{"zero_optimization": {}, "optimizer": {"params": []}}', "optimizer.params", "object"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_is_allowed(
    tmp_path: Path, text: str, key: str, allowed: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_deepspeed(path)
    assert key in str(error.value)
    assert allowed in str(error.value)
    assert is_deepspeed_file(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"train_batch_size": "auto", "zero_optimization": true, "bf16": {"enabled": "auto"}}',
        '{"zero_optimization": {"stage": 3, "offload_param": null}, "optimizer": null}',
        '{"gradient_accumulation_steps": "auto", "scheduler": {"params": {}}, "x": [1]}',
    ],
)
def test_what_deepspeed_or_transformers_take_is_taken(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert read_deepspeed(path)
