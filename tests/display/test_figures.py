"""The figures and parts beyond the front: power over time, phases, where it goes, paper."""

from __future__ import annotations

import gzip
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from tests.support.results import (
    HIGH_W,
    LOW_W,
    NVML,
    STEP_S,
    attained,
    large_result,
    phased,
    point,
    result_of_phased,
    small_result,
)
from tests.support.studies import TOML, run_replay, write_table
from tuner.answer.judge import Judge
from tuner.answer.parts import Verification
from tuner.comparison.explain import explain
from tuner.display.advice import evidence_sentence
from tuner.display.figures import (
    PURPLE,
    Timeline,
    phase_means,
    read_timeline,
    shown_timelines,
    timeline_figure,
)
from tuner.display.plots import figures, front_figure
from tuner.display.report import render_report
from tuner.problem.settings import NoVerdict
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.job import load_job
from tuner.workload.records.probe import PowerSample, ProbeRecord, ProbeRequest
from tuner.workload.records.trace import read_trace


def test_a_timeline_keeps_its_windows_and_idle(tmp_path: Path) -> None:
    record = phased(tmp_path)
    timeline = read_timeline(tmp_path, record)
    assert timeline is not None
    figure = timeline_figure(timeline)
    names = [trace.name for trace in figure.data]
    assert names[0] == "gpu (nvml)"
    assert max(figure.data[0].y) == HIGH_W
    assert min(figure.data[0].y) == LOW_W
    (shaded,) = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert (shaded.x0, shaded.x1) == (3.0, 7.8)
    texts = [a.text for a in figure.layout.annotations]
    assert texts == ["1200MHz", "idle 60.0 W"]


def test_a_long_timeline_is_thinned_and_keeps_its_peaks() -> None:
    samples = [PowerSample(i / 10, 100.0 + (500.0 if i == 7777 else 0.0)) for i in range(20_000)]
    record = ProbeRecord(ProbeRequest("p0000", Settings(data_parallel=1)), (), NVML)
    line = timeline_figure(Timeline(record, tuple(samples))).data[0]
    assert len(line.x) < 1500
    assert max(line.y) == 600.0
    assert list(line.x) == sorted(line.x)


def test_the_power_of_phases_is_told(tmp_path: Path) -> None:
    timeline = read_timeline(tmp_path, phased(tmp_path))
    assert timeline is not None
    means = {name: (seconds, power) for name, seconds, power in phase_means(timeline)}
    assert means["forward"] == pytest.approx((STEP_S / 2, LOW_W), rel=0.06)
    assert means["backward"] == pytest.approx((STEP_S / 2, HIGH_W), rel=0.06)


def test_without_marks_or_samples_nothing_is_drawn(tmp_path: Path) -> None:
    record = phased(tmp_path)
    timeline = read_timeline(tmp_path, record)
    assert timeline is not None
    bare = replace(timeline, phases=())
    assert phase_means(bare) == []
    assert read_timeline(tmp_path / "elsewhere", record) is None
    assert read_timeline(None, record) is None


def test_power_that_cannot_be_read_is_left_out_of_the_report_with_a_sentence(
    tmp_path: Path,
) -> None:
    result, record = result_of_phased(tmp_path)
    (tmp_path / "trace" / "power" / "p0001.csv.gz").write_bytes(b"not a table")
    with pytest.raises(InputError, match="power samples"):
        read_timeline(tmp_path, record)
    timelines, (sentence,) = shown_timelines(result, [record])
    assert not timelines
    assert sentence in unescape(render_report(result, records=[record]))


@pytest.mark.slow
def test_power_of_any_size_takes_little_memory(tmp_path: Path) -> None:
    table = Path(__file__).parents[1] / "data" / "cpu-tiny-gpt"
    result = run_replay(table, runs_dir=tmp_path, name="full", max_probes=3, report=False)
    assert result.run_dir is not None
    power = result.run_dir / "trace" / "power"
    power.mkdir()
    rows = gzip.compress(b"0.1,200.0\n" * 100_000)  # a megabyte, in about two kilobytes
    for record in read_trace(result.run_dir / "trace" / "probes.jsonl").records:
        packed = gzip.compress(b"time_s,power_W\n") + rows * 2000
        (power / f"{record.request.probe_id}.csv.gz").write_bytes(packed)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30));"
        "from tuner.cli.main import main; sys.exit(main(['show', '--html', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(result.run_dir)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each thread's stack counts, too
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    page = (result.run_dir / "report.html").read_text("utf-8")
    assert "is left out: cannot read the power samples" in page
    assert 'id="plot-timeline-best"' not in page


