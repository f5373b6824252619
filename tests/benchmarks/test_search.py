"""The search benchmark on a table of our own: what it charges, whom it compares, what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.search.__main__ import main
from benchmarks.search.made_up import (
    BATCHES,
    CLOCKS_MHZ,
    LIMITS_W,
    clock_by_limit,
    write,
)
from benchmarks.search.names import OURS
from benchmarks.search.own_stop import own_search
from benchmarks.search.problems import Problem
from benchmarks.search.runner import run
from benchmarks.search.truth import WITHIN, truth_of
from tests.support.studies import TOML, table_point, write_table
from tuner.search.planner import MAX_LIVE

# A tool of developers, which mypy reads on every push.
pytestmark = pytest.mark.long

NOISY = TOML + "[noise]\ntime_cv = 0.002\npower_cv = 0.01\n"
GROUP = "made-up"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_table(tmp_path / "table", toml=NOISY)


def visit_kJ(shape: int, speed: int) -> float:
    return 5.0 * table_point(shape, speed)[1] / 1000


def launch_kJ(shape: int, speed: int) -> float:
    return 10.0 * 0.5 * table_point(shape, speed)[1] / 1000


def test_the_oracle_launches_the_fronts_launches_and_visits_its_settings(folder: Path) -> None:
    truth = truth_of(Problem(folder, GROUP))
    # Shape 4 is the fastest at every speed; a narrower one never uses less energy.
    every = {(s, v): table_point(s, v) for s in (1, 2, 3, 4, 6, 8) for v in range(1, 6)}
    figures = {k: (t * p, t) for k, (t, p) in every.items()}
    front = [
        k
        for k, (e, t) in figures.items()
        if not any(a <= e and b <= t and (a, b) != (e, t) for a, b in figures.values())
    ]
    assert {shape for shape, _ in front} == {4}
    assert (truth.oracle_launches, truth.oracle_measurements) == (1, len(front))
    first = front[0]
    expected = launch_kJ(*first) + sum(visit_kJ(*point) for point in front)
    assert truth.oracle_kJ == pytest.approx(expected, rel=1e-4)
    assert truth.whole_kJ == pytest.approx(
        sum(launch_kJ(*k) + visit_kJ(*k) for k in every), rel=1e-4
    )


@pytest.mark.parametrize("name", [OURS, "random", "tpe"])
def test_a_run_ends_at_the_front_and_pays_for_what_it_probed(folder: Path, name: str) -> None:
    made = run(Problem(folder, GROUP), name, seed=1)
    assert made.found
    assert made.curve[-1] == (pytest.approx(made.kJ), *made.curve[-1][1:])
    assert made.curve[-1][1] <= WITHIN < made.curve[-2][1]
    assert [kJ for kJ, _, _ in made.curve] == sorted(kJ for kJ, _, _ in made.curve)
    assert made.curve[-1][2] <= made.curve[0][2]
    assert len(made.curve) == made.launches
    if not name.startswith(OURS):  # a launch a point
        assert made.launches == made.measurements
    else:
        assert made.launches < made.measurements


def test_a_run_that_never_gets_there_is_charged_the_whole_table(folder: Path) -> None:
    truth = truth_of(Problem(folder, GROUP))
    made = run(Problem(folder, GROUP), "random", seed=0, most=2)
    assert not made.found
    assert made.kJ == truth.whole_kJ
    assert made.measurements == made.launches == 30


def test_the_same_seed_runs_the_same_and_another_does_not(folder: Path) -> None:
    first, again, other = (run(Problem(folder, GROUP), "random", seed=s) for s in (3, 3, 4))
    assert first.curve == again.curve
    assert first.curve != other.curve


def test_the_command_prints_a_line_a_sampler_and_ends_with_the_ratios(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = tmp_path / "two"
    two.mkdir()
    rows = (folder / "table.csv").read_text().splitlines()
    lines = ["where," + rows[0]]
    lines += [f"here,{row}" for row in rows[1:]] + [f"there,{row}" for row in rows[6:]]
    (two / "table.csv").write_text("\n".join(lines) + "\n")
    (two / "table.toml").write_text('group_by = ["where"]\n' + NOISY)
    figures = tmp_path / "figures.json"
    options = ["--samplers", "random", "tpe", "--seeds", "2"]
    options += ["--jackknife", "1"]
    main([str(two), *options, "--json", str(figures)])
    out = capsys.readouterr().out.splitlines()
    for name in (OURS, "random", "tpe"):  # the held-out groups, all jackknifed ones, as recorded
        assert sum(line.split()[:1] == [name] for line in out) == 3
    assert out[-1].split()[1] == "search_lines"
    told = {f["name"] for f in json.loads(figures.read_text())}
    assert told >= {
        "own_stop_over_oracle_recorded",
        "missing_p90_jackknifed",
        "groups_never_found",
        "jackknife_over_oracle_held_out",
        "missing_p90_held_out",
        "front_regret_mean_held_out",
        "front_regret_worst_jackknifed",
        "random_front_regret_p90_held_out",  # of a peer without a stop of its own
    }
    assert not any(name.endswith("_tuned") for name in told)


def test_a_name_of_no_sampler_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="'joulefront/other' is none of joulefront, "):
        run(Problem(folder, GROUP), f"{OURS}/other", seed=1)


def test_the_only_launch_is_measured_in_one_go_until_little_is_left(tmp_path: Path) -> None:
    answer = clock_by_limit(2)
    table = write(tmp_path / "one", answer, BATCHES[-1:], LIMITS_W, CLOCKS_MHZ)
    problem = Problem(table, "one")
    records, stop = own_search(problem, 0)
    [visited] = [record.request.configurations() for record in records]
    assert MAX_LIVE + 1 < len(visited) < len(LIMITS_W) * len(CLOCKS_MHZ)
    assert stop.kind == "not_worth_it"
    assert truth_of(problem).missing(visited) < 0.02
