"""The benchmark of tuning while training: its worlds and its judgement."""

from __future__ import annotations

import pytest

from benchmarks.online import __main__ as online
from benchmarks.online.tables import problems
from benchmarks.online.training import STEPS, Fixed, Training


@pytest.mark.long
def test_the_laws_alone_give_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    online.main(["--seeds", "1", "--traces", "nowhere", "--events", "5"])
    figures = {
        words[1]: float(words[2])
        for words in (line.split() for line in capsys.readouterr().out.splitlines())
        if words[:1] == ["figure"]
    }
    assert figures["online_over_oracle_steady_tuned"] < 1.03
    assert figures["online_over_oracle_drift_tuned"] < 1.05
    assert figures["promises_broken_tuned"] == 0


def test_a_training_is_the_same_for_every_policy_and_differs_by_seed() -> None:
    problem = problems(None)[0]
    first, again = (Training(problem, "", 1).run(lambda: Fixed(0)) for _ in range(2))
    assert first == again
    assert first != Training(problem, "", 2).run(lambda: Fixed(0))
    assert sum(first.used) == STEPS


def test_a_hot_gpu_has_no_faster_setting_than_its_throttled_one() -> None:
    training = Training(problems(None)[0], "heat", 0)
    late = [training.at(setting, STEPS - 1)[0] for setting in range(3)]
    early = [training.at(setting, 0)[0] for setting in range(3)]
    assert late[0] == pytest.approx(1.06 * early[0])
    assert late[1] == early[1] if early[1] > late[0] else late[1] == late[0]


@pytest.mark.traces
def test_every_recorded_problem_begins_at_its_highest_setting() -> None:
    from tests.support.traces import TRACES

    for problem in problems(TRACES):
        assert problem.x[0] == 0
        assert all(value > 0 for value in problem.x[1:])
