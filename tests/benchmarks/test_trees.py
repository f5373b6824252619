"""Searches of two trees: those that differ are named, and an error hides nothing."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import trees
from benchmarks.figures import ROOT
from benchmarks.trees import difference, differing_from, made_in, searches_of_trees
from tuner.testing.studies import write_table


def answer(*windows: tuple[dict[str, int], float, float]) -> dict[str, Any]:
    return {"name": "a", "probes": [list(window) for window in windows]}


A, B = ({"zero_stage": 0}, 1.0, 2.0), ({"zero_stage": 3}, 1.5, 2.5)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (answer(A, B), ""),
        (answer(A, (B[0], 1.5 * (1 + 1e-13), 2.5)), ""),
        (answer(B, A), "window 0 of 2 measures other settings"),
        (answer(A, (B[0], 1.5001, 2.5)), "window 1 of 2 has other figures"),
        (answer(A, (B[0], 1.5, float("nan"))), "window 1 of 2 has other figures"),
        (answer(A), "2 windows instead of 1"),
        (answer(A, B, A), "2 windows instead of 3"),
        ({"name": "a", "error": "InputError: no"}, "the other ended with InputError: no"),
    ],
)
def test_a_search_differs_by_more_than_last_digits(there: dict[str, Any], words: str) -> None:
    assert difference(answer(A, B), there) == words


def test_each_table_is_searched_in_three_ways_and_names_are_distinct(tmp_path: Path) -> None:
    made = searches_of_trees([write_table(tmp_path / "one"), write_table(tmp_path / "two")], 2)
    assert len({each["name"] for each in made}) == len(made) == 2 * 4 + 2 * len(trees.JOBS)


@pytest.mark.slow
def test_a_tree_with_another_planner_differs_and_one_that_cannot_search_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "tree"
    other.mkdir()
    for name in ("tuner", "search_spaces", "workload", "models"):
        (other / name).symlink_to(ROOT / name)
    searches = searches_of_trees([write_table(tmp_path / "table")], 1)[:2]
    assert differing_from(other, searches) == []
    (other / "tuner").unlink()
    (other / "tuner").mkdir()
    (other / "tuner" / "__init__.py").write_text(
        "from types import SimpleNamespace as SearchSettings\ndef replay(*a, **k): raise OSError(3)"
    )
    assert differing_from(other, searches) == [each["name"] for each in searches]
    assert "the other ended with OSError: 3" in capsys.readouterr().out
    (other / "tuner" / "__init__.py").write_text("raise ImportError")
    with pytest.raises(RuntimeError, match="made 0 of 2 searches"):
        made_in(other, searches)
