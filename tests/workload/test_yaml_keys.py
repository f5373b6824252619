"""Keys of a YAML file changed in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.search_spaces.errors import InputError
from tuner.workload.key_files import changed_yaml

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
