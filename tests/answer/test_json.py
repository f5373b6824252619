"""The JSON of a result: documented key by key, numbered, and strict."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import tuner
from tests.support.results import large_result, small_result
from tuner.search_spaces.fields import JSON_SCHEMA, strict_json
from tuner.study.request import StudyOptions

DOCS = Path(__file__).parents[2] / "docs" / "report.md"


@pytest.mark.parametrize("make", [large_result, small_result])
def test_every_key_is_documented_and_every_documented_one_is_there(make) -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## JSON")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    found = json.loads(json.dumps(strict_json(make().to_json()), allow_nan=False, default=str))
    assert found.keys() == documented - {"parameter_count", "doubts"}  # of a plan alone
    assert found["schema"] == JSON_SCHEMA
    point = found["points"][0]
    for name in re.findall(r"`(\w+)`", section.rpartition("A point has")[2]):
        assert name in point or name in point["configuration"]
    read = tuner.Configuration.parse(point["short_name"])
    for half in ("launch", "live"):
        for name, value in point["configuration"][half].items():
            assert read.get(name) == value


@pytest.mark.parametrize("make", [large_result, small_result])
def test_a_result_prints_itself_in_a_few_lines(make) -> None:
    result = make()
    assert len(repr(result)) < 400
    assert result.name in repr(result)
    assert result.headline in repr(result)


def test_the_help_of_optimize_has_examples_and_names_every_option() -> None:
    assert ">>> result = tuner.optimize(" in (tuner.optimize.__doc__ or "")
    text = StudyOptions.__doc__ or ""
    for name in StudyOptions.__annotations__:
        assert f"{name}:" in text or f"`{name}" in text
