"""The dashboard: our figures and the choice stand where optuna-dashboard's own API shows them."""

from __future__ import annotations

import json
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from sample_results import large_result, small_result

from search_spaces.errors import InputError
from tuner import dashboard

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
    assert set(graphs) == set(dashboard.GRAPH_IDS)
    front = next(t for t in graphs["joulefront-front"]["data"] if t.get("name") == "front")
    assert front["x"] == [p.time_to_solution_s for p in result.front_points]
    assert result.choice.sentence in detail["note"]["body"]
    assert "energy to solution" in detail["note"]["body"]


def test_publishing_again_overwrites(study: optuna.Study, journal: Path) -> None:
    dashboard.publish(study, large_result())
    dashboard.publish(study, small_result())
    with served(dashboard.application(journal)) as url:
        detail = get(f"{url}/api/studies/0?after=0")
    assert len(detail["plotly_graph_objects"]) == len(dashboard.GRAPH_IDS)
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


def test_a_note_escapes_what_users_wrote() -> None:
    from dataclasses import replace

    result = small_result()
    hostile = replace(result, choice=replace(result.choice, sentence="<img src=x onerror=y>"))
    assert "<img" not in dashboard.note(hostile)
