"""Studies that earlier releases recorded: they open, continue, replay and are rebuilt.

tests/data/older-release was written by the first release (no schema in study.toml),
tests/data/before-redesign by the last commit before there was one import package.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import tuner
from tuner.cli.main import main
from tuner.executors.local import SimulatedExecutor
from tuner.problem.run_folder import RunFolder, plain
from tuner.search_spaces.cluster import Cluster, Device, load_cluster
from tuner.search_spaces.errors import InputError
from tuner.storage import open_storage
from tuner.study.session import _check_question
from tuner.testing.studies import ModelRunner, TalliedRunner, run_optimize
from tuner.workload.probe import WindowPolicy
from tuner.workload.trace import read_trace

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Recorded:
    """A recorded study, and what the release that recorded it answered."""

    name: str
    probes: int
    best: str
    energy_to_solution_kJ: float


STUDIES = (
    Recorded(
        "older-release",
        13,
        "activation_checkpointing=none data_parallel=2 micro_batch=4 optimizer_offload=none "
        "zero_stage=1",
        16.120086040800075,
    ),
    Recorded(
        "before-redesign",
        5,
        "activation_checkpointing=none data_parallel=2 micro_batch=4 optimizer_offload=none "
        "zero_stage=0",
        16.757298603255425,
    ),
)


@pytest.fixture(params=STUDIES, ids=lambda recorded: recorded.name)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return request.param


@pytest.fixture
def run(recorded: Recorded, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(DATA / recorded.name, tmp_path / recorded.name)))


def trials(run: RunFolder) -> list[tuple[Any, ...]]:
    """State, values and configuration of each trial that ended well."""
    study = optuna.load_study(study_name=run.name, storage=open_storage(None, run.journal))
    return sorted(
        (t.user_attrs["probe_id"], t.user_attrs["configuration"], tuple(t.values))
        for t in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    )


def continued(run: RunFolder, *, probes: int, **changes: Any) -> TalliedRunner:
    """Ask the same question again, on modelled probes; return the runner that answered."""
    question = tomllib.loads((run.path / "study.toml").read_text())
    cluster = dict(question["cluster"])
    device = {k: tuple(v) if isinstance(v, list) else v for k, v in cluster.pop("device").items()}
    cluster["sources"] = tuple(cluster["sources"])
    settings = question["settings"]
    runner = TalliedRunner(ModelRunner())
    run_optimize(
        **{
            "job": "tiny-gpt",
            "cluster": Cluster(**cluster, device=Device(**device)),
            "budget_kJ": question["constraints"]["budget_kJ"],
            "window": WindowPolicy(**settings["window"]),
            "executor": SimulatedExecutor(runner),
            "runs_dir": run.path.parent,
            "name": run.name,
            "max_probes": probes,
            "verify": False,
            "report": False,
            "sampler": "random",  # ours would stop: its next probe would not repay itself
            **changes,
        }
    )
    return runner


def test_it_opens_with_the_answer_that_was_given(
    recorded: Recorded, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tuner.load_result(run.path)
    assert result.spent.probes == result.spent.measurements == recorded.probes
    assert result.best is not None
    assert result.best.configuration.key == recorded.best
    # Launches have been weighed otherwise since; the shift is far below the interval's width.
    assert result.best.energy_to_solution_kJ == pytest.approx(
        recorded.energy_to_solution_kJ, rel=1e-3
    )
    assert main(["front", str(run.path), "--json"]) == 0
    front = json.loads(capsys.readouterr().out)
    assert front["best"]["configuration"] == result.best.configuration.to_json()


def test_the_same_question_continues_where_it_stopped(recorded: Recorded, run: RunFolder) -> None:
    before = read_trace(run.trace).records
    # Its last probe is kept to measure the front and the choice again.
    runner = continued(run, probes=recorded.probes + 2)
    records = read_trace(run.trace).records
    assert records[: len(before)] == before
    made = [request.probe_id for request in runner.asked]
    assert made == [record.request.probe_id for record in records[len(before) :]]
    assert made[0] == f"p{recorded.probes:04d}"
    assert tuner.load_result(run.path).spent.probes == len(records) > recorded.probes


def test_another_question_is_refused(run: RunFolder) -> None:
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="another question"):
        continued(run, probes=20, job="tiny-opt")
    after = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before


def test_its_study_is_rebuilt_as_it_was(recorded: Recorded, run: RunFolder) -> None:
    before = trials(run)
    assert len(before) == recorded.probes
    run.journal.unlink()
    assert main(["rebuild", str(run.path)]) == 0
    assert trials(run) == before


def test_its_trace_is_replayed(recorded: Recorded, run: RunFolder, tmp_path: Path) -> None:
    words = ["--runs-dir", str(tmp_path / "runs"), "--name", "again", "--quiet", "--no-verify"]
    assert main(["replay", str(run.trace), "--max-probes", "3", *words]) == 0
    again = tuner.load_result("again", runs_dir=tmp_path / "runs")
    assert again.spent.probes == 3
    kept = {r.request.launch.key for r in read_trace(run.trace).records}
    assert {p.configuration.launch.key for p in again.points} <= kept


def test_a_rate_that_a_release_did_not_know_makes_no_other_question() -> None:
    now = plain(asdict(load_cluster("h100-32")))
    device = {n: v for n, v in now["device"].items() if n not in ("fp8_flops", "mxfp8_flops")}
    problem, run = SimpleNamespace(identity={"cluster": now}), SimpleNamespace(name="run")
    before = {"cluster": {**now, "device": {**device, "sources": ["an older sheet"]}}}
    _check_question(run, problem, before)  # type: ignore[arg-type]
    for name, value in (("max_W", 1.0), ("fp8_flops", 1.0)):
        other = {"cluster": {**now, "device": {**now["device"], name: value}}}
        with pytest.raises(InputError, match=f"another question.*{name} was 1.0"):
            _check_question(run, problem, other)  # type: ignore[arg-type]
