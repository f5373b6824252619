"""Size of the code: the figures of `benchmarks.size` may only fall."""

import warnings
from pathlib import Path

import pytest

from benchmarks import ratchet
from benchmarks.places import EXAMPLES, named_words, places
from benchmarks.size import Module, import_cycles, largest_pieces, measure, production

STORED = {
    "maxima": {"production_lines": 100, "lines.evidence": 20},
    "granted": {"production_lines": {"by": 5, "issue": 25}},
}


def test_no_figure_rises() -> None:
    modules = production()
    measured = measure(modules, largest_pieces(modules))
    stored = ratchet.read()
    assert ratchet.excesses(measured, stored) == []
    if low := ratchet.fallen(measured, stored):
        warnings.warn(f"python -m benchmarks.size --tighten: {', '.join(low)} fell", stacklevel=1)


def test_a_figure_above_its_maximum_and_the_grant_is_named() -> None:
    assert ratchet.excesses({"production_lines": 105}, STORED) == []
    assert ratchet.excesses({"production_lines": 106, "lines.new": 3}, STORED) == [
        "production_lines rose to 106; allowed are 100 and 5 granted",
        "lines.new is 3 and has no maximum in size.toml",
    ]


def test_tightening_lowers_and_never_raises(tmp_path: Path) -> None:
    path = tmp_path / "size.toml"
    path.write_text(ratchet.tightened({"production_lines": 90, "lines.evidence": 21}, STORED))
    assert ratchet.read(path) == {
        **STORED,
        "maxima": {"production_lines": 90, "lines.evidence": 20},
    }
    path.write_text(ratchet.tightened({"production_lines": 104}, STORED))
    assert ratchet.read(path) == {**STORED, "maxima": {"production_lines": 100}}


@pytest.mark.parametrize(
    "grant", ["lines.new = { by = 1, issue = 1 }", "a = { by = 1 }", "a = { by = 0, issue = 1 }"]
)
def test_a_grant_names_its_issue_and_a_figure(tmp_path: Path, grant: str) -> None:
    path = tmp_path / "size.toml"
    path.write_text(f"[maxima]\na = 1\n[granted]\n{grant.replace('lines.new', 'b')}\n")
    with pytest.raises(ValueError, match="granted"):
        ratchet.read(path)


def test_names_count_in_code_and_not_in_comments_or_docstrings() -> None:
    text = '"""Of budget_kJ."""\n# of deadline_s\nx = {"power_cap_W": f"of peak_W {least_edp}"}\n'
    words = named_words(text, ".py")
    assert {"x", "power_cap_W", "peak_W", "least_edp"} <= words
    assert not words & {"budget_kJ", "deadline_s"}
    assert "budget_kJ" in named_words("budget_kJ = 3  # kJ", ".toml")


def test_every_change_has_an_example_in_the_product() -> None:
    found = places()
    assert set(found) == set(EXAMPLES)
    assert "tuner/problem/constraints.py" in found["limit"]
    assert not any("testing" in path for files in found.values() for path in files)


def test_modules_that_import_each_other_are_found(tmp_path: Path) -> None:
    sources = {
        "tuner.a": "from tuner import b",
        "tuner.b": "def f():\n    from tuner.c import g",
        "tuner.c": "import tuner.a",
        "tuner.d": "import tuner.a",
    }
    modules = []
    for name, text in sources.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        modules.append(Module(name, path))
    assert import_cycles(modules) == [["tuner.a", "tuner.b", "tuner.c"]]
