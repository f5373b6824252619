"""The figures of words: what is counted, and those that the parser alone decides."""

from __future__ import annotations

import pytest

from benchmarks import words
from benchmarks.figures import ROOT
from tuner.cli.parser import GROUPS


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Keep what you run today: today's is best.", {"today": 2}),
        ("The Baseline, and two baselines", {"baseline": 2}),
        ("--baseline FILE", {"baseline": 1}),
        ("the current configuration", {"current": 1}),
        ("current of 3 A; the reference point of the hypervolume", {}),
        ("Original settings; status quo.", {"original": 1, "status quo": 1}),
    ],
)
def test_terms_are_found_where_they_mean_the_configuration(text: str, terms: dict) -> None:
    assert words.terms_in(text) == terms


def test_code_json_and_scripts_are_no_prose() -> None:
    assert words.prose("a `baseline=x` b\n```python\nbaseline = 1\n```\nc") == "a  b\n\nc"
    golden = (
        "$ tuner show r\ntoday\n== README.txt\nread\n== clocks.sh\nbaseline\n"
        "$ tuner show r --json\nbaseline\n$ notebook\nend\n"
    )
    assert words.printed(golden) == "$ tuner show r\ntoday\n== README.txt\nread\n$ notebook\nend\n"


@pytest.mark.slow
def test_figures_of_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    found = {figure.name: figure.value for figure in words.figures()}
    assert found["commands"] == sum(map(len, GROUPS.values())) == 17
    assert 10 < found["help_lines_optimize"] <= 60
    assert found["docs_words"] > 10_000 > found["readme_words"] > 100
    assert found["terms_for_today"] >= 1
    # Help and what commands print have one word; the docs are counted, too.
    listed = capsys.readouterr().out.splitlines()
    assert not [line for line in listed if not line.startswith(("docs/", "README"))]


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800