def test_the_report_holds_power_and_phases(tmp_path: Path) -> None:
    result, record = result_of_phased(tmp_path)
    assert "timeline-best" in figures(result, [record])
    page = render_report(result, records=[record])
    for said in ("plot-timeline-best", ">backward<", "50 %"):
        assert said in page


def test_where_it_goes_is_said_of_a_job_that_is_known() -> None:
    job, cluster = load_job(), load_cluster("cpu-2")
    result = replace(small_result(), job=job, cluster=cluster)
    title = "Where its time and energy go"
    said = explain(result)
    table = render_report(result).partition(title)[2].partition("</section>")[0]
    assert title not in render_report(small_result())  # its job is not known
    assert said.time_s
    assert set(said.time_s) <= set(re.findall(r"<td[^>]*>([^<]+)</td>", table))


def test_the_band_and_the_predicted_points_are_drawn() -> None:
    result = large_result()
    maybe = point(
        Configuration.of(data_parallel=2, micro_batch=8, clock_MHz=1750),
        900.0,
        480.0,
        NVML,
        source="predicted",
        windows=0,
        p_nondominated=0.6,
    )
    result = replace(result, attainment=attained(result), predicted=(maybe,))
    figure = front_figure(result)
    traces = {trace.name: trace for trace in figure.data}
    band = traces["80 % band of the true front"]
    assert band.fill == "tonexty"
    assert all(math.isfinite(v) for v in (*band.x, *band.y))
    assert len(band.x) == len(result.front_points)
    assert list(traces["points never tried"].x) == [15.0]  # minutes
    # Of an open symbol the marker's own colour is the edge: white would not be seen.
    assert traces["points never tried"].marker.color == PURPLE
    page = render_report(result)
    assert "shaded band" in page
    assert "Predicted to be on the front, not measured: 1" in page


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (None, ""),
        (
            NoVerdict("limits_reached", limit="max_probes"),
            "no more were made: the number of probes that it may make leaves no room",
        ),
        (NoVerdict("limits_reached", limit="stopped"), "the search was stopped before"),
        (NoVerdict("not_requested"), "(--no-verify)"),
    ],
)
def test_what_the_recommendation_rests_on_is_always_said(monkeypatch, ended, words) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(Judge, "launches_of", lambda judge, point: frozenset({1}))
    monkeypatch.setattr(Judge, "_compared", lambda judge, point: False)
    result = replace(large_result(), verification=Verification(8, 3.0, ended))
    page = unescape(render_report(result))
    said = evidence_sentence(result)
    assert words in said
    assert page.count(said) == 1


def test_each_sentence_of_a_verified_study_stands_on_the_page_once(tmp_path) -> None:
    """Of the header and of every part; the figures' own texts apart."""
    toml = TOML + "[noise]\ntime_cv = 0.005\npower_cv = 0.01\n"
    result = run_replay(
        write_table(tmp_path / "t", toml=toml), runs_dir=tmp_path / "runs", max_probes=20
    )
    assert result.verification.probes
    page = re.sub(r"<script.*?</script>", "", result.report_path.read_text(), flags=re.DOTALL)
    texts = [unescape(text).strip() for text in re.split(r"<[^>]*>", page)]
    parts = [part for text in texts for part in re.split(r"(?<=\.) ", text)]
    sentences = [part.rstrip(".") for part in parts if part.endswith(".") and part.count(" ") > 3]
    assert evidence_sentence(result).rstrip(".") in sentences
    assert [s for s in dict.fromkeys(sentences) if sentences.count(s) > 1] == []


def test_plot_names_what_there_is() -> None:
    result = replace(small_result(), run_dir=None)
    with pytest.raises(UnknownName, match="hypervolume"):
        result.plot("pie")


def test_a_notebook_shows_the_choice_and_the_front() -> None:
    result = large_result()
    shown = result._repr_html_()
    assert result.headline in shown
    assert shown.count("<tr>") == len(result.front_points) + 1
    assert "<b>recommended</b>" in shown
    hostile = replace(result, name="<script>alert(1)</script>")
    assert "<script" not in hostile._repr_html_()
