"""What a study opens and sends, by `benchmarks.security`."""

import pytest

from benchmarks.security import lines_as_root, study_figures


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
    assert lines_as_root() <= 500
