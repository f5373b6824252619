"""Socket of priors: the analytic models, none, and one of another distribution."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.entry_points import install_plugin
from tuner.models.job_prior import AnalyticPrior
from tuner.models.prior import (
    SOCKET,
    CorrectablePrior,
    MemoryPrior,
    Prior,
    peak_memory_bytes,
    prior_of,
)
from tuner.problem.from_job import problem_of_job
from tuner.problem.job_request import JobRequest
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.job import load_job

JOB, CLUSTER = load_job("opt-350m"), load_cluster("a100-8")
PLUGIN = """
import numpy as np
from tuner.models.prior import Prediction

PROTOCOL = 1

class Constant:
    def predict(self, configurations):
        ones = np.ones(len(configurations))
        return Prediction(ones, 300 * ones, 1e9 * ones)

def prior_of(job, cluster):
    return Constant() if job.name == "opt-350m" else None
"""


def test_the_analytic_model_follows_every_protocol_of_a_prior() -> None:
    prior = prior_of(JOB, CLUSTER)
    assert isinstance(prior, AnalyticPrior)
    assert isinstance(prior, Prior)
    assert isinstance(prior, MemoryPrior)
    assert isinstance(prior, CorrectablePrior)
    assert not SOCKET.plugins.left_out


def test_without_the_analytic_models_a_study_has_no_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    request = JobRequest(job=JOB, cluster="a100-8", space="default")
    whole = problem_of_job(request)
    monkeypatch.setitem(sys.modules, "tuner.models.job_prior", None)
    alone = problem_of_job(request)
    assert alone.prior is None
    # Nothing is left out for its memory, and no sentence says what models predict.
    assert len(alone.candidates) >= len(whole.candidates)
    assert not [note for note in alone.notes if "predict" in note]


def test_a_prior_of_another_distribution_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, "joulefront.priors", "constant", PLUGIN)
    prior = prior_of(JOB, CLUSTER)
    assert prior is not None
    problem = problem_of_job(JobRequest(job=JOB, cluster="a100-8", space="default"))
    some = problem.candidates.configurations[:3]
    assert np.array_equal(peak_memory_bytes(prior, some), [1e9] * 3)
    assert type(problem.prior).__name__ == "Constant"
    assert isinstance(prior_of(load_job("lmm-7b"), CLUSTER), AnalyticPrior)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("raise ValueError('no table')", "it cannot be loaded (ValueError: no table)"),
        (PLUGIN.replace("PROTOCOL = 1", "PROTOCOL = 0"), "it must have PROTOCOL = 1, not 0"),
        ("PROTOCOL = 1", "it must have prior_of()"),
    ],
)
def test_a_prior_that_cannot_be_used_is_named_in_the_notes_of_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, fault: str
) -> None:
    install_plugin(tmp_path, monkeypatch, "joulefront.priors", "constant", source)
    problem = problem_of_job(JobRequest(job=JOB, cluster="a100-8", space="default"))
    assert isinstance(problem.prior, AnalyticPrior)
    (note,) = (note for note in problem.notes if "is left out" in note)
    assert note.startswith("the prior 'constant' (")
    assert fault in note
