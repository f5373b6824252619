"""The rows and the scores of `benchmarks.planners`."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.validation.vtrain import (
    Launch,
    first_launch,
    problems,
    read_launches,
    score,
)

LAUNCHES = read_launches()


def test_every_row_is_a_launch_on_all_of_its_gpus() -> None:
    assert sum(each.single for each in LAUNCHES) == 1440
    assert len(LAUNCHES) == 1549
    assert len(problems(LAUNCHES)) == 148
    for each in LAUNCHES:
        tensor, data, pipeline, micro_batch = each.degrees
        assert tensor * data * pipeline == each.problem[0]
        assert each.problem[1] % (micro_batch * data) == 0


def test_a_perfect_planner_has_no_error_and_a_reversed_one_the_worst_choice() -> None:
    perfect = score(lambda group: np.array([each.measured_s for each in group]), LAUNCHES)
    assert (perfect.mean, perfect.choice_loss) == (0.0, 0.0)
    assert perfect.right == perfect.pairs
    backwards = score(lambda group: 1 / np.array([each.measured_s for each in group]), LAUNCHES)
    assert backwards.right == 0
    slowest = [
        max(each.measured_s for each in group) / min(each.measured_s for each in group) - 1
        for group in problems(LAUNCHES).values()
        if len(group) >= 8
    ]
    assert backwards.choice_loss == pytest.approx(100 * float(np.mean(slowest)))


def test_what_a_planner_saw_counts_as_no_prediction() -> None:
    """One that knows the launch it saw and nothing else is right about nothing."""

    def knows_one(group: list[Launch]) -> np.ndarray:
        seen = first_launch(group)
        return np.array([each.measured_s if each is seen else 1e3 for each in group])

    found = score(knows_one, LAUNCHES, leave_out=first_launch)  # type: ignore[arg-type]
    eight = [group for group in problems(LAUNCHES).values() if len(group) >= 8]
    assert len(found.errors) == sum(len(group) - 1 for group in eight)
    assert (found.errors > 1).all()
