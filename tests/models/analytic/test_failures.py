"""What failures add, against trainings that are played with failures at random times."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tuner.models.prior import Prediction
from tuner.planner.evaluate import DAY_S, best_interval_s, interruptions, require_end, with_failures
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.errors import InputError

HOUR_S = 3600.0


def cluster(nodes: int = 1000, **facts: float) -> Cluster:
    return replace(load_cluster("h100-32"), nodes=nodes, **facts)


def played(mean_s: float, interval_s: float, checkpoint_s: float, restart_s: float) -> np.ndarray:
    """Return wall time and idle time of a played training, over its work; failures strike always.

    What a failure interrupts is idle time if it was a checkpoint or a restart.
    """
    draw = random.Random(7)
    work_s = 4000 * mean_s
    wall_s = idle_s = done_s = 0.0
    next_s = draw.expovariate(1 / mean_s)
    while done_s < work_s:
        for part_s, computes in ((interval_s, True), (checkpoint_s, False)):
            end_s = wall_s + part_s
            if next_s < end_s:
                idle_s += 0.0 if computes else next_s - wall_s
                wall_s = next_s
                while True:  # restarts can fail, too
                    next_s = wall_s + draw.expovariate(1 / mean_s)
                    lasts_s = min(restart_s, next_s - wall_s)
                    idle_s, wall_s = idle_s + lasts_s, wall_s + lasts_s
                    if lasts_s == restart_s:
                        break
                break
            idle_s += 0.0 if computes else part_s
            wall_s = end_s
        else:
            done_s += interval_s
    return np.array([wall_s, idle_s]) / done_s


@pytest.mark.parametrize(
    ("mean_h", "interval_h", "checkpoint_s", "restart_s"),
    [(3.1, 0.5, 60, 600), (50, 2, 300, 1200), (1, 0.2, 20, 120)],
)
def test_time_and_idle_time_are_those_of_played_trainings(
    mean_h: float, interval_h: float, checkpoint_s: float, restart_s: float
) -> None:
    found = interruptions(
        cluster(
            failures_per_node_day=24 / mean_h / 1000,
            checkpoint_interval_s=interval_h * HOUR_S,
            checkpoint_s=checkpoint_s,
            restart_s=restart_s,
        ),
        1000,
    )
    interval_s = interval_h * HOUR_S
    time, idle = played(mean_h * HOUR_S, interval_s, checkpoint_s, restart_s)
    assert found.time_ratio == pytest.approx(time, rel=0.01)
    assert found.idle_ratio == pytest.approx(idle, abs=0.01)


@pytest.mark.parametrize(("mean_h", "checkpoint_s"), [(3.1, 60), (0.5, 300), (100, 5)])
def test_no_other_interval_is_better(mean_h: float, checkpoint_s: float) -> None:
    stated = cluster(
        failures_per_node_day=24 / mean_h / 1000, checkpoint_s=checkpoint_s, restart_s=300
    )
    best = interruptions(stated, 1000)
    for factor in (0.7, 0.9, 1.1, 1.4):
        other = replace(stated, checkpoint_interval_s=factor * best.interval_s)
        found = interruptions(other, 1000)
        assert found.time_ratio > best.time_ratio - 1e-4
    young_s = (2 * checkpoint_s * mean_h * HOUR_S) ** 0.5
    assert best.interval_s == pytest.approx(young_s, rel=0.3)


def test_an_idle_node_draws_less() -> None:
    stated = cluster(
        nodes=2, failures_per_node_day=1.0, checkpoint_s=600, checkpoint_interval_s=1800
    )
    alone = Prediction(np.array([1.0, 1.0]), np.array([16000.0, 8000.0]), np.array([1.0, 1.0]))
    ranks = stated.devices_per_node * np.array([2, 1])
    both = with_failures(alone, lambda: ranks, stated)
    assert (both.power_W < alone.power_W).all()
    one, two = interruptions(stated, 2), interruptions(stated, 1)
    assert both.step_time_s == pytest.approx([one.time_ratio, two.time_ratio])
    assert with_failures(alone, lambda: ranks, cluster()) is alone
    assert best_interval_s(100.0, 300.0) == 100.0


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"failures_per_node_day": 0.01}, "needs checkpoint_s, the seconds that a checkpoint"),
        ({"failures_per_node_day": -1.0, "checkpoint_s": 9.0}, "failures_per_node_day"),
    ],
)
def test_facts_that_cannot_be_are_one_sentence(facts: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        cluster(**facts)


@pytest.mark.parametrize("restart_s", [DAY_S, 1e9])
def test_a_training_that_never_ends_is_one_sentence(restart_s: float) -> None:
    stated = cluster(failures_per_node_day=0.01, checkpoint_s=60.0, restart_s=restart_s)
    with pytest.raises(InputError, match="10 failures a day on 1000 nodes"):
        require_end(stated)
