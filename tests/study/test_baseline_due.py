"""The default baseline is one that fits; the user's own is never replaced."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tuner
from tests.support.studies import problem_of_job, record, request
from tuner.display.text import answer_lines
from tuner.problem.settings import SearchSettings
from tuner.study.rules import BASELINE_TRIES, baseline_due
from tuner.workload.records.probe import Failure


@pytest.fixture(scope="module")
def problem():
    return problem_of_job("qwen2.5-7b", "h100-32", predicted=True)


def tried(configuration, kind: str, number: int = 0):
    asked = replace(
        request(f"p{number:04d}"),
        launch=configuration.launch,
        live=(configuration.live,),
        purpose="baseline",
    )
    return record(asked.probe_id, request=asked, measurements=(), failure=Failure(kind, "98 GB"))


@pytest.mark.extra("tuner.search_spaces.model_reading")
def test_a_default_that_runs_out_of_memory_gives_way_to_the_next(problem) -> None:
    records, names = [], []
    while (baseline := baseline_due(problem, records)) is not None:
        names.append(baseline.short)
        records.append(tried(baseline, "out_of_memory", len(records)))
        assert len(names) < 30
    assert names[:3] == ["dp32 mb1 zero1", "dp32 mb1 zero2", "dp32 mb1 zero3"]
    assert len(set(names)) == len(names)


def test_other_failures_and_the_users_own_are_not_replaced(problem) -> None:
    first = baseline_due(problem, [])
    assert baseline_due(problem, [tried(first, "error")]) is None
    cancelled = [tried(first, "cancelled", n) for n in range(BASELINE_TRIES)]
    assert baseline_due(problem, cancelled[:1]) == first
    assert baseline_due(problem, cancelled) is None
    own = problem_of_job("qwen2.5-7b", "h100-32", baseline="dp32 mb2 zero1", predicted=True)
    assert baseline_due(own, [tried(own.baseline, "out_of_memory")]) is None


@pytest.mark.extra("tuner.simulated.runner")
@pytest.mark.usefixtures("next_candidates")
def test_the_answer_names_the_baseline_that_was_taken(tmp_path, monkeypatch) -> None:
    # As where the models are wrong about the memory of the default.
    monkeypatch.setattr("tuner.problem.from_job._default_that_fits", lambda default, *_: default)
    why: list[str] = []
    result = tuner.optimize(
        "qwen2.5-7b",
        cluster="h100-32",
        executor="simulated",
        search=SearchSettings(max_probes=3),
        runs_dir=tmp_path,
        report=False,
        on_progress=lambda event: why.append(event.message) if event.kind == "started" else None,
    )
    assert why[:2] == ["today", "today, because the default runs out of memory"]
    assert result.baseline.configuration.short == "dp32 mb1 zero1"
    text = "\n".join(answer_lines(result))
    assert (
        "Today: dp32 mb1 zero1, the next that fits; the default, dp32 mb2 zero1, runs out of memory"
    ) in text
    assert "Failed: " not in text
