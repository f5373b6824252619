"""The report says what it must, loads nothing, and cannot be broken by what users wrote."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest
from jinja2 import UndefinedError
from plotly.offline import get_plotlyjs_version

from tests.support.results import (
    ESTIMATED,
    HOSTILE,
    NVML,
    TWIN,
    failed,
    hostile_result,
    large_result,
    point,
    records_of,
    small_result,
)
from tuner.answer.choice import decide
from tuner.answer.parts import Choice, Interval, ResolvedRequest
from tuner.display.figures import DARK, dark_palette
from tuner.display.html import environment, in_script
from tuner.display.plots import (
    figures,
    front_figure,
    hypervolume_figure,
    live_figure,
)
from tuner.display.report import render_report, result_html, write_report
from tuner.display.text import summary_lines
from tuner.display.view import WORDS, View
from tuner.formatting import number
from tuner.problem.constraints import Constraints
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.workload.records.probe import Basis, MeterInfo


class Page(HTMLParser):
    """The page as a browser splits it: visible text, the scripts, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.parts: list[str] = []
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append(tag)
            if tag == "script":
                self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.parts.append(data)
        elif self._inside[-1] == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.parts))

    def data(self) -> dict[str, dict]:
        return {
            str(attrs["id"]): json.loads(text)
            for attrs, text in self.scripts
            if attrs.get("type") == "application/json"
        }


def asked_for(**constraints: float) -> ResolvedRequest:
    return ResolvedRequest(Constraints(**constraints))


def empty_result() -> Result:
    return replace(
        small_result(),
        points=(),
        front_points=(),
        best=None,
        baseline=None,
        leave_one_out=None,
        progress=(),
        choice=Choice("knee", False, "Every probe failed, so there is nothing to choose from."),
    )


@pytest.fixture(scope="module")
def small() -> Page:
    return Page(render_report(small_result()))


@pytest.mark.parametrize(
    "said",
    [
        "The fastest configuration within the budget takes 262 s.",
        "5.37 kJ estimated 17 % less than today 4.89 to 5.85 kJ",  # the big figure and its label
        "58.5 kJ estimated",  # what the search spent
        "repay the search after 2,500 optimizer steps (25 % of the job)",
        "measured, 1 window",
        "Energy of every point: node scope, estimated (utilisation x envelope).",
        "median error 3.4 % of step time and 2.1 % of power",
        "p0004: out of memory",
        "MemoryError: 2 GiB",
        "no candidate is left to try",
        "energy budget of the job (kJ)",
        "window shorter than 5 s",
        "optuna 5.0.0",
        "P(non-dominated)",
    ],
)
def test_the_report_says(small: Page, said: str) -> None:
    assert said in small.text


def test_of_very_many_points_the_fronts_answer_a_click() -> None:
    result = large_result()
    least = max(p.time_to_solution_s for p in result.points)
    many = tuple(
        point(Configuration.of(micro_batch=10_000 + i), least + i, 900.0, NVML) for i in range(600)
    )
    page = Page(render_report(replace(result, points=(*many, *result.points))))
    known = {tuple(each["place"]) for each in page.data()["front-points"]}
    units = View(result).units
    assert {units.place(p) for p in (*result.front_points, result.baseline)} <= known


def test_every_front_point_and_the_baseline_are_rows() -> None:
    result = large_result()
    text = render_report(result)
    front = text[text.index("<tbody>") : text.index("</tbody>")]
    outside = 1  # the baseline is not on this front
    assert front.count("<tr") == len(result.front_points) + outside
    assert front.count(">recommended<") == 1
    assert front.count(">today<") == 1
    for p in result.front_points:
        assert f"clock_MHz={p.configuration.get('clock_MHz')}" in front


@pytest.mark.parametrize("meter", [NVML, ESTIMATED, TWIN], ids=lambda m: m.label)
def test_the_mark_of_a_meter_stands_by_its_figures_only(meter) -> None:  # type: ignore[no-untyped-def]
    result = large_result(meter)
    page = render_report(result)
    body = page[page.index("<main>") : page.index("What each number means")]
    titles = [
        figure.layout[axis].title.text
        for figure in figures(result).values()
        for axis in ("xaxis", "yaxis")
    ]
    energy_titles = [t for t in titles if "nergy" in t]
    assert len(energy_titles) == 3
    if meter.mark:
        rows = body.count("<tr") - body.count("<thead><tr")
        assert body.count('class="estimated"') >= 2 * rows + 3  # energy and power; three tiles
        assert body.count(f">{meter.mark}</span>") >= 2 * rows + 3
        assert all(meter.mark in title for title in energy_titles)
    else:
        assert "estimated" not in body
        assert not any("estimated" in title for title in titles)


