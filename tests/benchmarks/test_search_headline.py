"""The headline of the benchmark: starts of searches, stops of peers, figures of each kind."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.figures import Figure
from benchmarks.search.__main__ import main, options_of
from benchmarks.search.headline import Kind, kind_figures, over_all, search_lines
from benchmarks.search.made_up import (
    KINDS,
    adversarial_tables,
    clock_limit_tables,
    held_out_tables,
    misjudged_tables,
)
from benchmarks.search.names import OURS
from benchmarks.search.own_stop import ending, own_search, own_stops, search_to_own_stop
from benchmarks.search.problems import Problem, load_problem
from benchmarks.search.runner import ProblemSearch
from benchmarks.search.samplers import WITH_MODELS
from benchmarks.search.start import start_of
from benchmarks.search.truth import truth_of
from tests.support.studies import TOML, write_table
from tuner.models.job_prior import prior_of
from tuner.recordings.table import load_table

# A tool of developers, which mypy reads on every push.
pytestmark = pytest.mark.long

GROUP = "made-up"


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    return Problem(write_table(tmp_path / "table"), GROUP)


@pytest.mark.parametrize("name", [OURS, "hill-climb", "random-sweep", "tpe", "tpe-sweep"])
def test_every_sampler_starts_at_the_same_random_launch(problem: Problem, name: str) -> None:
    starts = []
    for seed in range(4):
        search = ProblemSearch(problem, name, seed)
        search.run(3)
        assert search.measured[0] == start_of(problem, seed)
        assert search.measured[0].get("speed") == 5  # the highest, as before any tuning
        starts.append(search.measured[0])
        if name.endswith(("sweep", "climb")):  # it goes on in the launch that was paid for
            assert {c.launch for c in search.measured[:3]} == {starts[-1].launch}
    assert len(set(starts)) > 1


def test_a_table_with_a_baseline_starts_there(tmp_path: Path) -> None:
    toml = TOML.replace("[cost]", "[baseline]\nshape = 2\nspeed = 3\n\n[cost]")
    problem = Problem(write_table(tmp_path / "table", toml=toml), GROUP)
    for seed in range(3):
        start = start_of(problem, seed)
        assert (start.get("shape"), start.get("speed")) == (2, 3)
        records, _ = own_search(problem, seed)
        assert records[0].request.configurations()[0] == start


def test_a_hill_climb_ends_without_an_untried_neighbour_and_a_sweep_with_the_table(
    problem: Problem,
) -> None:
    truth = truth_of(problem)
    for seed in range(2):
        records, stop = own_search(problem, seed, "hill-climb")
        assert stop.kind == "exhausted"
        shapes = {record.request.launch["shape"] for record in records}
        # Shape 4 holds the front: its neighbours were tried, and what is not needed was not.
        assert {3, 4, 6} <= shapes
        assert shapes == set(range(min(shapes), max(shapes) + 1)) - {5, 7}
        sweep = search_to_own_stop(problem, seed, "random-sweep")
        assert (sweep.launches, sweep.measurements) == (6, len(truth.logs))
    assert ending(["tpe", "hill-climb", "random-sweep"]) == [OURS, "hill-climb", "random-sweep"]


def test_the_peer_at_its_own_stop_is_a_rival_if_it_finds_the_front(
    problem: Problem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Problem(write_table(tmp_path / "other", shapes=(1, 2, 3, 4)), GROUP)
    stops = own_stops([problem, other], [0, 1], samplers=(OURS, "hill-climb", "random-sweep"))
    oracle_kJ = {one: truth_of(one).oracle_kJ for one in (problem, other)}
    costs = {OURS: (2.0, 8.0), "hill-climb": (1.0, 1.0), "random-sweep": (10.0, 10.0)}
    for (table, name), several in stops.items():
        missed = 0.05 if name == "hill-climb" else 0.01 * (1 + (table == other))
        kJ = costs[name][table == other] * oracle_kJ[table]
        again = 2 * (table == other)
        stops[table, name] = [
            replace(one, kJ=kJ, front_regret=missed / 4, launches=4, relaunches=again, cpu_s=2.0)
            for one in several
        ]
    figures = {one.name: one.value for one in kind_figures(Kind("made", {}, stops))}
    assert figures["own_stop_over_oracle_made"] == pytest.approx(4.0)
    assert figures["front_regret_mean_made"] == pytest.approx(0.375)
    assert figures["front_regret_worst_made"] == pytest.approx(0.5)
    assert figures["hill_climb_front_regret_mean_made"] == pytest.approx(1.25)
    assert figures["front_regret_coverage_made"] == 1.0
    assert figures["own_stop_over_best_peer_made"] == pytest.approx(0.4)
    assert figures["relaunches_made"] == pytest.approx(1.0)
    assert figures["driver_cpu_s_per_probe_made"] == pytest.approx(0.5)
    # The error is over the two groups: half the distance of their logarithms.
    assert f"4.00 (log +-{math.log(2):.2f})" in capsys.readouterr().out
    stops = {key: [replace(one, front_regret=0.0) for one in of] for key, of in stops.items()}
    (rivals,) = (
        one.value
        for one in kind_figures(Kind("made", {}, stops))
        if one.name.startswith("own_stop_over_best_peer")
    )
    assert rivals == pytest.approx(4.0)


def test_the_worst_kind_stands_for_all() -> None:
    figures = [
        Figure("groups_never_found_a", 1, "count"),
        Figure("groups_never_found_b", 2, "count"),
        Figure("missing_p90_a", 1.0, "%"),
        Figure("missing_p90_b", 3.0, "%"),
    ]
    assert {one.name: one.value for one in over_all(figures)} == {
        "groups_never_found": 3,
        "missing_p90": 3.0,
    }
    assert search_lines().value > 1000


def test_a_search_with_models_is_no_peer(problem: Problem) -> None:
    stops = own_stops([problem], [0], samplers=(OURS, "random-sweep"))
    stops[problem, WITH_MODELS] = [replace(one, kJ=0.1) for one in stops[problem, OURS]]
    figures = {one.name: one.value for one in kind_figures(Kind("made", {}, stops))}
    modelled = figures["own_stop_over_oracle_modelled"]
    assert modelled == pytest.approx(0.1 / truth_of(problem).oracle_kJ)
    of_a_job = {name: one for name, one in figures.items() if "_modelled_" in name}
    assert list(of_a_job.values()) == [modelled]
    assert all(name.replace("_", "").isalnum() for name in of_a_job)
    # Searches with models are not the worst of those without.
    dear = [Figure(name, 1e6, "ratio") for name in of_a_job]
    worst = {
        one.name: one.value for one in over_all([Figure("own_stop_over_oracle_a", 3, ""), *dear])
    }
    assert worst == {"own_stop_over_oracle": 3}
    sweep = stops[problem, "random-sweep"][0].kJ
    assert figures["own_stop_over_best_peer_made"] == pytest.approx(
        stops[problem, OURS][0].kJ / sweep
    )


def test_made_up_tables_hold_what_they_are_made_for(tmp_path: Path) -> None:
    for folder in clock_limit_tables(tmp_path):
        points = truth_of(Problem(folder, folder.name)).points
        same = {(p.configuration.launch, round(p.time_s, 6), round(p.power_W, 6)) for p in points}
        assert len(same) < 0.8 * len(
            points
        )  # a clock or a limit that does not bind changes nothing
    for folder in held_out_tables(tmp_path):
        # Neither the front nor the whole table is one row.
        assert len(truth_of(Problem(folder, folder.name)).front) >= 3
    for folder in adversarial_tables(tmp_path):
        truth = truth_of(Problem(folder, folder.name))
        front = {c for c, logs in truth.logs.items() if logs in {tuple(x) for x in truth.front}}
        if folder.name == "bursts":
            assert {c.micro_batch for c in front} == {64}
            assert len(front) == 6
            for point in truth.points:  # limits far above the mean power bind
                if point.configuration in front:
                    limit = point.configuration.get("power_limit_W")
                    assert isinstance(limit, int)
                    assert 1.2 < limit / point.power_W < 2
        if folder.name == "below-the-knee":
            assert 100 not in {c.get("power_limit_W") for c in front}
        if folder.name == "two-basins":  # the best of the other basin is much worse
            assert all(30 < c.micro_batch < 35 for c in front)
            others = [c for c in truth.logs if c.micro_batch < 20]
            assert truth.front_regret(others) > 0.1


def test_what_the_models_rank_first_misses_the_front_of_the_misjudged_tables(
    tmp_path: Path,
) -> None:
    for folder in misjudged_tables(tmp_path):
        problem = Problem(folder, load_table(folder).groups[0].name)
        truth, said = truth_of(problem), load_problem(problem).predicted_by
        assert said is not None
        every = list(truth.logs)
        prior = prior_of(said.job, said.cluster)
        assert prior is not None
        predicted = prior.predict(every)
        order = np.argsort(predicted.power_W * predicted.step_time_s**2)
        launches = list(dict.fromkeys(every[i].launch for i in order))[:5]
        assert len({each.launch for each in every}) == 90
        assert truth.front_regret([c for c in every if c.launch in launches]) > 0.05


def test_the_command_prints_the_figures_of_made_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.search import __main__ as command

    def one_table(kind: str, folder: Path) -> list[Problem]:
        return [Problem(write_table(folder / kind, shapes=(2, 4, 8)), GROUP)]

    monkeypatch.setattr(command, "problems_of", one_table)
    figures = tmp_path / "figures.json"
    samplers = ["--samplers", OURS, "hill-climb", "random-sweep", "tpe"]
    main(["--made", "several-knobs", *samplers, "--json", str(figures)])
    told = {each["name"] for each in json.loads(figures.read_text())}
    assert told == {
        "own_stop_over_oracle_several_knobs",
        *(f"front_regret_{of}" for of in ("mean", "p90", "worst")),
        *(
            f"{begin}front_regret_{of}_several_knobs"
            for begin in ("", "hill_climb_", "random_sweep_")
            for of in ("mean", "p90", "worst")
        ),
        "front_regret_coverage",
        "front_regret_coverage_several_knobs",
        "missing_p90_several_knobs",
        "own_stop_over_best_peer_several_knobs",
        "several_knobs_over_oracle",
        "groups_never_found_several_knobs",
        "groups_never_found",
        "own_stop_over_best_peer",
        "own_stop_over_oracle",
        "missing_p90",
        "relaunches_several_knobs",
        "relaunches",
        "driver_cpu_s_per_probe_several_knobs",
        "driver_cpu_s_per_probe",
        "search_lines",
    }
    assert options_of([]).made == [*KINDS]
    for wrong in (["--made", "rooms"], ["--made", ""]):
        with pytest.raises(SystemExit) as ended:
            options_of(wrong)
        assert ended.value.code == 2
