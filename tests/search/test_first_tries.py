"""Configurations that the user wants to be tried first."""

from __future__ import annotations

from dataclasses import replace

import optuna
import pytest

import tuner
from tests.search.test_score import CANDIDATES, CONFIGURATIONS
from tests.support.studies import measured, record, run_replay, write_table
from tuner.answer.configuration_names import first_tries
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest
from tuner.workload.records.trace import read_trace


def test_a_name_and_a_configuration_are_tried_in_their_order() -> None:
    made = first_tries(CANDIDATES, ["800MHz mb4", CONFIGURATIONS[0]])
    assert made == (Configuration.of(micro_batch=4, clock_MHz=800), CONFIGURATIONS[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mb3 800MHz", r"cannot try 'mb3 800MHz': this search has no micro_batch=3; its values"),
        ("mb4", r"'mb4' leaves open clock_MHz"),
        ("mb4 fast", r"cannot try 'mb4 fast': 'fast' is not a knob"),
        ("mb4 zero9", r"cannot try"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        first_tries(CANDIDATES, [text])


def searched(tmp_path, name: str, **options) -> list[dict]:
    table = write_table(tmp_path / "table") if not (tmp_path / "table").exists() else None
    run_replay(
        table or tmp_path / "table",
        name=name,
        runs_dir=tmp_path / "runs",
        report=False,
        max_probes=4,
        verify=False,
        **options,
    )
    records = read_trace(tmp_path / "runs" / name / "trace" / "probes.jsonl").records
    return [dict(r.request.launch) for r in records if r.request.purpose == "search"]


def test_what_is_to_be_tried_is_probed_first(tmp_path) -> None:
    usual = searched(tmp_path, "usual")
    wanted = next(shape for shape in (1, 2, 3, 4, 6, 8) if {"shape": shape} != usual[0])
    tried = searched(tmp_path, "tried", try_first=[f"shape={wanted} speed=2"])
    assert tried[0] == {"shape": wanted}


@pytest.mark.extra("tuner.recordings")
def test_another_sampler_tries_nothing_first(tmp_path) -> None:
    table = write_table(tmp_path / "table")
    sampler = optuna.samplers.RandomSampler(seed=0)
    with pytest.raises(InputError, match="try_first is for joulefront's own search"):
        tuner.replay(
            table, sampler=sampler, try_first=["shape=1 speed=2"], runs_dir=tmp_path / "runs"
        )


@pytest.mark.parametrize("larger_ran_out", [True, False])
def test_a_try_that_comes_last_ends_no_launch(larger_ran_out: bool) -> None:
    """Only what is tried next does: a batch beyond one that ran out of memory is left for last."""
    every = Candidates.from_configurations(
        Configuration.of(micro_batch=mb, clock_MHz=clock)
        for mb in (1, 2, 4, 8)
        for clock in (600, 900, 1200)
    )

    def probe(name: str, micro_batch: int, clock_MHz: int) -> ProbeRecord:
        live = Settings(clock_MHz=clock_MHz)
        asked = ProbeRequest(name, Settings(micro_batch=micro_batch), (live,), extendable=True)
        window = measured(live, time_s=3 / micro_batch, power_W=clock_MHz / 5)
        return record(request=asked, measurements=(window,))

    whole = [probe(f"p{clock}", 1, clock) for clock in (600, 900, 1200)]
    lost = probe("p0003", 4, 900)
    lost = replace(lost, measurements=(), failure=Failure("out_of_memory", "too large"))
    state = PlanningState((*whole, lost) if larger_ran_out else tuple(whole))
    planner = CandidatePlanner(every, seed=0, first=[every.configurations[-1]])
    plan = planner.plan_continuation(state, probe("p0004", 2, 900))
    assert (plan is not None) == larger_ran_out