def test_it_loads_nothing(small: Page) -> None:
    for tag, attrs in small.tags:
        for name in ("src", "href", "data", "srcset", "action"):
            value = attrs.get(name)
            assert not value or value.startswith(("data:", "#")), (tag, name, value)
        assert tag not in ("iframe", "object", "embed", "base", "form")
    policy = [a["content"] for t, a in small.tags if a.get("http-equiv")]
    assert policy
    assert "default-src 'none'" in str(policy[0])
    assert "http" not in str(policy[0])
    css = Path(__file__).parents[2] / "tuner" / "templates" / "report.css"
    assert "url(" not in css.read_text("utf-8")
    assert "@import" not in css.read_text("utf-8")


ATTACKS = (
    "</script><img src=x onerror=alert(1)>",
    "{{7*7}} {% raise %} {# gone #}",
    '" onmouseover="alert(1)" \'><b>',
    "]]><!--<svg/onload=alert(1)>",
    "abc\u202efed\u2066x",
    "&lt;b&gt; &amp;amp;",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_text_of_the_user_adds_no_element_and_is_shown_as_it_is(attack: str) -> None:
    page, plain = (Page(render_report(hostile_result(text))) for text in (attack, "plain"))

    def names(each: Page) -> Counter[tuple[str, ...]]:
        return Counter((tag, *sorted(attrs)) for tag, attrs in each.tags)

    assert names(page) == names(plain)
    assert page.text.count(attack) >= 10
    assert page.data().keys() == plain.data().keys()
    for shown in page.data()["front-points"]:  # what a click writes into the page
        written = [shown["knobs"], *(lines for _, lines in shown["tiles"].values())]
        assert {tag for text in written for tag, _ in Page(text).tags} <= {"code", "span", "br"}
    notebook = [Page(result_html(hostile_result(text))) for text in (attack, "plain")]
    assert names(notebook[0]) == names(notebook[1])
    assert attack in notebook[0].text


def test_a_template_that_names_an_unknown_value_raises() -> None:
    with pytest.raises(UndefinedError):
        environment().from_string("{{ nothing }}").render()


def test_hostile_text_stays_text() -> None:
    result = hostile_result()
    page = Page(render_report(result, records=records_of(result)))
    mild = Page(render_report(small_result(), records=records_of(small_result())))
    # Only our own scripts, and every figure still parses: nothing closed a script early.
    ours = [attrs.get("id") for attrs, _ in page.scripts if "id" in attrs]
    assert len(page.scripts) == len(ours) + 1
    assert page.scripts[-1][1].strip() == mild.scripts[-1][1].strip()
    assert "figure-front" in page.data()
    assert HOSTILE in page.text  # shown, as text
    assert "log</script><!--" in page.text
    assert [t for t, _ in page.tags].count("title") == 1
    # No JSON could end its script element, even with a text that nobody escaped before.
    assert not [text for attrs, text in page.scripts if "id" in attrs and "<" in text]
    # Plotly reads tags in names and hover texts, so there they are escaped.
    for name, figure in page.data().items():
        for text in strings_of(figure):
            assert "<script" not in text.lower(), (name, text)


def test_json_cannot_end_its_script_element() -> None:
    # Plotly's own to_json escapes "<" today; the report must not rest on that.
    said = {"a": "</script><!-- & \u2028", "b": [1, None]}
    text = in_script(json.dumps(said, ensure_ascii=False))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == said


def strings_of(value: object) -> list[str]:
    if isinstance(value, dict):
        return [s for part in value.values() for s in strings_of(part)]
    if isinstance(value, list):
        return [s for part in value for s in strings_of(part)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize(
    "result",
    [
        empty_result(),
        small_result(1),
        small_result(2),
        replace(small_result(), baseline=None),
        replace(small_result(), best=None),
        replace(small_result(), leave_one_out=None, progress=(), failures=(), about={}),
        replace(small_result(), spent=replace(small_result().spent, payback_steps=None)),
    ],
    ids=["empty", "one", "two", "no-baseline", "no-best", "bare", "never-repaid"],
)
def test_results_with_parts_missing(result: Result) -> None:
    page = Page(render_report(result))
    assert result.choice.sentence in page.text
    assert "What each number means" in page.text
    for name, figure in page.data().items():
        assert name in ("palette", "limit-choices", "front-points") or figure["data"], name


def test_what_cannot_be_met_is_said() -> None:
    result = small_result()
    page = Page(render_report(replace(result, choice=replace(result.choice, met=False))))
    assert "; nothing measured trains within" in page.text
    assert "and this comes nearest" in page.text


def test_writing_makes_the_folder_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "report.html"
    assert write_report(small_result(), path) == path
    first = path.read_text("utf-8")
    write_report(large_result(), path)
    assert path.read_text("utf-8") != first
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_figure_that_is_not_finite_is_not_a_number_on_the_page() -> None:
    wild = replace(
        small_result().points[0],
        energy_interval_kJ=(math.nan, math.inf),
        time_interval_s=(math.nan, math.nan),
        power_W=math.nan,
    )
    result = small_result()
    result = replace(result, points=(wild, *result.points[1:]), front_points=(wild,), best=wild)
    page = render_report(result)
    body = page[page.index("<main>") : page.index('id="palette"')]
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", body)


# -- figures ----------------------------------------------------------------------------------


def trace(figure, name: str):  # type: ignore[no-untyped-def]
    return next(t for t in figure.data if (t.name or "").startswith(name))


def test_the_front_is_a_staircase_through_its_points() -> None:
    result = large_result()
    figure = front_figure(result)
    line = next(t for t in figure.data if t.mode == "lines")
    assert line.line.shape == "hv"
    front = trace(figure, "front")
    times_min = sorted(p.time_to_solution_s / 60 for p in result.front_points)
    assert list(line.x) == list(front.x) == times_min
    assert list(front.y) == sorted(
        (p.energy_to_solution_kJ for p in result.front_points), reverse=True
    )
    assert len(trace(figure, "dominated points").x) == len(result.points) - len(result.front_points)
    low, high = result.front_points[0].energy_interval_kJ
    assert front.error_y.array[0] == pytest.approx(
        high - result.front_points[0].energy_to_solution_kJ
    )
    assert front.error_y.arrayminus[0] == pytest.approx(
        result.front_points[0].energy_to_solution_kJ - low
    )


def test_hover_holds_the_whole_configuration() -> None:
    result = large_result()
    figure = front_figure(result)
    assert figure is not None
    text = trace(figure, "front").hovertext[0].replace("<br>", " ")
    for part in result.front_points[0].configuration.key.replace(" | ", " ").split():
        assert part in text
    assert "Power" in text
    assert "gpu scope" in text


@pytest.mark.parametrize(
    ("constraints", "lines", "said"),
    [
        ({"budget_kJ": 5.5}, 1, "budget 5.50 kJ"),
        ({"deadline_s": 200.0}, 1, "deadline 200 s"),
        ({"budget_kJ": 5.5, "deadline_s": 200.0}, 2, "deadline 200 s"),
        ({"budget_kJ": 500.0}, 0, None),
        ({}, 0, None),
    ],
)
def test_constraints_are_lines(constraints: dict, lines: int, said: str | None) -> None:
    figure = front_figure(replace(small_result(), request=asked_for(**constraints)))
    assert len(figure.layout.shapes) == lines
    texts = [a.text for a in figure.layout.annotations]
    assert (said in texts) if said else not texts
    below = figure.layout.xaxis.title.text.replace("<br>", " ")
    assert ("budget 500 kJ" in below) == (constraints == {"budget_kJ": 500.0})


def test_labels_of_limits_keep_apart() -> None:
    result = small_result()
    front = sorted(result.front_points, key=lambda p: p.time_to_solution_s)
    early, late = front[0].time_to_solution_s, max(p.time_to_solution_s for p in result.points)
    energies = [p.energy_to_solution_kJ for p in (*front, result.baseline) if p is not None]
    ends = set()
    for budget, deadline in (
        (min(energies), late),
        (max(energies), late),
        (max(energies), early),
    ):
        asked = asked_for(budget_kJ=budget, deadline_s=deadline)
        figure = front_figure(replace(result, request=asked))
        axis = figure.layout.yaxis.range
        labels = {a.text.split()[0]: a for a in figure.layout.annotations}
        high = (labels["budget"].y - axis[0]) / (axis[1] - axis[0]) > 0.5
        at_top = labels["deadline"].yanchor == "top"
        assert not (high and at_top and deadline == late), "both labels are in the same corner"
        assert at_top or deadline == late
        ends.add(at_top)
    assert ends == {True, False}


def test_a_power_cap_is_a_line_through_the_origin() -> None:
    figure = front_figure(replace(small_result(), request=asked_for(power_cap_W=30.0)))
    assert figure is not None
    line = trace(figure, "power cap 30.0 W")
    assert [e / t for t, e in zip(line.x, line.y, strict=True) if t] == pytest.approx(
        [0.030] * sum(1 for t in line.x if t)
    )


def test_wide_ranges_get_a_logarithmic_axis_and_wide_intervals_do_not_stretch_it() -> None:
    result = small_result()
    slow = point(Configuration.of(zero_stage=3), 9000.0, 30.0, ESTIMATED)
    figure = front_figure(replace(result, baseline=slow))
    assert figure.layout.xaxis.type == "log"
    # A dominated point far away is outside the view, and the figure says so.
    figure = front_figure(replace(result, points=(*result.points, slow)))
    assert figure.layout.xaxis.range[1] < 600
    before = front_figure(result)
    assert before is not None
    assert _outside(figure) == _outside(before) + 1
    vague = point(Configuration.of(zero_stage=2), 200.0, 40.0, ESTIMATED, spread=30.0)
    figure = front_figure(replace(result, baseline=vague))
    assert figure.layout.xaxis.type is None
    assert figure.layout.xaxis.range[1] < 600


def _outside(figure: go.Figure) -> int:
    names = " ".join(t.name or "" for t in figure.data)
    found = re.search(r"(\d+) of them outside this view", names)
    return int(found[1]) if found else 0


def test_energy_against_the_live_knob() -> None:
    figure = live_figure(large_result())
    assert figure.layout.xaxis.title.text == "SM clock (MHz)"
    assert {t.name for t in figure.data} == {f"mb{m}" for m in (1, 2, 4, 8)}
    for curve in figure.data:
        assert list(curve.x) == list(range(600, 1800, 100))
        assert curve.marker.size[list(curve.y).index(min(curve.y))] == max(curve.marker.size)
    assert live_figure(small_result()) is None


def test_hypervolume() -> None:
    result = small_result()
    figure = hypervolume_figure(result)
    curve = figure.data[0]
    assert list(curve.x[1:]) == [energy for energy, _ in result.progress]
    assert curve.y[-1] == pytest.approx(100)
    assert hypervolume_figure(replace(result, progress=((1.0, 0.0),))) is None


def test_every_colour_of_a_figure_has_a_dark_one() -> None:
    result = large_result()
    for figure in figures(result, records_of(result)).values():
        used = set(re.findall(r"#[0-9a-fA-F]{6}\b", figure.to_json())) - {"#2a3f5f"}
        assert used <= set(DARK)
        fills = set(re.findall(r"rgba\([^)]*\)", figure.to_json())) - {"rgba(0,0,0,0)"}
        assert fills <= set(dark_palette())
        # plotly 5.20 refuses eight digits.
        assert not re.search(r"#[0-9a-fA-F]{8}\b", figure.to_json())
    assert len(set(DARK.values())) == len(DARK)


# -- words ------------------------------------------------------------------------------------


def test_payback_in_words() -> None:
    result = small_result()
    long = replace(result.spent, payback_steps=32_000.0, payback_share=3.2)
    assert "3.20 runs of the whole job" in View(replace(result, spent=long)).payback
    one = replace(result.spent, payback_steps=0.67, payback_share=0.67)
    assert (
        "after 0.670 optimizer steps (67 % of the job)" in View(replace(result, spent=one)).payback
    )
    many = replace(result.spent, payback_steps=6490.3, payback_share=6490.3)
    text = View(replace(result, spent=many)).payback
    assert "after 6,490 runs of the whole job" in text


def test_the_page_is_under_a_megabyte_and_carries_what_its_plots_need() -> None:
    """The bundle holds scatter and bar plots, of the same plotly.js as the package's own."""
    result = large_result()
    page = render_report(result)
    assert len(page.encode()) < 1_000_000
    packed = re.search(r'id="plotly">([^<]+)<', page)
    # A person compares another content with the release of plotly.js that it is said to be.
    known = "f313efa663f6eabdb4629d17b4c484bcecc922a2dc79055a64417eee1e042546"
    assert hashlib.sha256(base64.b64decode(packed[1])).hexdigest() == known
    code = gzip.decompress(base64.b64decode(packed[1])).decode()
    major = get_plotlyjs_version().partition(".")[0]
    assert f"plotly.js (basic - minified) v{major}." in code[:200]
    assert "MIT license" in code[:400]
    figures = re.findall(r'<script type="application/json" id="figure-[^"]+">(.+?)</script>', page)
    assert figures
    traces = {trace.get("type") for text in figures for trace in json.loads(text)["data"]}
    assert traces <= {"scatter", "bar"}


# ---- its head


def test_the_headline_says_what_the_recommendation_brings() -> None:
    result = large_result()
    page = render_report(result)
    headline = page.partition("<h1>")[2].partition("</h1>")[0]
    energy = result.recommendation.energy.relative
    # The number and its unit are never on two lines.
    assert re.search(rf"{abs(100 * energy):.0f}(\.\d)?\u00a0% less", headline)
    assert "than today" in headline
    assert f"run {result.name}" in page


def test_a_card_is_grey_where_no_difference_is_shown() -> None:
    result = large_result()
    clear = render_report(result)
    wide = Interval(1.0, 1e9)
    unclear = replace(result, baseline=replace(result.baseline, energy_interval_kJ=wide))
    unclear.__dict__["recommendation"] = result.recommendation
    page = render_report(unclear)
    grey = "than today; no difference shown"
    tiles, before = (
        each.partition('class="side"')[2].partition("<p>")[0] for each in (page, clear)
    )
    assert tiles.count(grey) == before.count(grey) + 1


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"objective": "cost", "price_per_kWh": 0.3, "price_per_gpu_hour": 2.0}, "Cost"),
        ({"objective": "carbon", "grid_gCO2_per_kWh": 360.0}, "Emissions"),
    ],
)
def test_cost_and_emissions_of_the_choice_and_of_today(asked: dict, name: str) -> None:
    result = large_result()
    assert "Cost at" not in render_report(result)
    constraints = Constraints(**asked)
    best, choice = decide(result.points, constraints)
    _, today = decide([result.baseline], constraints)
    result = replace(result, best=best, choice=choice, request=ResolvedRequest(constraints))
    page = render_report(result)
    card = next(part for part in page.split('<div class="figure">') if f">{name}" in part)
    size = 1000 if name == "Emissions" and choice.objective_value >= 1000 else 1
    assert f">{number(choice.objective_value / size)} <" in card
    assert f"today {number(today.objective_value / size)}" in card


