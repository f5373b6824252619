"""The report's sliders: in a browser they choose as `Result.choose` does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.display.report_page import answer_of_page
from tests.support.results import NVML, large_result, point, result_of, small_result
from tuner.answer.parts import ResolvedRequest
from tuner.display.html import choice_grid, limit_values
from tuner.display.view import View
from tuner.problem.constraints import Constraints
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration

# Moves the sliders, and notes what is chosen and what the front's figure shows.
MOVE = """
  const part = document.getElementById("limits");
  const front = document.getElementById("plot-front");
  const seen = [{ ...part.choice, said: document.getElementById("limits-choice").textContent }];
  for (const [deadline, budget] of POSITIONS) {
    for (const [name, position] of [["deadline", deadline], ["budget", budget]]) {
      const slider = document.getElementById(`limit-${name}`);
      slider.value = position;
      slider.dispatchEvent(new Event("input"));
    }
    seen.push({ ...part.choice, said: document.getElementById("limits-choice").textContent,
      command: document.getElementById("limits-command").textContent });
  }
  const done = () => {
    const last = front.data?.at(-1);
    const lines = (front.layout?.shapes || []).length;
    return /your limits/.test(last?.name) && last.x[0] === part.choice.time && lines >= 2;
  };
  for (let i = 0; i < 300 && !done(); i++) await wait(100);
  const drawn = front.data.at(-1);
  const focusable = [...part.querySelectorAll("input")].every((each) => each.tabIndex === 0);
  return { seen, focusable, drawn: [drawn.x[0], drawn.y[0]],
    named: drawn.name, lines: front.layout.shapes.length,
    spoken: document.getElementById("limit-budget").getAttribute("aria-valuetext") };
"""


def failed_again() -> Result:
    """A result whose knee failed when it was launched again."""
    result = large_result()
    failed = frozenset({result.point("knee").configuration})
    return replace(result, judge=replace(result.judged, failed=failed))


def in_kilowatt_hours() -> Result:
    """Six points of some hours and kilowatt-hours."""
    points = [
        point(Configuration.of(micro_batch=2**i), 7200 * 1.3**i, 4000 / 1.6**i, NVML)
        for i in range(6)
    ]
    return result_of("cluster's job", points, points[0], best=2, request=ResolvedRequest())


@pytest.mark.needs("chromium")
@pytest.mark.parametrize(
    "make",
    [
        small_result,
        pytest.param(large_result, marks=pytest.mark.slow),
        pytest.param(failed_again, marks=pytest.mark.long),
        pytest.param(in_kilowatt_hours, marks=pytest.mark.slow),
    ],
)
def test_in_every_cell_the_page_shows_the_choice_of_the_command(
    make: Callable[[], Result], tmp_path: Path
) -> None:
    result = make()
    units = View(result).units
    grid = choice_grid(result, units)
    pairs = list(itertools.product(grid.deadlines_s, grid.budgets_kJ))
    rows, columns = range(len(grid.deadlines_s)), range(len(grid.budgets_kJ))
    positions = list(itertools.product(rows, columns))
    positions.append((len(rows) // 2, len(columns) // 2))  # the last one is drawn in the figure
    script = MOVE.replace("POSITIONS", json.dumps(positions))
    said = answer_of_page(result, tmp_path, script, wait_ms=40000)
    assert len(said["seen"]) == len(positions) + 1
    own = result.limits
    assert said["seen"][0]["budget"] == (own.budget_kJ and pytest.approx(own.budget_kJ / units.kJ))
    met = set()
    for (deadline_s, budget_kJ), seen in zip(pairs, said["seen"][1:-1], strict=True):
        found = result.choose(deadline_s=deadline_s, budget_kJ=budget_kJ)
        assert seen["time"] * units.s == pytest.approx(found.point.time_to_solution_s)
        assert seen["energy"] * units.kJ == pytest.approx(found.point.energy_to_solution_kJ)
        assert seen["met"] == found.met
        assert seen["said"].startswith("Nothing measured trains") != found.met
        met.add(found.met)
    assert met == {True, False}
    last = said["seen"][-1]
    assert said["drawn"] == [pytest.approx(last["time"]), pytest.approx(last["energy"])]
    assert said["named"] in ("within your limits", "nearest to your limits")
    assert said["lines"] >= 2
    assert said["spoken"].endswith(units.energy)
    assert said["focusable"]
    option = {"s": "s", "min": "min", "h": "h"}[units.time]
    assert f" --deadline {last['deadline']:g}{option} --budget " in last["command"]


def test_the_cells_are_the_choices_under_limits_that_are_read_as_they_are_shown() -> None:
    result = replace(
        large_result(), request=ResolvedRequest(Constraints(deadline_s=1e-3, budget_kJ=1e12))
    )
    units = View(result).units
    grid = choice_grid(result, units)
    # The run's own limits are among the values, however far they are from the front.
    assert grid.deadlines_s[0] == 1e-3
    assert grid.budgets_kJ[-2:] == (1e12, None)
    for row, deadline_s in enumerate(grid.deadlines_s[::6]):
        for column, budget_kJ in enumerate(grid.budgets_kJ[::6]):
            number, met = grid.cells[6 * row][6 * column]
            found = result.choose(deadline_s=deadline_s, budget_kJ=budget_kJ)
            assert (grid.points[number], met) == (found.point, found.met)
    for value in grid.budgets_kJ[:-2]:
        assert float(f"{value / units.kJ:.3g}") == pytest.approx(value / units.kJ)
    assert grid.points[grid.cells[-1][-1][0]] == result.choose().point


def test_a_training_of_unknown_length_has_no_sliders() -> None:
    job = SimpleNamespace(steps=None)
    assert choice_grid(replace(large_result(), job=job), View(large_result()).units) is None


def test_a_front_of_one_point_has_no_sliders() -> None:
    only = point(Configuration.of(micro_batch=1), 10.0, 100.0, NVML)
    result = result_of("one", [only], only, best=0)
    assert limit_values(View(result)) == {"sliders": []}
