"""Words of patterns: names, docstrings and messages that a native engineer would not write."""

from pathlib import Path

import pytest

from benchmarks.language import Match, matches
from benchmarks.size import workload_violations
from benchmarks.source import Module


def found(folder: Path, text: str, name: str = "tuner.online.a") -> list[Match]:
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(text)
    return matches([Module(name, path)])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def f(told): ...", "told"),
        ("class A:\n    most_telling = 1\n    def asks_time(self): ...", "asks_time"),
        ("self.known = 1", "known"),
        ("from a import b as _what_is", "_what_is"),
        ("class Elsewhere: ...", "Elsewhere"),
        ("class _Agreed: ...", "_Agreed"),
    ],
)
def test_a_name_of_a_pattern_is_found(tmp_path: Path, text: str, name: str) -> None:
    assert [match.text for match in found(tmp_path, text)] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "study.tell(trial)\nprint(told)",
        "known_errors = 1\nspeed = 2",
        "class LaunchFailed(Exception): ...",
        "class DeepSpeed: ...\nclass Seed: ...",
        "def parse_known_args(): ...",
        'x = "is no longer valid"\ny = f"{x} is not a valid name"',
        'def f():\n    """Return whether `told` holds."""',
    ],
)
def test_what_only_resembles_a_pattern_is_left_alone(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == []


def test_answer_is_a_term_where_a_study_answers(tmp_path: Path) -> None:
    assert found(tmp_path, "answer = 1", "tuner.answer.a") == []
    assert [match.text for match in found(tmp_path, "answer = 1", "tuner.online.a")] == ["answer"]


@pytest.mark.parametrize(
    ("sentence", "pattern"),
    [
        ("Return what is left.", "clause for a noun"),
        ("Which of the nodes answer.", "clause for a noun"),
        ("Return the step that a rank told.", "speech for data"),
        ("Raise if the name is no knob.", "is no X"),
        ("Return the file and the owner of it.", "pronoun far from its noun"),
    ],
)
def test_a_docstring_of_a_pattern_is_found_by_file_and_line(
    tmp_path: Path, sentence: str, pattern: str
) -> None:
    (match,) = found(tmp_path, f'class A:\n    def f():\n        """{sentence}"""\n')
    assert (match.pattern, match.text) == (pattern, sentence)
    assert match.place.endswith("a.py:3")


def test_a_message_that_denies_by_no_is_found(tmp_path: Path) -> None:
    (match,) = found(tmp_path, 'raise ValueError(f"{x} is no name of a probe")')
    assert match.kind == "message"


def test_an_import_against_the_order_inside_workload_is_found(tmp_path: Path) -> None:
    path = tmp_path / "probe.py"
    path.write_text("from tuner.workload.node import agent\nimport tuner.workload.hook.link\n")
    assert workload_violations([Module("tuner.workload.records.probe", path)]) == [
        "tuner.workload.records.probe imports tuner.workload.node",
        "tuner.workload.records.probe imports tuner.workload.hook.link",
    ]
