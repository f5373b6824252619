"""Idle time and activations in flight of pipeline schedules, against the schedules of torch."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.models.analytic.constants import Launches, cut, read_layout
from tuner.models.analytic.memory import _in_flight
from tuner.models.analytic.model import AnalyticModel
from tuner.models.analytic.step import _bubble
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job

CLUSTER, JOB = load_cluster("h100-32"), load_job("qwen2.5-7b")


def launches(schedule: str, degree: int, virtual: int, count: int) -> Launches:
    asked = Configuration.of(
        pipeline_parallel=degree, pipeline_schedule=schedule, virtual_stages=virtual
    )
    return read_layout([asked], count).launches[:, None]


class FakeStage:
    """What a schedule reads of a stage before it runs."""

    def __init__(self, index: int, degree: int, parts: int) -> None:
        self.stage_index, self.group_size, self.num_stages = index, degree, parts
        self.group_rank, self.is_last, self.submod = index % degree, index == parts - 1, None


def played(schedule: str, degree: int, virtual: int, count: int) -> tuple[float, list[float]]:
    """Return a step's length and each rank's most activations, in passes and stages of one rank.

    Every pass takes the same time: forward, gradients of inputs, gradients of weights.
    """
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    kinds = {
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    parts = degree * virtual
    stages = [FakeStage(part, degree, parts) for part in range(0, parts, degree)]
    found = kinds[schedule](stages, count, loss_fn=lambda *_: None).pipeline_order
    orders = {rank: [action for action in row if action is not None] for rank, row in found.items()}
    lengths = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    ends: dict[tuple[int, str, int], float] = {}
    clock, held, most = [0.0] * degree, [0] * degree, [0] * degree
    while any(orders.values()):
        before = len(ends)
        for rank, actions in orders.items():
            if not actions:
                continue
            kind, micro = actions[0].computation_type.value, actions[0].microbatch_index
            stage = actions[0].stage_index
            needs = [(stage, "F", micro)] if kind != "F" else []
            if kind == "F" and stage:
                needs.append((stage - 1, "F", micro))
            if kind in ("B", "I") and stage < parts - 1:
                needs.append((stage + 1, "done", micro))
            if kind == "W":
                needs.append((stage, "done", micro))
            if any(need not in ends for need in needs):
                continue
            begins = max([clock[rank], *(ends[need] for need in needs)])
            clock[rank] = ends[stage, kind, micro] = begins + lengths[kind] / virtual
            if kind in ("B", "I"):
                ends[stage, "done", micro] = clock[rank]
            held[rank] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
            most[rank] = max(most[rank], held[rank])
            actions.pop(0)
        assert len(ends) > before, "the schedule waits for itself"
    return max(clock), [number / virtual for number in most]


@pytest.mark.parametrize(
    ("schedule", "degree", "virtual", "count"),
    [
        ("interleaved", 2, 2, 8),
        ("interleaved", 4, 2, 8),
        ("interleaved", 4, 4, 16),
        ("zero_bubble", 4, 1, 8),
        ("zero_bubble", 2, 1, 8),
    ],
)
def test_idle_time_and_activations_are_those_of_torchs_schedule(
    schedule: str, degree: int, virtual: int, count: int
) -> None:
    length, most = played(schedule, degree, virtual, count)
    here = launches(schedule, degree, virtual, count)
    predicted = 3 * count + float(_bubble(here)[0, 0]) * 3 * (degree - 1)
    assert length == pytest.approx(predicted)
    stages = cut(JOB.model["num_hidden_layers"], degree).each()
    assert _in_flight(here, stages)[0] == pytest.approx(most)


def test_recomputation_is_a_pass_that_zero_bubble_cannot_move() -> None:
    asked = Configuration.of(
        pipeline_parallel=4, pipeline_schedule="zero_bubble", activation_checkpointing="full"
    )
    here = read_layout([asked], 8).launches[:, None]
    assert float(_bubble(here)[0, 0]) == pytest.approx(2 / 4)


def test_a_schedule_changes_idle_time_transfers_and_activations_alone() -> None:
    model = AnalyticModel(JOB, CLUSTER)
    plain = {"data_parallel": 2, "pipeline_parallel": 4}
    one, two, zero = (
        model.breakdown(Configuration.of({**plain, **more}))
        for more in (
            {},
            {"pipeline_schedule": "interleaved", "virtual_stages": 2},
            {"pipeline_schedule": "zero_bubble"},
        )
    )
    assert two.time_s["stage transfer"] == pytest.approx(2 * one.time_s["stage transfer"])
    assert two.time_s["arithmetic"] == pytest.approx(one.time_s["arithmetic"])
    assert zero.time_s["pipeline bubble"] < two.time_s["pipeline bubble"]
    assert two.time_s["pipeline bubble"] < one.time_s["pipeline bubble"]
    memory = model.memory_bytes(
        [
            Configuration.of({**plain, "pipeline_schedule": "1f1b"}),
            Configuration.of({**plain, "pipeline_schedule": "interleaved", "virtual_stages": 2}),
            Configuration.of({**plain, "pipeline_schedule": "zero_bubble"}),
        ]
    )
    assert memory[0] < memory[2]
    assert memory[0] < memory[1]
    assert np.isfinite(memory).all()
