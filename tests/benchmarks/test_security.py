"""What a study opens and sends, by `benchmarks.security`."""

from pathlib import Path

import pytest

from benchmarks import security
from benchmarks.held import Fault
from benchmarks.security import lines_as_root, open_findings, study_figures


@pytest.mark.slow
@pytest.mark.real
def test_a_study_listens_on_loopback_alone_and_sends_nothing_to_other_machines() -> None:
    figures = study_figures()
    if not figures:
        pytest.skip("no study can be watched here")
    assert {figure.name: figure.value for figure in figures} == {
        "connections_outside": 0,
        "listening_beyond_loopback": 0,
    }


def test_little_runs_as_root() -> None:
    assert lines_as_root() <= 217


def test_a_finding_whose_test_is_missing_or_fails_is_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\ndef test_right():\n    pass\n"
        "@pytest.mark.parametrize('n', [0, 1])\ndef test_wrong(n):\n    assert not n\n"
    )
    names = ("test_right", "test_wrong", "test_absent")
    found = [Fault("security review 9", name, (name,)) for name in names]
    known = {name: [f"{tmp_path / 'test_x.py'}::{name}"] for name in names[:2]}
    monkeypatch.setattr(security, "faults", lambda: [*found, Fault("another", "", ())])
    monkeypatch.setattr(security, "functions_of_tests", lambda: known)
    assert [finding.what for finding in open_findings()] == ["test_wrong", "test_absent"]
