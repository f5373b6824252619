"""Jackknifed problems, their noise and truth, and the stop of a search by its own rule."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search.__main__ import main
from benchmarks.search.names import OURS
from benchmarks.search.own_stop import own_stops, search_to_own_stop
from benchmarks.search.problems import (
    Problem,
    load_problem,
    repeat_noise,
    repeat_sets,
    split_of,
)
from benchmarks.search.runner import run
from benchmarks.search.truth import truth_of
from tests.support.studies import write_table
from tuner.recordings.table import load_table

# A tool of developers, which mypy reads on every push.
pytestmark = pytest.mark.long

LIMITS = (100, 150, 200, 250, 300)
TOML = """
name = "limits"
launch_knobs = ["batch_size"]
live_knobs = ["power_limit_W"]
group_by = ["where"]
time_s = "t"
power_W = "p"

[noise]
time_cv = 0.001
power_cv = 0.001

[cost]
launch_s = 10.0
launch_power = 0.5
settle_s = 1.0
window_s = 4.0
"""


def capped(batch: int, limit_W: int, draw: np.random.Generator | None) -> tuple[float, float]:
    """A launch draws 40 W a doubling of the batch; a limit below that slows it down."""
    free_W = 40.0 * math.log2(batch)
    power_W = min(free_W, limit_W)
    time_s = 100 / math.sqrt(batch) * (free_W / power_W) ** 0.5
    if draw is not None and limit_W > free_W:
        return time_s * math.exp(0.02 * draw.standard_normal()), power_W
    return time_s, power_W


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Group "mixed" has launches of 40 to 240 W, "idle" only launches that no limit binds."""
    draw = np.random.default_rng(0)
    rows = ["where,batch_size,power_limit_W,t,p"]
    for where, batches in (("mixed", (2, 4, 8, 16, 32, 64)), ("idle", (2, 3))):
        for batch, limit_W in itertools.product(batches, LIMITS):
            time_s, power_W = capped(batch, limit_W, draw)
            rows.append(f"{where},{batch},{limit_W},{time_s:.5f},{power_W:.4f}")
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "table.toml").write_text(TOML)
    return tmp_path


def test_limits_that_cannot_bind_are_repeats(folder: Path) -> None:
    table = load_table(folder)
    found = {
        points[0].configuration.launch["batch_size"]: len(points)
        for points in repeat_sets(table.group("mixed"))
    }
    # All limits above the power of a launch: 40, 80, 120, 160, 200 and 240 W.
    assert found == {2: 5, 4: 5, 8: 4, 16: 3, 32: 2, 64: 2}
    idle = table.group("idle")
    assert sum(map(len, repeat_sets(idle))) == len(idle.points)


def test_limits_that_the_rows_show_to_bind_are_no_repeats(folder: Path) -> None:
    """The search's own rule takes limits above 1.3 times the mean power for repeats."""
    rows = ["where,batch_size,power_limit_W,t,p"]
    for batch, limit_W in itertools.product((8, 16, 24, 32), LIMITS):
        burst_s, rest_s = 30 * (400 / limit_W) ** 0.5, 700 / batch
        power_W = (burst_s * limit_W + rest_s * 40) / (burst_s + rest_s)
        rows.append(f"bursts,{batch},{limit_W},{burst_s + rest_s:.5f},{power_W:.4f}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    group = load_table(folder).group("bursts")
    assert max(p.configuration.live["power_limit_W"] / p.power_W for p in group.points) > 2
    assert repeat_sets(group) == []
    assert load_problem(Problem(folder, "bursts", 0)).noise == load_table(folder).noise


def test_the_noise_is_the_spread_of_the_repeats(folder: Path) -> None:
    table = load_table(folder)
    noise = repeat_noise(table, table.group("mixed"))
    assert noise.time_cv == pytest.approx(0.02, rel=0.6)
    assert noise.power_cv < 1e-6


def test_a_table_without_power_limits_keeps_its_noise(tmp_path: Path) -> None:
    table = load_table(write_table(tmp_path / "table"))
    assert repeat_sets(table.groups[0]) == []
    assert repeat_noise(table, table.groups[0]) == table.noise


def test_a_jackknifed_table_drops_a_quarter_of_the_launches_by_its_seed(folder: Path) -> None:
    def kept(seed: int) -> set[int]:
        points = load_problem(Problem(folder, "mixed", seed)).groups[0].points
        return {point.configuration.launch["batch_size"] for point in points}

    assert {len(kept(seed)) for seed in range(8)} == {4}
    assert kept(1) == kept(1)
    assert len({frozenset(kept(seed)) for seed in range(8)}) > 3
    assert len(load_problem(Problem(folder, "idle", 0)).groups[0].points) == 10


def test_repeats_have_one_truth_and_the_oracle_visits_one_of_them(folder: Path) -> None:
    truth = truth_of(Problem(folder, "idle", 0))
    assert len(set(truth.logs.values())) == 2
    assert (truth.oracle_launches, truth.oracle_measurements) == (2, 2)


def test_the_split_is_by_table_and_group() -> None:
    assert split_of("zeus-nsdi23", "squad, V100 (1 GPU)") == "tuned"
    assert split_of("zeus-nsdi23", "squad, Quadro RTX6000 (1 GPU)") == "seen"
    assert split_of("kareus-attention-a100", "any") == "tuned"
    assert split_of("mine", "V100") == "held_out"


def test_a_search_ends_by_its_own_rule_and_pays_for_what_it_probed(folder: Path) -> None:
    problem = Problem(folder, "mixed", 0)
    truth = truth_of(problem)
    (stop,) = own_stops([problem], [0])[problem, OURS]
    assert stop == search_to_own_stop(problem, 0)
    assert stop.reason in {"not_worth_it", "exhausted"}
    assert 0 <= stop.missing < 1
    assert 0 < stop.launches <= stop.measurements <= 2 * len(truth.logs)
    assert 0 < stop.kJ <= truth.whole_kJ


def test_every_group_is_in_the_figures_and_has_to_be_found(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "figures.json"
    options = ["--samplers", "hill-climb", "random", "--jackknife", "2", "--seeds", "0"]
    main([str(folder), *options, "--json", str(json_file)])
    out = capsys.readouterr().out
    assert "held_out groups, jackknifed: 2 groups" in out
    figures = {figure["name"]: figure["value"] for figure in json.loads(json_file.read_text())}
    problems = [Problem(folder, name, seed) for name in ("mixed", "idle") for seed in (0, 1)]
    ours, climb = (
        math.exp(
            np.mean(
                [
                    math.log(run(p, name, p.jackknife or 0).kJ / truth_of(p).oracle_kJ)
                    for p in problems
                ]
            )
        )
        for name in ("joulefront", "hill-climb")
    )
    assert figures["jackknife_over_oracle_held_out"] == pytest.approx(ours)
    assert figures["jackknife_over_best_peer_held_out"] == pytest.approx(ours / climb)
    assert figures["groups_never_found_jackknifed"] == 0
