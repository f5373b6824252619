"""FSDP at short and long sequences: measured rows, and launches that gather less or nothing."""

from dataclasses import replace

import pytest

from benchmarks.validation import sfttrainer
from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job

NODE = load_cluster("a100-8")
JOB = replace(load_job("qwen2.5-7b"), sequence_length=512)


def test_the_shipped_constant_is_that_of_the_rows_that_it_was_fitted_to() -> None:
    rows = [run for run in sfttrainer.read_runs() if run.row["model"] == sfttrainer.FITTED]
    shipped = constants_of(NODE.device).unit_s
    assert sfttrainer.fitted_unit_s(rows) == pytest.approx(shipped, rel=0.01)


def seconds(unit_s: float, **knobs: str | int) -> float:
    constants = replace(constants_of(NODE.device), unit_s=unit_s)
    configuration = Configuration.of(micro_batch=1, **knobs)
    found = AnalyticModel(JOB, NODE, constants=constants).breakdown(configuration)
    return found.step_time_s


@pytest.mark.parametrize(
    ("knobs", "rounds"),
    [
        ({"data_parallel": 8, "zero_stage": 3}, 3),
        ({"data_parallel": 8, "sharding": "fsdp2"}, 3),
        ({"data_parallel": 8, "sharding": "fsdp2_no_reshard"}, 2),
        ({"data_parallel": 8, "zero_stage": 2}, 0),
        ({"data_parallel": 1, "zero_stage": 3}, 0),
        ({"data_parallel": 8, "sharding": "fsdp2", "hsdp_replicas": 8}, 0),
    ],
)
def test_the_host_works_for_each_block_that_is_gathered(
    knobs: dict[str, str | int], rounds: int
) -> None:
    """One device gathers nothing, and ZeRO-2 no block."""
    more = seconds(1.0, **knobs) - seconds(0.0, **knobs)
    micro_batches = JOB.global_batch / int(knobs["data_parallel"])
    blocks = 28 * micro_batches
    assert more == pytest.approx(rounds * blocks, rel=0.05)


def test_nothing_is_gathered_behind_a_host_that_still_dispatches() -> None:
    """At 512 tokens dispatch takes longer than the device's work, so that gathering is exposed."""
    configuration = Configuration.of(data_parallel=8, micro_batch=1, zero_stage=3)
    fast = replace(constants_of(NODE.device), operator_s=0.0, unit_s=0.0)
    slow = replace(fast, operator_s=2e-4)

    def exposed_s(constants: object) -> float:
        model = AnalyticModel(JOB, NODE, constants=constants)  # type: ignore[arg-type]
        return float(model.breakdown(configuration).time_s["gradients and ZeRO"])

    assert exposed_s(slow) > 1.5 * exposed_s(fast)
