"""The limits of a search, one by one, and the sentences of the reasons why it ended."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.studies import record, request
from tuner.problem.problem import ProbeCost
from tuner.problem.settings import SearchSettings, StopReason, stop_sentence
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.study.budget import Budget, CostEstimate, SearchStatus
from tuner.study.loop import _time_limits
from tuner.workload.records.probe import Failure, ProbeRecord, WindowPolicy

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


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, math.inf),
        ({"max_probes": 8}, 3),  # of 8 two are kept to verify
        ({"max_probes": 8, "verify": False}, 5),
        ({"max_probes": 3}, 0),
        ({"probe_budget_kJ": 8.0}, 3),  # a quarter is kept
        ({"search_s": 80.0}, 3),
        ({"max_probes": 100, "search_s": 80.0}, 3),
        ({"search_share": 0.01}, 5),  # eight launches are measured, whatever they use
        ({"search_share": 0.1}, 7),
    ],
)
def test_the_probes_left_are_those_of_the_least_limit(limits: dict, left: float) -> None:
    budget = Budget(SearchSettings(**limits))
    now = replace(status(3, job_kJ=100.0), enough_launches=False)
    launches = [Settings(micro_batch=n + 1) for n in range(3)]
    records = [
        replace(one, request=replace(one.request, launch=launch))
        for one, launch in zip(now.records, launches, strict=True)
    ]
    assert budget.probes_left(replace(now, records=records), True) == left
    flying = replace(now, records=records, in_flight=1, in_flight_kJ=1.0, elapsed_s=40.0)
    assert budget.probes_left(flying, True) == max(left - 1, 0) or "search_share" in limits


def test_builds_are_summed_by_host_and_the_longest_counts():
    """Hosts build at the same time: their sum would leave out more than the search has waited."""
    estimate = CostEstimate(None, ())  # type: ignore[arg-type]
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


def test_while_nothing_was_measured_a_probe_may_start_until_the_time_is_over():
    budget = Budget(SearchSettings(search_s=100.0))
    assert budget.check(status(0, elapsed_s=99.5), 0.0) is None
    assert budget.check(status(0, elapsed_s=100.5), 0.0) == StopReason("time", {"search_s": 100.0})


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
    verified = [
        replace(again, request=replace(again.request, probe_id=f"p1{n}")) for n in range(kept)
    ]
    done = replace(status(0), records=[*status(20 - kept - 1).records, *verified])
    assert budget.check(done, 0.0, reserve=True) is None  # all of them: the last is the search's


@pytest.mark.parametrize(("probes", "kept"), [(4, 0), (5, 2), (8, 2), (12, 3), (24, 6)])
def test_two_probes_at_least_are_kept_to_become_sure(probes: int, kept: int):
    assert SearchSettings(max_probes=probes).reserved_probes == kept
    assert SearchSettings(max_probes=probes, verify=False).reserved_probes == 0


def test_the_share_of_the_training_ends_a_search_that_has_tried_enough_and_no_verification():
    budget = Budget(SearchSettings(search_share=0.01))
    about = {"job_kJ": 1000.0}
    assert budget.check(status(8, **about), 2.0, searching=True) is None
    reason = budget.check(status(8, **about), 2.1, searching=True)
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


class TestCostEstimate:
    """Of windows of 100 J and 5 s each, in launches that take 60 J and 4 s beside them."""

    TODAY, OTHER = (
        Configuration(request("p").launch),
        Configuration(Settings(data_parallel=1, micro_batch=4)),
    )

    @staticmethod
    def of(*records: ProbeRecord) -> CostEstimate:
        problem = SimpleNamespace(prior=None, cost=ProbeCost())
        return CostEstimate(problem, records)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("probes", "configurations", "planned_kJ", "expected_kJ", "expected_s"),
        [
            (0, (TODAY,), math.nan, 0.0, 0.0),
            (0, (OTHER,), 0.3, 0.3, 0.0),  # as planned
            (1, (TODAY,), math.nan, 0.16, 9.0),  # what this launch took, whatever is planned
            (1, (TODAY,), 0.3, 0.16, 9.0),
            (1, (TODAY, TODAY, TODAY), 0.3, 0.36, 19.0),
            (1, (OTHER, TODAY), math.nan, 0.26, 14.0),  # by the first: others are none of it
            (3, (OTHER,), math.nan, 0.16, 9.0),
        ],
    )
    def test_it_is_by_the_launch_then_by_the_plan_then_by_any(
        self,
        probes: int,
        configurations: tuple[Configuration, ...],
        planned_kJ: float,
        expected_kJ: float,
        expected_s: float,
    ) -> None:
        estimate = self.of(*(record(f"p{n}") for n in range(probes)))
        found = estimate.expected_kJ(configurations, planned_kJ)
        assert found == pytest.approx(expected_kJ)
        assert estimate.expected_s(configurations) == pytest.approx(expected_s)

    def test_it_takes_the_first_configurations_launch(self) -> None:
        dear = replace(request("d"), launch=self.OTHER.launch)
        estimate = self.of(record("a"), record("b", request=dear, energy_J=1100.0, wall_s=25.0))
        both = (self.OTHER, self.TODAY)
        assert estimate.expected_kJ(both) == pytest.approx(1.2)
        assert estimate.expected_s(both) == pytest.approx(30.0)

    def test_plans_are_corrected_by_the_median_of_what_they_were_off(self) -> None:
        estimate = self.of()
        assert estimate.used_over_planned == 1.0
        for planned_kJ in (0.08, 0.04, 0.16, 0.0, math.nan):  # the last two were not planned
            estimate.learn(record("p"), planned_kJ)
        estimate.learn(record("q", failure=Failure("crash", "it died"), measurements=()), 1.0)
        assert estimate.used_over_planned == 2.0
        assert estimate.expected_kJ((self.OTHER,), 0.3) == pytest.approx(0.6)
        assert estimate.further_kJ(0.3) == pytest.approx(0.6)

    def test_a_launch_without_its_windows(self) -> None:
        assert self.of().launch_kJ == 0.0
        more = [record("a"), record("b", energy_J=180.0), record("c", energy_J=900.0)]
        assert self.of(*more).launch_kJ == pytest.approx(0.08)
        assert self.of(record("a", energy_J=20.0)).launch_kJ == 0.0  # never less than nothing

    def test_before_any_probe_it_is_the_models(self) -> None:
        cost = ProbeCost(launch_s=10.0, launch_power=0.5, settle_s=1.0, window_s=4.0)
        predicted = SimpleNamespace(power_W=np.array([100.0, 200.0]), step_time_s=np.full(2, 0.5))
        prior = SimpleNamespace(predict=lambda configurations: predicted)
        problem = SimpleNamespace(prior=prior, cost=cost)
        estimate = CostEstimate(problem, ())  # type: ignore[arg-type]
        visits_J = float(np.sum(cost.visit_J(predicted.power_W, predicted.step_time_s)))
        assert visits_J > 1000
        both = (self.TODAY, self.OTHER)
        found_kJ = estimate.expected_kJ(both)
        assert found_kJ == pytest.approx((10.0 * 0.5 * 100.0 + visits_J) / 1000)


class TestTimeLimit:
    """Of a further probe, by the longest of two or more."""

    @pytest.mark.parametrize(
        ("walls_s", "visits", "extendable", "limit_s"),
        [
            ((), 1, False, 3600.0),
            ((20.0,), 1, False, 3600.0),  # one tells too little
            ((20.0, 30.0), 1, False, 150.0),
            ((2.0, 3.0), 1, False, 60.0),
            ((20.0, 30.0), 3, True, 150.0 + 3 * (2.0 + 15.0)),
            ((20.0, 30.0), 3, False, 150.0),
            ((2000.0, 30.0), 1, False, 3600.0),  # never above that of the settings
        ],
    )
    def test_it_is_five_times_the_longest(
        self, walls_s: tuple[float, ...], visits: int, extendable: bool, limit_s: float
    ) -> None:
        window = WindowPolicy(settle_s=2.0, max_s=15.0)
        settings = SearchSettings(time_limit_s=3600.0, window=window)
        problem = SimpleNamespace(job=None, prior=None)
        spec = SimpleNamespace(settings=settings, problem=problem)
        failed = record("x", wall_s=900.0, failure=Failure("crash", "it died"), measurements=())
        made = [failed, *(record(f"p{n}", wall_s=wall_s) for n, wall_s in enumerate(walls_s))]
        state = SimpleNamespace(spec=spec, records=made)
        today = Configuration(request("p").launch)
        found = _time_limits(state, [today], visits, extendable)  # type: ignore[arg-type]
        assert found.probe_s == pytest.approx(limit_s)


def test_what_is_reserved_is_said_up_to_what_is_left_and_never_below_nothing() -> None:
    budget = Budget(SearchSettings(probe_budget_kJ=10.0))
    for spent, left_kJ, reserved_kJ in ((5, 5.0, 2.5), (8, 2.0, 2.0), (10, 0.0, 0.0), (12, -2, 0)):
        reason = budget.check(status(spent), 100.0, reserve=True)
        assert reason.figures["left_kJ"] == pytest.approx(left_kJ)
        assert reason.figures["reserved_kJ"] == pytest.approx(reserved_kJ)


def test_energy_that_is_kept_is_what_verification_has_not_used() -> None:
    budget = Budget(SearchSettings(probe_budget_kJ=10.0))
    again = record("v", request=replace(request("v"), purpose="verify"), energy_J=3000.0)
    used = replace(status(0), records=[*status(5).records, again])
    assert budget.check(used, 2.0, reserve=True) is None  # 2.5 of the 10 kJ were kept


def test_time_that_is_kept_is_what_verification_has_not_used() -> None:
    budget = Budget(SearchSettings(search_s=100.0))
    again = record("v", request=replace(request("v"), purpose="verify"), wall_s=40.0)
    used = replace(status(0), records=[*status(1).records, again], elapsed_s=60.0)
    assert budget.check(used, 0.0, reserve=True, expected_s=40.0) is None  # nothing is kept
    assert budget.check(used, 0.0, reserve=True, expected_s=40.1) is not None
    fresh = replace(status(1), elapsed_s=60.0)
    assert budget.check(fresh, 0.0, reserve=True, expected_s=15.0) is None  # 25 s are kept
    assert budget.check(fresh, 0.0, reserve=True, expected_s=15.1) is not None


def test_spare_probes_are_those_that_two_would_have_left() -> None:
    budget = Budget(SearchSettings(max_probes=20))
    reason = budget.check(status(19), 0.0, count=2)
    assert reason == StopReason("max_probes", {"max_probes": 20, "reserved": 0})
    reason = budget.check(status(18), 0.0, count=2, reserve=True)
    assert reason == StopReason("max_probes", {"max_probes": 20, "reserved": 2})
