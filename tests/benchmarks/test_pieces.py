"""A benchmark of searches that was stopped goes on with the searches that it lacks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pieces import Pieces
from benchmarks.search.problems import Problem


def test_what_is_kept_is_not_searched_again(tmp_path: Path) -> None:
    searched = []

    def search(problem: Problem, seed: int) -> float:
        searched.append((problem.group, seed))
        return seed / 2

    def work(folder: str) -> list[tuple[Problem, int]]:
        return [(Problem(tmp_path / folder / "table", "a"), seed) for seed in (0, 1, 2)]

    file = tmp_path / "pieces"
    assert Pieces(file).results(search, work("one")[:2]) == [0.0, 0.5]
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:10])  # stopped while it wrote
    # A table that is made stands in another folder the next time.
    assert Pieces(file).results(search, work("another")) == [0.0, 0.5, 1.0]
    assert Pieces(file).results(search, work("one")) == [0.0, 0.5, 1.0]
    assert searched == [("a", 0), ("a", 1), ("a", 2)]
