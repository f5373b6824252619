"""The table of attacks of `benchmarks.security`: each group has tests, and none of them fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from benchmarks.security import FINDINGS, main, outcome_of


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(3600)
def test_no_finding_of_the_security_reviews_is_open(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if " OPEN " in line] == []
    figures = dict(re.findall(r"^figure (\w+) (\d+)", printed, re.M))
    assert figures["findings_open"] == "0"
    assert int(figures["lines_as_root"]) <= 500
    for name in ("connections_outside", "listening_beyond_loopback"):  # where a study is watched
        assert figures.get(name, "0") == "0", printed


def test_every_group_of_findings_has_tests() -> None:
    # Nothing copies folders to nodes (17, 23), and no command sets a live knob (21).
    ended = {17, 21, 23}
    assert [finding.number for finding in FINDINGS] == sorted({*range(1, 42)} - ended)
    for finding in FINDINGS:
        assert finding.tests, finding.name
        for file, words in finding.tests:
            names = re.findall(r"def (test_\w+)", (ROOT / file).read_text())
            for word in words.split(" or "):
                assert any(word in name for name in names), f"{file} has no test named {word!r}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def test_attack(): pass", False),
        ("def test_attack(): assert False", True),
        ("def test_attack(: pass", True),
        ("def test_another(): pass", True),
        ("import pytest\ndef test_attack(): pytest.skip('only root')", None),
    ],
    ids=["closed", "open", "cannot be run", "no such test", "skipped"],
)
def test_a_finding_is_closed_only_if_an_attack_was_made(
    tmp_path: Path, text: str, expected: bool | None
) -> None:
    file = tmp_path / "test_these.py"
    file.write_text(text)
    assert outcome_of(str(file), "attack", tmp_path)[0] is expected
