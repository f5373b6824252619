"""The dashboard: our figures and the choice stand where optuna-dashboard's own API shows them."""

from __future__ import annotations

import json
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import optuna
import pytest
from browser import chromium, dump_dom
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from sample_results import large_result, small_result
from test_showing import phased

from search_spaces.errors import InputError
from tuner import dashboard
from tuner.api import replay
from tuner.cli import main
from tuner.result import Result
from tuner.runs import RunFolder
from workload.probe import ProbeRecord

pytest.importorskip("optuna_dashboard")


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(application: Any) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, application, handler_class=_Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


@pytest.fixture
def study(journal: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.create_study(
        study_name="gpt", storage=storage, directions=["minimize", "minimize"]
    )
    study.set_metric_names(["energy_to_solution_kJ", "time_to_solution_s"])
    for micro_batch in (1, 2):
        trial = study.ask({"micro_batch": optuna.distributions.CategoricalDistribution([1, 2, 4])})
        study.tell(trial, [10.0 / micro_batch, 100.0])
    return study


def test_api_shows_study_metric_names_graphs_and_note(study: optuna.Study, journal: Path) -> None:
    result = large_result()
    dashboard.publish(study, result)
    with served(dashboard.application(journal)) as url:
        (summary,) = get(f"{url}/api/studies")["study_summaries"]
        assert summary["study_name"] == "gpt"
        detail = get(f"{url}/api/studies/{summary['study_id']}?after=0")
        with urllib.request.urlopen(f"{url}/dashboard", timeout=30) as page:
            assert page.status == 200
    assert detail["objective_names"] == ["energy_to_solution_kJ", "time_to_solution_s"]
    assert len(detail["trials"]) == 2
    graphs = {g["id"]: json.loads(g["graph_object"]) for g in detail["plotly_graph_objects"]}
    drawn = {"front", "live", "hypervolume", "probes", "surrogate-time", "surrogate-power"}
    assert set(graphs) == {f"joulefront-{name}" for name in drawn}
    assert dashboard.has_figures(study)
    front = next(t for t in graphs["joulefront-front"]["data"] if t.get("name") == "front")
    assert front["x"] == [p.time_to_solution_s for p in result.front_points]
    assert result.choice.sentence in detail["note"]["body"]
    assert "energy to solution" in detail["note"]["body"]


def test_publishing_again_overwrites(study: optuna.Study, journal: Path) -> None:
    dashboard.publish(study, large_result())
    dashboard.publish(study, small_result())
    with served(dashboard.application(journal)) as url:
        detail = get(f"{url}/api/studies/0?after=0")
    ids = [graph["id"] for graph in detail["plotly_graph_objects"]]
    assert len(ids) == len(set(ids))
    assert "262 s" in detail["note"]["body"]
    assert "(estimated)" in detail["note"]["body"]


def test_a_graph_stays_small() -> None:
    # Each save is cut into attributes of 2,045 characters, and a journal keeps every one of them.
    from tuner.plots import front_figure

    figure = front_figure(large_result())
    assert figure is not None
    assert len(figure.to_json()) < 40_000


def test_without_optuna_dashboard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(InputError, match=r"joulefront\[dashboard\]"):
        dashboard.serve("sqlite:///none.db")


@pytest.mark.parametrize("storage", ["missing.journal", "sqlite:////no/such/folder/study.db"])
def test_a_storage_that_does_not_answer(storage: str) -> None:
    with pytest.raises(InputError) as caught:
        dashboard.application(storage)
    assert storage in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_that_is_taken_or_impossible(study: optuna.Study, journal: Path) -> None:
    with pytest.raises(InputError, match="1 to 65535"):
        dashboard.serve(journal, port=0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InputError, match="cannot listen on"):
            dashboard.serve(journal, port=other.getsockname()[1])


def followed(run_dir: Path, probes: int, **options: Any) -> tuple[optuna.Study, list[int], Path]:
    """A study of so many probes of 1 s each, followed; how many had ended at each drawing."""
    journal = run_dir / "study.journal"
    storage = JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.create_study(
        study_name="run", storage=storage, directions=["minimize", "minimize"]
    )
    result, drawn, now = large_result(), [], [0.0]
    record = phased(run_dir)

    def so_far() -> tuple[Result, list[ProbeRecord]]:
        drawn.append(len(study.trials))
        return result, [record]

    follow = dashboard.Follower(study, "me", run_dir, so_far, clock=lambda: now[0], **options)
    for number in range(probes):
        name = f"p{number:04d}"
        mine = replace(record, request=replace(record.request, probe_id=name))
        trial = study.ask()
        key = f"{mine.request.launch.key} | {mine.request.live[0].key}"
        attrs = {"driver": "me", "probe_id": name, "configuration": key}
        for attr, value in attrs.items():
            trial.set_user_attr(attr, value)
        if number == 0:
            (run_dir / "trace" / "power" / "p0000.csv.gz").write_bytes(
                (run_dir / "trace" / "power" / "p0001.csv.gz").read_bytes()
            )
        follow.attach(mine, trial)
        study.tell(trial, [1.0, 2.0])
        now[0] += 1.0
        follow(mine, number + 1)
    return study, drawn, journal


def test_while_it_runs_trials_have_notes_and_pictures(tmp_path: Path) -> None:
    _, drawn, journal = followed(tmp_path, 12, least_s=0.0)
    # Again when the probes have grown by a third.
    assert drawn == [2, 3, 4, 6, 8, 11]
    application = dashboard.application(journal, artifacts=tmp_path / dashboard.ARTIFACTS)
    with served(application) as url:
        detail = get(f"{url}/api/studies/0?after=0")
        first = detail["trials"][0]
        (picture,) = first["artifacts"]
        address = f"{url}/artifacts/0/{first['trial_id']}/{picture['artifact_id']}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.headers["Content-Type"] == "image/svg+xml"
            assert b"<polyline" in answer.read()
    assert "200 W" in first["note"]["body"]
    assert "0.400 s a step" in first["note"]["body"]
    assert not detail["trials"][5]["artifacts"]  # its power was not sampled
    assert {g["id"] for g in detail["plotly_graph_objects"]} >= {"joulefront-front"}


@pytest.mark.skipif(chromium() is None, reason="no chromium or google-chrome here")
def test_the_page_shows_our_figures_in_a_browser(study: optuna.Study, journal: Path) -> None:
    dashboard.publish(study, large_result())
    with served(dashboard.application(journal)) as url:
        dom, console = dump_dom(f"{url}/dashboard/studies/0", width=1400, wait_ms=12000)
    assert not [line for line in console if "Uncaught" in line], console
    for title in ("Front of energy against time", "Front against probing energy"):
        assert title in dom


def test_a_study_of_seconds_is_drawn_at_its_end_only(tmp_path: Path) -> None:
    _, drawn, _ = followed(tmp_path, 12, least_s=100.0)
    assert drawn == []


def test_a_failed_probe_says_why_in_its_note() -> None:
    bad = small_result().failures[0]
    said = dashboard.trial_note(bad, bad.request.launch.key)
    assert "failed, out_of_memory: a rank ran out of memory" in said
    assert "<img" not in dashboard.trial_note(bad, "<img src=x>")


def test_a_picture_that_cannot_be_kept_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / dashboard.ARTIFACTS).write_text("a file where the folder should be")
    study, _, _ = followed(tmp_path, 2)
    assert len(study.trials) == 2


