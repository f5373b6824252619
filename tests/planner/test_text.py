"""What a plan's text says of large clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tuner
from tuner.planner.evaluate import interruptions
from tuner.planner.text import VIEW, large_lines
from tuner.result import Result
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("runs")
    return tuner.plan("opt-350m", cluster="a100-8", runs_dir=folder, report=False, progress=False)


def on(result: Result, nodes: int) -> Result:
    assert isinstance(result.cluster, Cluster)
    return replace(result, cluster=replace(result.cluster, nodes=nodes))


def test_a_plan_for_a_thousand_nodes_says_what_it_does_not_model(planned: Result) -> None:
    assert large_lines(on(planned, 999)) == []
    (line,) = large_lines(on(planned, 1000))
    assert line in VIEW.answer_lines(on(planned, 1000))
    for words in ("1,000 nodes", "failures and restarts", "oversubscribed", "slowest of all"):
        assert words in line


def test_the_rate_of_interruptions_is_that_of_the_published_run(planned: Result) -> None:
    """419 in 54 days on 16,384 GPUs are 7.8 a day."""
    (line,) = large_lines(on(planned, 2048))
    assert "7.8 interruptions a day" in line or "7.76 interruptions a day" in line


def test_stated_failures_are_in_time_and_energy(planned: Result, tmp_path: Path) -> None:
    assert isinstance(planned.cluster, Cluster)
    stated = replace(planned.cluster, failures_per_node_day=2.0, checkpoint_s=60.0, restart_s=600.0)
    found = interruptions(stated, 1)
    failing = tuner.plan("opt-350m", cluster=stated, runs_dir=tmp_path, report=False)
    before, after = planned.baseline, failing.baseline
    time = after.time_to_solution_s / before.time_to_solution_s
    energy = after.energy_to_solution_kJ / before.energy_to_solution_kJ
    assert time == pytest.approx(found.time_ratio, rel=1e-3)
    assert 1 < energy < time
    (line,) = large_lines(failing)
    assert line.startswith(
        "Failures are counted: 2.00 a day on 1 node, with checkpoints every 37 min"
    )
    assert large_lines(on(failing, 1000))[1].startswith("Not modelled")
    assert "failures" not in large_lines(on(failing, 1000))[1]
    with pytest.raises(InputError, match="times as long"):
        tuner.plan(
            "opt-350m", cluster=replace(stated, restart_s=1e6), runs_dir=tmp_path, report=False
        )