PREDICTING = MeterInfo("simulated", "node", "the analytic models", estimated=True)


def test_a_prediction_is_never_called_measured() -> None:
    result = large_result(PREDICTING)
    points = tuple(replace(point, source="predicted") for point in result.points)
    result = replace(result, points=points, job=load_job("tiny-gpt"))
    page = render_report(result)
    assert len(result.points) > len(result.front_points)
    assert f"All {len(result.points)} points predicted, least energy first" in page
    assert "<div>predicted, not measured</div>" not in page


# ---- basis of a result


def test_every_basis_has_words_of_its_own() -> None:
    assert WORDS.keys() == set(Basis)
    for name in (item.name for item in fields(WORDS[Basis.MEASURED])):
        measured, predicted = (getattr(WORDS[b], name) for b in (Basis.MEASURED, Basis.PREDICTED))
        assert measured != predicted, name
    assert WORDS[Basis.RECORDED].found == "measured"


@pytest.mark.parametrize("meter", [NVML, ESTIMATED, TWIN], ids=["metered", "estimated", "twin"])
def test_the_mark_of_a_meter_does_not_change_the_basis(meter: MeterInfo) -> None:
    assert meter.basis is Basis.MEASURED
    assert meter.marks.get("twin", False) is meter.twin
    result = replace(small_result(meter=meter), job=load_job("tiny-gpt"))
    assert View(result).basis is Basis.MEASURED


def test_without_a_job_the_figures_are_of_a_recording() -> None:
    view = View(replace(small_result(), job=None))
    assert view.basis is Basis.RECORDED
    assert "from a recording" in render_report(view.result)


def test_a_study_of_failed_predictions_alone_is_a_prediction() -> None:
    record = failed("p0001", "out_of_memory", "out of memory", "")
    empty = replace(
        small_result(),
        points=(),
        front_points=(),
        best=None,
        baseline=None,
        failures=(replace(record, meter=PREDICTING),),
    )
    assert View(empty).basis is Basis.PREDICTED
    assert View(replace(empty, failures=(record,))).basis is not Basis.PREDICTED


def test_predictions_are_called_that_wherever_the_basis_is_said() -> None:
    result = small_result(meter=PREDICTING)
    view = View(replace(result, job=load_job("tiny-gpt")))
    assert view.basis is Basis.PREDICTED
    assert view.words.notice in summary_lines(view.result)
    page = render_report(view.result)
    assert "predicted, nothing was measured" in page
    assert "Search spent" not in page