def test_an_old_run_gets_its_figures_when_it_is_opened(tmp_path: Path) -> None:
    table = Path(__file__).parent / "data" / "cpu-tiny-gpt"
    result = replay(table, runs_dir=tmp_path, name="old", max_probes=3, report=False)
    assert result.run_dir is not None
    run = RunFolder(result.run_dir)
    assert dashboard.refresh(run)
    assert not dashboard.refresh(run)
    with served(dashboard.application(run.journal)) as url:
        assert get(f"{url}/api/studies/0?after=0")["plotly_graph_objects"]


def test_the_command_serves_several_studies_of_one_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    for name in ("one", "two"):
        optuna.create_study(study_name=name, storage=url)
    asked: list[Any] = []
    monkeypatch.setattr(dashboard, "serve", lambda storage, **more: asked.append((storage, more)))
    assert main(["dashboard", "--storage", url, "--port", "8099"]) == 0
    assert asked[0][0] == url
    assert "every study" in capsys.readouterr().out
    with served(dashboard.application(url)) as address:
        names = {s["study_name"] for s in get(f"{address}/api/studies")["study_summaries"]}
    assert names == {"one", "two"}


def test_a_note_escapes_what_users_wrote() -> None:
    result = small_result()
    hostile = replace(result, choice=replace(result.choice, sentence="<img src=x onerror=y>"))
    assert "<img" not in dashboard.note(hostile)
