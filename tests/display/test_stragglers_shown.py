"""Stragglers of a study's probes: read from its trace, in the summary and in the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.results import small_result
from tests.support.studies import modelled_study
from tuner.api import load_result
from tuner.display.report import render_report
from tuner.display.text import summary_lines
from tuner.search_spaces.fields import dump_fields
from tuner.workload.node.measure.stragglers import RankState, Straggler, of_environment

HOT = Straggler(RankState(5, node="<b>", device=5), 0.1, 0.09, "heat", 900.0, 1410.0)


def test_a_studys_stragglers_are_a_line_each_and_a_table(tmp_path: Path) -> None:
    run = modelled_study(tmp_path, max_probes=3).run_dir
    assert run is not None
    trace = run / "trace" / "probes.jsonl"
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    held = next(line for line in lines if line.get("request", {}).get("probe_id") == "p0001")
    held["environment"] = {**held.get("environment", {}), "stragglers": [dump_fields(HOT)]}
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = load_result(run)
    said = "GPU 5 of node <b>: heat, 900 MHz where the others run 1,410; costs 9 % of the step"
    assert f"Straggler in p0001: {said}" in summary_lines(result)
    page = render_report(result)
    assert "Stragglers (1)" in page
    assert ">GPU 5 of node &lt;b&gt;</td>" in page
    assert ">heat, 900 MHz where" in page


def test_without_stragglers_nothing_is_said() -> None:
    result = replace(small_result(), stragglers=())
    assert "Stragglers (" not in render_report(result)
    assert "Straggler" not in "\n".join(summary_lines(result))


@pytest.mark.parametrize(
    "change",
    [{"cause": "a stranger's"}, {"cost": "much"}, {"state": {"no": 1}}, {"state": 3}],
)
def test_what_a_stranger_wrote_in_a_record_is_left_out(change: dict[str, object]) -> None:
    odd = {**dump_fields(HOT), **change}
    assert of_environment({"stragglers": [odd, dump_fields(HOT), 3, "x", None]}) == [HOT]
    assert of_environment({"stragglers": "x"}) == []
    assert of_environment({}) == []
