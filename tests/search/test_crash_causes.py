"""Launches that come later because they share what may have caused crashes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.studies import METER, measured
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.evidence import ACCIDENT, CrashCauses
from tuner.search.planner import PlanningState
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest

EVERY = [Configuration.of(data_parallel=r, micro_batch=m) for r in (1, 2) for m in (1, 2, 4)]
ONE, TWO = 0, 3  # the first launch on one rank and on two
ERROR = Failure("crash", "RuntimeError: no", frames=("train.py:main",))


def records_of(*probes: tuple[int, Failure | None]) -> list[ProbeRecord]:
    """Return records of launches by number, each with how it failed, if it did."""
    return [
        ProbeRecord(
            ProbeRequest(f"p{number:04d}", EVERY[launch].launch),
            () if failure else (measured(),),
            METER,
            failure,
        )
        for number, (launch, failure) in enumerate(probes)
    ]


def chances(*probes: tuple[int, Failure | None]) -> list[float]:
    causes = CrashCauses([each.launch for each in EVERY])
    return [float(each) for each in causes.chances(records_of(*probes))]


def test_failures_that_no_value_causes_change_nothing() -> None:
    memory, node = Failure("out_of_memory", "no"), Failure("node", "gone")
    assert chances((ONE, None), (TWO, memory), (TWO + 1, node)) == [1.0] * 6


def test_the_one_value_that_never_trained_comes_last() -> None:
    assert chances((ONE, None), (TWO, ERROR)) == pytest.approx([1.0] * 3 + [ACCIDENT] * 3)


def test_of_two_suspects_a_launch_with_one_comes_before_a_launch_with_both() -> None:
    after = chances((ONE, None), (TWO + 1, ERROR))
    half = (1 + ACCIDENT) / 2
    assert after == pytest.approx([1, half, 1, half, ACCIDENT, half])


def test_a_second_crash_leaves_what_both_share() -> None:
    after = chances((ONE, None), (TWO + 1, ERROR), (TWO + 2, ERROR))
    assert after == pytest.approx([1.0] * 3 + [ACCIDENT**2] * 3)


@pytest.mark.parametrize(
    "other",
    [
        Failure("hang", "no step within 60 s"),
        Failure("crash", "ValueError: no", frames=("train.py:main",)),
        Failure("crash", "RuntimeError: no", frames=("torch/nn/modules/module.py:call",)),
    ],
)
def test_crashes_of_other_places_are_other_causes(other: Failure) -> None:
    after = chances((ONE, None), (TWO + 1, ERROR), (TWO + 2, other))
    assert after[1] == after[2] == pytest.approx((1 + ACCIDENT) / 2)


def test_messages_that_differ_by_a_number_are_one_cause() -> None:
    again = Failure("crash", "RuntimeError: rank 1 at 0x7f", frames=("train.py:main",))
    after = chances((ONE, None), (TWO + 1, ERROR), (TWO + 2, again))
    assert after[1] == 1.0


def test_an_accident_is_cleared_by_a_launch_that_trains() -> None:
    assert chances((ONE, None), (TWO, ERROR), (TWO + 1, None))[TWO + 2] == 1.0


def test_two_values_that_each_trained_are_suspect_together() -> None:
    after = chances((ONE, None), (TWO, None), (ONE + 1, None), (TWO + 1, ERROR))
    assert after == pytest.approx([1, 1, 1, 1, ACCIDENT, 1])


def test_a_crash_of_todays_configuration_closes_nothing() -> None:
    assert min(chances((ONE, ERROR))) > 0


def test_the_sentence_names_the_value_and_the_probe() -> None:
    causes = CrashCauses([each.launch for each in EVERY])
    assert causes.sentences(records_of((ONE, None), (TWO, ERROR))) == (
        "launches without data_parallel 2 come first from now on: p0001 crashed with it, and no "
        "launch with it has trained",
    )


def planned(probes: Sequence[tuple[int, Failure | None]]) -> Configuration:
    every = Candidates.from_configurations(EVERY)
    planner = CandidatePlanner(every, seed=0)
    plan = planner.plan(PlanningState(tuple(records_of(*probes))))
    assert plan is not None
    return plan.configurations[0]


MEMORY = Failure("out_of_memory", "no memory")


def test_larger_micro_batches_than_one_that_ran_out_of_memory_come_last() -> None:
    probes = [(ONE, None), (ONE + 1, MEMORY)]
    assert planned(probes) != EVERY[ONE + 2]
    every_smaller = [*probes, (TWO, None), (TWO + 1, None), (TWO + 2, None)]
    assert planned(every_smaller) == EVERY[ONE + 2]  # an allocator may take less for it
    assert planned([(ONE, MEMORY), (ONE + 1, None)]).micro_batch <= 4


def test_of_those_to_try_first_the_larger_ones_wait_once_memory_ran_out() -> None:
    candidates = Candidates.from_configurations(EVERY)
    planner = CandidatePlanner(candidates, seed=0, first=[EVERY[1], EVERY[2]])

    def sizes(*probes: tuple[int, Failure | None]) -> int:
        plan = planner.plan(PlanningState(tuple(records_of(*probes))))
        assert plan is not None
        return plan.configurations[0].micro_batch

    assert sizes((ONE, None)) == 2
    assert sizes((ONE, None), (ONE + 1, None)) == 4
    assert (
        planner.plan(
            PlanningState(tuple(records_of((ONE, None), (ONE + 1, MEMORY))))
        ).configurations[0]
        != EVERY[2]
    )  # type: ignore[union-attr]


def test_what_crashed_twice_comes_behind_everything_else_and_is_never_closed() -> None:
    probes = [(ONE, None), (TWO, ERROR), (TWO + 1, ERROR)]
    assert planned(probes).data_parallel == 1
    probes += [(ONE + 1, None), (ONE + 2, None)]
    assert planned(probes) == EVERY[TWO + 2]
