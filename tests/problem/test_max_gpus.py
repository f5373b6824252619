"""A bound on the number of GPUs: what needs more is no candidate, and the same run can go on with
another bound."""

from __future__ import annotations

import pickle

import pytest

import tuner
from tests.support.studies import LONG_JOB, METER, measured, problem_of_job, run_optimize
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.run_folder import RunFolder
from tuner.search.sampler import ParameterEncoding
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import ProbeRecord, ProbeRequest, Runner
from tuner.workload.records.trace import read_trace

TWO = Configuration.of(data_parallel=2, micro_batch=1)


def ranks(candidates: Candidates) -> set[int]:
    return {configuration.world_size for configuration in candidates}


def test_what_needs_more_is_left_out_and_said() -> None:
    every = problem_of_job("tiny-gpt", "cpu-2")
    few = problem_of_job("tiny-gpt", "cpu-2", max_gpus=1)
    assert ranks(every.candidates) == {1, 2}
    assert ranks(few.candidates) == {1}
    (said,) = [note for note in few.notes if "max_gpus=1" in note]
    left = len(every.candidates) - len(few.candidates)
    assert said.startswith(f"{left} of {len(every.candidates)} configurations are left out")
    assert "today's needs 2" in said
    assert few.baseline == every.baseline
    assert few.baseline is not None
    assert few.baseline not in few.candidates
    assert not any("max_gpus" in note for note in problem_of_job("tiny-gpt", max_gpus=64).notes)


def test_it_is_the_same_question_with_the_same_parameters() -> None:
    every = problem_of_job("tiny-gpt", "cpu-2")
    few = problem_of_job("tiny-gpt", "cpu-2", max_gpus=1)
    assert few.identity["space"] == every.identity["space"]
    assert set(few.candidates.whole) == set(every.candidates.whole)
    encoding = ParameterEncoding(few.candidates)
    assert encoding.distributions == ParameterEncoding(every.candidates).distributions
    assert encoding.configurations == few.candidates.configurations
    assert encoding.index_of_params(encoding.params_of(TWO)) is None
    again = pickle.loads(pickle.dumps(few.candidates))
    assert again == few.candidates
    assert again.whole == every.candidates


def test_a_bound_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"max_gpus=1; the least that it has takes 2"):
        problem_of_job("qwen2.5-7b", "h100-32", "parallelism", predicted=True, max_gpus=1)


class Halving(Runner):
    """Two ranks take half the time of one, so without a bound two would be chosen."""

    meter = METER

    def run(self, request: ProbeRequest) -> ProbeRecord:
        size = int(str(request.launch.get("micro_batch", 1)))
        seconds = (1.0 - 0.05 * size) / Configuration(request.launch).world_size
        windows = tuple(measured(live, time_s=seconds) for live in request.live)
        return ProbeRecord(request, windows, METER, launch_s=3.0, wall_s=8.0, energy_J=20.0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("storage", [None, pytest.param("sqlite", marks=pytest.mark.long)])
def test_a_run_goes_on_under_another_bound(tmp_path, storage) -> None:
    """The parameters stay what they were, which a database insists on."""
    url = f"sqlite:///{tmp_path / 'study.db'}" if storage else None

    def study(max_gpus: int | None, max_probes: int):
        result = run_optimize(
            LONG_JOB,
            executor=SimulatedExecutor(Halving()),
            cluster="cpu-2",
            baseline=TWO,
            max_gpus=max_gpus,
            max_probes=max_probes,
            verify=False,
            storage=url,
            name="study",
            runs_dir=tmp_path / "runs",
            report=False,
        )
        return result, read_trace(tmp_path / "runs" / "study" / "trace" / "probes.jsonl").records

    def searched(records) -> set[int]:
        of = [r for r in records if r.request.purpose == "search"]
        return {Configuration(record.request.launch).world_size for record in of}

    first, before = study(1, 4)
    assert searched(before) == {1}
    assert before[0].request.purpose == "baseline"  # for comparison
    assert first.baseline.configuration.world_size == 2
    assert first.best.configuration.world_size == 1
    assert first.choice.met
    folder = RunFolder.named(tmp_path / "runs", "study")
    assert tuner.load_result(folder.path).best == first.best
    assert {p.configuration.world_size for p in first.predicted} <= {1}

    free, after = study(None, 9)
    assert 2 in searched(after[len(before) :])
    assert free.best.configuration.world_size == 2

    again, last = study(1, 10)
    assert searched(last[len(after) :]) == {1}
    assert again.best.configuration.world_size == 1
