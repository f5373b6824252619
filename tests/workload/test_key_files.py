"""Single keys changed in JSON, YAML and TOML files."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.search_spaces.errors import InputError
from tuner.workload.key_files import changed_text, changed_yaml, read_key

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


# ---- keys of a YAML file in place

TEXT = """\
# head
a: 1   # one
'b': "two"

c:
    # of c
    d: false
    e: {f: 3, g: [1, 2]}
h:
last: null"""


def changed(tmp_path: Path, keys: tuple[str, ...], value: object, text: str = TEXT) -> str:
    return changed_yaml(text, keys, value, tmp_path / "f.yaml")


@pytest.mark.parametrize(
    ("keys", "value", "old", "new"),
    [
        (("a",), 12, "a: 1   # one", "a: 12   # one"),
        (("b",), "no", '"two"', "'no'"),
        (("c", "d"), True, "d: false", "d: true"),
        (("c", "e", "f"), 4, "{f: 3,", "{f: 4,"),
        (("c", "e", "new"), 5, "[1, 2]}", "[1, 2], new: 5}"),
        (("h",), "x", "h:\n", "h: x\n"),
        (("c", "new"), "a b", "[1, 2]}\n", '[1, 2]}\n    new: "a b"\n'),
        (("new",), 1.5, "last: null", "last: null\nnew: 1.5\n"),
    ],
)
def test_one_value_changes_and_nothing_else(
    tmp_path: Path, keys: tuple[str, ...], value: object, old: str, new: str
) -> None:
    after = changed(tmp_path, keys, value)
    assert after == TEXT.replace(old, new, 1)
    data = yaml.safe_load(after)
    for key in keys:
        data = data[key]
    assert data == value


def test_what_cannot_be_changed_is_one_sentence(tmp_path: Path) -> None:
    for keys, text, sentence in (
        (("x", "y"), TEXT, "no section x"),
        (("c",), TEXT, "not a single value"),
        (("a", "b"), TEXT, "no section a"),
        (("a",), "- 1\n", "no section of keys"),
        (("a",), "a: &x 1\n", "anchor"),
    ):
        with pytest.raises(InputError, match=sentence):
            changed(tmp_path, keys, 1, text)


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
    flow=st.sampled_from([None, False]),
)
def test_any_file_reads_as_changed(
    tmp_path_factory: pytest.TempPathFactory,
    data: dict[str, object],
    name: str,
    value: object,
    flow: bool | None,
) -> None:
    for section in ((), *((key,) for key, held in data.items() if isinstance(held, dict))):
        held = data[section[0]] if section else data
        assert isinstance(held, dict)
        if isinstance(held.get(name), dict):
            continue
        text = yaml.safe_dump(data, sort_keys=False, default_flow_style=flow)
        after = changed(tmp_path_factory.getbasetemp(), (*section, name), value, text)
        expected = {**held, name: value}
        assert yaml.safe_load(after) == ({**data, section[0]: expected} if section else expected)
