"""Single keys changed in JSON, YAML and TOML files."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from tuner.search_spaces.errors import InputError
from tuner.workload.key_files import changed_text, read_key

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


def test_yaml_keeps_everything_else(tmp_path: Path) -> None:
    path = written(tmp_path, "f.yaml", YAML)
    text = changed_text(path, {"data.workers": 8, "attn": "flash_attention_2"})
    assert text == YAML.replace("workers: 2", "workers: 8").replace("'sdpa'", "flash_attention_2")
    small = changed_text(path, {"data.workers": 1e-05})
    assert yaml.safe_load(small)["data"]["workers"] == 1e-05
    assert path.read_text() == YAML


def test_a_file_without_a_suffix_is_yaml_as_accelerate_reads_it(tmp_path: Path) -> None:
    path = written(tmp_path, "accelerate", YAML)
    text = changed_text(path, {"data.workers": 8, "data.new": True}, may_add=True)
    assert text == YAML.replace("workers: 2", "workers: 8").replace("b]\n", "b]\n    new: true\n")


def test_toml_keeps_everything_else(tmp_path: Path) -> None:
    path = written(tmp_path, "f.toml", TOML)
    changes = {"data.workers": 8, "data.deep.compile": True, "steps": 1e-05, "data.attn": 'a"b'}
    text = changed_text(path, changes)
    assert "# a comment that stays" in text
    assert text.startswith("# how we train\n")
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
        ("f.yaml", "a: &x 1\nb: *x\n", "b", "holds the YAML anchor or alias 'x' in line 1"),
        ("f.yaml", "a:\n  <<: {b: 1}\n", "a.b", "holds a YAML merge key"),
        ("f.yaml", "a: [\n", "a", "is no YAML"),
        ("f.yaml", "a: 1\n---\nb: 1\n", "a", "not valid YAML"),
        ("f.toml", "a = {b = 1}\n", "a.b", "cannot find a.b in the text"),
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


def test_a_key_that_only_looks_like_one(tmp_path: Path) -> None:
    path = written(
        tmp_path, "f.toml", 'text = """\n[data]\nworkers = 2\n"""\n[data]\nworkers = 2\n'
    )
    with pytest.raises(InputError, match="cannot be changed alone"):
        changed_text(path, {"data.workers": 3})


@pytest.mark.parametrize("name", ["/dev/stdin.yaml", "missing.json"])
def test_a_file_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is not a file"):
        read_key(tmp_path / name, "a")
