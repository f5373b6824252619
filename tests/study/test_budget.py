"""The limits of a search, one by one, and the sentences of the reasons why it ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.studies import record, request
from tuner.problem.settings import SearchSettings, StopReason, stop_sentence
from tuner.study.loop import Budget, CostEstimate, SearchStatus
from tuner.workload.records.probe import Failure

#: What a limit tells of the next probe.
NEXT = {"next_kJ": 2.0, "expected_gain": 0.004}


def status(count: int, *, energy_J: float = 1000.0, wall_s: float = 10.0, **more) -> SearchStatus:
    records = [record(f"p{n:04d}", energy_J=energy_J, wall_s=wall_s) for n in range(count)]
    values = {
        "records": records,
        "in_flight": 0,
        "in_flight_kJ": 0.0,
        "elapsed_s": count * wall_s,
        "enough_launches": True,
        "marks": {"estimated": False},
    }
    return SearchStatus(**{**values, **more})


def test_without_limits_nothing_is_forbidden():
    assert Budget(SearchSettings()).check(status(1000), 1e6, reserve=True) is None


def test_builds_are_summed_by_host_and_the_longest_counts():
    """Hosts build at the same time: their sum would leave out more than the search has waited."""
    estimate = CostEstimate(None)  # type: ignore[arg-type]
    assert estimate.built_s == 0.0
    for host, built_s in (("a", 300.0), ("b", 200.0), ("a", 0.0), ("b", 50.0), ("c", None)):
        environment = {} if built_s is None else {"built_s": built_s}
        estimate.learn(replace(record("p"), host=host, environment=environment), 1.0)
    assert estimate.built_s == 300.0
    assert record("p").built_s == 0.0
    assert replace(record("p"), environment={"built_s": "long"}).built_s == 0.0


def test_the_number_of_probes_counts_those_in_flight_and_not_the_cancelled_ones():
    budget = Budget(SearchSettings(max_probes=3))
    assert budget.check(status(2), 0.0) is None
    reason = budget.check(status(2, in_flight=1), 0.0)
    assert reason == StopReason("max_probes", {"max_probes": 3, "reserved": 0})
    cancelled = [*status(2).records, record("p0002", failure=Failure("cancelled", "stopped"))]
    assert budget.check(replace(status(2), records=cancelled), 0.0) is None


def test_reserved_probes_are_left_and_said():
    settings = SearchSettings(max_probes=20)
    kept = settings.reserved_probes
    assert kept == 5
    budget = Budget(settings)
    assert budget.check(status(20 - kept), 0.0) is None
    assert budget.check(status(20 - kept - 1), 0.0, reserve=True) is None
    reason = budget.check(status(20 - kept), 0.0, reserve=True)
    assert reason == StopReason("max_probes", {"max_probes": 20, "reserved": kept})
    assert "the last 5 of its 20 probes are kept to verify the choice" in stop_sentence(reason)
    again = record("p0099", request=replace(request("p0099"), purpose="verify"))
    due = replace(status(0), records=[*status(20 - kept - 1).records, again])
    assert budget.check(due, 0.0, reserve=True) is None  # one of the reserved is made


@pytest.mark.parametrize(("probes", "kept"), [(4, 0), (5, 2), (8, 2), (12, 3), (24, 6)])
def test_two_probes_at_least_are_kept_to_become_sure(probes: int, kept: int):
    assert SearchSettings(max_probes=probes).reserved_probes == kept
    assert SearchSettings(max_probes=probes, verify=False).reserved_probes == 0


def test_the_share_of_the_training_ends_a_search_that_has_tried_enough_and_no_verification():
    budget = Budget(SearchSettings(search_share=0.01))
    about = {"job_kJ": 1000.0}
    assert budget.check(status(8, **about), 2.0, searching=True) is None
    reason = budget.check(status(8, **about), 2.1, searching=True)
    assert reason is not None
    assert reason.kind == "search_share"
    assert "more than 1.0 % of what the training takes (1,000 kJ)" in stop_sentence(reason)
    assert budget.check(status(8, **about), 2.1) is None  # a verification
    few = status(8, **about, enough_launches=False)
    assert budget.check(few, 2.1, searching=True) is None
    assert budget.check(status(8), 2.1, searching=True) is None  # no baseline yet


def test_energy_is_what_was_spent_what_is_in_flight_and_what_the_next_probe_needs():
    budget = Budget(SearchSettings(probe_budget_kJ=10.0))
    assert budget.check(status(5), 5.0) is None
    reason = budget.check(status(5, in_flight_kJ=1.0, marks={"estimated": True}), 4.5)
    assert reason is not None
    assert reason.kind == "probe_budget"
    assert reason.figures == {
        "needed_kJ": 4.5,
        "left_kJ": 4.0,
        "probe_budget_kJ": 10.0,
        "reserved_kJ": 0.0,
        "estimated": 1,
    }
    assert "4.00 kJ of the probe budget of 10.0 kJ are left (estimated)" in stop_sentence(reason)
    of_twin = budget.check(
        status(5, in_flight_kJ=1.0, marks={"estimated": False, "twin": True}), 4.5
    )
    assert of_twin is not None
    assert "are left (twin)" in stop_sentence(of_twin)
    assert budget.check(status(5), 2.6, reserve=True) is not None  # 2.5 kJ are reserved
    assert budget.check(status(10), 0.0) is not None


def test_time_includes_the_expected_length_of_the_next_probes():
    budget = Budget(SearchSettings(search_s=60.0))
    assert budget.check(status(5), 0.0) is None
    assert budget.check(status(5), 0.0, count=2) == StopReason("time", {"search_s": 60.0})
    assert budget.check(status(5), 0.0, reserve=True) == StopReason("time", {"search_s": 60.0})
    assert budget.check(status(5), 0.0, count=2, expected_s=9.0) is None


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (StopReason("exhausted"), "The search ended: no candidate is left to try."),
        (StopReason("time", {"search_s": 80.0}), "The search ended: its 80 s are over."),
        (StopReason("interrupted"), "It was interrupted."),
        (StopReason("running"), "The search has not ended."),
        (
            StopReason("not_worth_it", {"needed_kJ": 2.0, "saved_kJ": 1.0}),
            "The search ended: trying another configuration takes 2.00 kJ and would save "
            "1.00 kJ of the training.",
        ),
        (
            StopReason("not_worth_it", {"needed_kJ": 2.0, "left_kJ": 0.0}),
            "The search ended: trying another configuration takes 2.00 kJ and would save nothing.",
        ),
        (
            StopReason("not_worth_it", {"needed_kJ": 2.0, "left_kJ": 1.0}),
            "The search ended: trying another configuration takes 2.00 kJ, and all that is "
            "left to find would save 1.00 kJ of the training.",
        ),
        (
            StopReason(
                "not_worth_it",
                {"regret": 0.01, "probability": 0.07, "needed_kJ": 3.2},
            ),
            "The search ended: no point of the front is more than 1 % better than what was found "
            "(93 % sure); trying another configuration takes 3.20 kJ.",
        ),
        (
            StopReason(
                "not_worth_it",
                {"regret": 0.0, "probability": 0.0, "needed_kJ": 3.2, "of_answer": 1.0},
            ),
            "The search ended: no other configuration is better than the best one found (more "
            "than 99.9 % sure); trying another configuration takes 3.20 kJ.",
        ),
        (
            StopReason("node_failures", {"failures": 3}, "no GPU"),
            "The search ended: 3 probes in a row failed because of the node: no GPU.",
        ),
        (
            StopReason("max_probes", {"max_probes": 8, "reserved": 1}),
            "The search ended: the last of its 8 probes is kept to verify the choice.",
        ),
        (
            StopReason("time", {"search_s": 80.0, **NEXT, "of_answer": 0.0}),
            "The search ended: its 80 s are over.",
        ),
        (
            StopReason("max_probes", {"max_probes": 8, "reserved": 0, **NEXT, "of_answer": 1.0}),
            "The search ended: all 8 probes that it may make are made.",
        ),
        (
            StopReason(
                "max_probes",
                {"max_probes": 8, "reserved": 0, **NEXT, "expected_gain": 0.03, "of_answer": 1.0},
            ),
            "The search ended: all 8 probes that it may make are made; another one takes 2.00 kJ "
            "and is expected to improve the choice by 3.0 %.",
        ),
        (
            StopReason(
                "probe_budget",
                {
                    "needed_kJ": 2.0,
                    "left_kJ": 1.0,
                    "probe_budget_kJ": 9.0,
                    "estimated": 0,
                    **NEXT,
                },
            ),
            "The search ended: another probe takes about 2.00 kJ, and 1.00 kJ of the probe budget "
            "of 9.00 kJ are left.",
        ),
    ],
)
def test_a_reason_has_a_sentence(reason: StopReason, sentence: str):
    assert stop_sentence(reason) == sentence
