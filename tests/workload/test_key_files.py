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
from tuner.workload.key_files import changed_text, parsed_file, read_key

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
    assert text == (
        "model: gpt2\ndata:\n  workers: 8\n  paths:\n  - a\n  - b\nattn: flash_attention_2\n"
        "rate: 1e-4\n"
    )
    assert changed_text(path, {"data.workers": 2}) == YAML
    small = changed_text(path, {"data.workers": 1e-05})
    assert yaml.safe_load(small)["data"]["workers"] == 1e-05
    assert path.read_text() == YAML


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
        ("f.toml", "a = 1\nb = 2026-11-25\n", "a", "f.toml holds values that are not kept"),
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
    path = written(tmp_path, "f.yaml", "base: &x {a: 1, b: 2}\nmine:\n  <<: *x\n  c: 3\nhis: *x\n")
    assert yaml.safe_load(changed_text(path, {"mine.a": 7, "his.b": 8})) == {
        "base": {"a": 1, "b": 2},
        "mine": {"a": 7, "b": 2, "c": 3},
        "his": {"a": 1, "b": 8},
    }


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
