"""The picture of the packages on the architecture page."""

from __future__ import annotations

import pytest

from benchmarks.picture import FILE, direct, heights, imports, picture
from benchmarks.source import Module


def test_the_page_shows_the_packages_as_they_are(production_modules: list[Module]) -> None:
    """`python -m benchmarks.picture` writes it anew."""
    assert FILE.read_text() == picture(imports(production_modules))


def test_a_package_stands_above_its_imports_and_short_cuts_are_left_out() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert heights(graph) == {"a": 2, "b": 1, "c": 0}
    assert direct(graph) == [("a", "b"), ("b", "c")]


def test_packages_that_import_each_other_are_not_drawn() -> None:
    with pytest.raises(RecursionError):
        heights({"a": {"b"}, "b": {"a"}})
