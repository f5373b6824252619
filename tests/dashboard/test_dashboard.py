"""The dashboard: our figures and the choice stand where optuna-dashboard's own API shows them."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.support.browser import dump_dom
from tests.support.results import large_result, small_result
from tests.support.studies import run_replay as replay
from tuner.cli.main import main
from tuner.dashboard import server as dashboard
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.errors import InputError

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
    drawn = {"front", "live", "hypervolume"}
    assert set(graphs) == {f"joulefront-{name}" for name in drawn}
    front = next(t for t in graphs["joulefront-front"]["data"] if t.get("name") == "front")
    assert front["x"] == [p.time_to_solution_s / 60 for p in result.front_points]
    assert result.headline in detail["note"]["body"]
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
    from tuner.display.plots import front_figure

    figure = front_figure(large_result())
    assert len(figure.to_json()) < 40_000


def test_without_optuna_dashboard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(InputError, match=r"\[dashboard\]'"):
        dashboard.serve("sqlite:///none.db", token="t")


@pytest.mark.parametrize("storage", ["missing.journal", "sqlite:////no/such/folder/study.db"])
def test_a_storage_that_does_not_answer(storage: str) -> None:
    with pytest.raises(InputError) as caught:
        dashboard.application(storage)
    assert storage in str(caught.value)


def test_a_port_that_is_taken_or_impossible(study: optuna.Study, journal: Path) -> None:
    with pytest.raises(InputError, match="1 to 65535"):
        dashboard.serve(journal, token="t", port=0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InputError, match="cannot listen on"):
            dashboard.serve(journal, token="t", port=other.getsockname()[1])


@pytest.mark.needs("chromium")
def test_the_page_shows_our_figures_in_a_browser(study: optuna.Study, journal: Path) -> None:
    dashboard.publish(study, large_result())
    with served(dashboard.application(journal)) as url:
        dom, console = dump_dom(f"{url}/dashboard/studies/0", width=1400, wait_ms=12000)
    assert not [line for line in console if "Uncaught" in line], console
    for title in ("Front of energy against time", "Front against probing energy"):
        assert title in dom


def test_a_run_gets_its_figures_when_it_is_opened(tmp_path: Path) -> None:
    table = Path(__file__).parents[1] / "data" / "cpu-tiny-gpt"
    result = replay(table, runs_dir=tmp_path, name="run", max_probes=3, report=False)
    assert result.run_dir is not None
    run = RunFolder(result.run_dir)
    assert dashboard.refresh(run)
    with served(dashboard.application(run.journal)) as url:
        detail = get(f"{url}/api/studies/0?after=0")
    assert detail["plotly_graph_objects"]
    # Each probe's trials say what it measured.
    assert len(detail["trials"]) >= 3
    for trial in detail["trials"]:
        assert {"probe_id", "power_W", "step_time_s"} <= {a["key"] for a in trial["user_attrs"]}


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


class Answer(NamedTuple):
    status: int
    headers: Any
    text: str


def ask(url: str, method: str = "GET", **headers: str) -> Answer:
    """One request as it stands, without following a redirect."""
    where = urlsplit(url)
    # Browsers find such a name on loopback, and not every resolver does.
    named = where.hostname.endswith(".localhost")
    address = "127.0.0.1" if named else where.hostname
    connection = HTTPConnection(address, where.port, timeout=30)
    headers = {"Host": where.netloc, **headers}
    try:
        query = f"?{where.query}" if where.query else ""
        connection.request(method, (where.path or "/") + query, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read().decode(errors="replace"))
    finally:
        connection.close()


@contextmanager
def dashboard_command(journal: Path, *more: str) -> Iterator[tuple[str, str]]:
    """`tuner dashboard` in a process of its own: (address without the token, the printed one)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    storage = f"sqlite:///{journal.with_suffix('.db')}"
    optuna.copy_study(
        from_study_name="gpt",
        from_storage=JournalStorage(JournalFileBackend(str(journal))),
        to_storage=storage,
    )
    words = ["dashboard", "--storage", storage, "--port", str(port), "--json", *more]
    with subprocess.Popen(
        [sys.executable, "-m", "tuner.cli.main", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            url = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]
            for _ in range(1200):  # a busy machine takes its time
                with contextlib.suppress(ConnectionRefusedError):
                    ask(f"http://127.0.0.1:{port}/")
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}", url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:  # leaving the block would wait for it
                process.kill()
                raise


def let_in(url: str) -> dict[str, str]:
    answer = ask(url)
    assert answer.status == 200
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    return {"Cookie": cookie.partition(";")[0]}


@pytest.mark.slow  # seconds of a core, for the imports of a server
def test_only_the_printed_address_opens_the_dashboard(study: optuna.Study, journal: Path) -> None:
    with dashboard_command(journal) as (base, url):
        port = base.rpartition(":")[2]
        for path in ("/", "/api/studies", "/dashboard", "/static/bundle.js", "/?token=wrong"):
            assert ask(base + path).status == 403, path
        assert ask(base + "/?token=%E2%82%AC").status == 403
        assert ask(base + "/api/studies", Cookie=f"joulefront-{port}=wrong").status == 403
        cookie = let_in(url)
        page = ask(base + "/dashboard", **cookie)
        assert page.status == 200
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        assert page.headers["Cache-Control"] == "no-store"
        policies = " ".join(page.headers.get_all("Content-Security-Policy"))
        assert "frame-ancestors 'self'" in policies
        assert "gpt" in ask(base + "/api/studies", **cookie).text
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1:1", ""):
            answer = ask(base + "/api/studies", Host=host, **cookie)
            assert answer.status == 403, host
            assert "localhost" in answer.text
            assert ask(url, Host=host).status == 403
        for host in (f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
            assert ask(base + "/api/studies", Host=host, **cookie).status == 200
        for method in ("DELETE", "PUT", "POST", "PATCH", "OPTIONS"):
            answer = ask(base + "/api/studies/0", method, **cookie)
            assert answer.status == 403, method
            assert ask(base + "/api/studies/0", method).status == 403
        assert "only shows" in answer.text
        assert "gpt" in ask(base + "/api/studies", **cookie).text
        # A host of its own: cookies are sent to every port of their host, so to other users'
        # servers on 127.0.0.1.
        own = urlsplit(url).netloc
        assert re.fullmatch(r"joulefront-[0-9a-f]{24}\.localhost:\d+", own)
        cookie_set = ask(url).headers["Set-Cookie"]
        assert "domain" not in cookie_set.lower()  # so of this host alone
        given = {"Cookie": cookie_set.partition(";")[0]}
        assert "gpt" in ask(base + "/api/studies", Host=own, **given).text
        for path in ("/", "/api/studies"):  # a stranger does not learn the name
            for host in ("evil.example", own.replace("joulefront-", "joulefront-0"), own):
                assert own not in ask(base + path, Host=host).text


@pytest.mark.slow
def test_an_idle_connection_keeps_nobody_waiting(study: optuna.Study, journal: Path) -> None:
    with dashboard_command(journal) as (base, url):
        port = int(base.rpartition(":")[2])
        cookie = let_in(url)
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        try:
            idle[0].sendall(b"GET / HT")
            began_s = time.monotonic()
            assert "gpt" in ask(base + "/api/studies", **cookie).text
            assert time.monotonic() - began_s < dashboard._Requests.timeout  # of each idle one
            for connection in idle:
                connection.settimeout(60)
                assert connection.recv(1) == b""  # it is closed after some seconds
        finally:
            for connection in idle:
                connection.close()


@pytest.mark.slow
@pytest.mark.needs("chromium")
def test_a_browser_is_let_in_by_the_printed_address(study: optuna.Study, journal: Path) -> None:
    with dashboard_command(journal) as (base, url):
        dom, console = dump_dom(url, width=1400, wait_ms=12000)
        outside, _ = dump_dom(base + "/dashboard", width=1400)
    assert not [line for line in console if "Uncaught" in line or "violates" in line], console
    assert "gpt" in dom
    assert "it holds a token" in outside


def test_an_interrupt_while_a_page_is_made_ends_the_server(tmp_path: Path) -> None:
    code = """
        import sys, time
        from tuner.dashboard.server import serve_until_interrupted
        def slow(environ, start_response):
            print("asked", flush=True)
            time.sleep(60)
        try:
            serve_until_interrupted(slow, "127.0.0.1", int(sys.argv[1]))
        except KeyboardInterrupt:
            print("ended", flush=True)
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(port)], stdout=subprocess.PIPE, text=True
    )
    asking = socket.socket()
    try:
        for _ in range(300):
            with contextlib.suppress(ConnectionRefusedError):
                asking.connect(("127.0.0.1", port))
                break
            time.sleep(0.1)
        asking.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert server.stdout.readline() == "asked\n"
        server.send_signal(signal.SIGINT)
        assert server.stdout.readline() == "ended\n"
        assert server.wait(timeout=60) == 0
    finally:
        asking.close()
        server.kill()
        server.wait()


def test_the_dashboard_is_on_loopback_unless_told_otherwise() -> None:
    import inspect

    from tuner.cli.main import command_parser
    from tuner.dashboard import server as dashboard

    assert inspect.signature(dashboard.serve).parameters["host"].default == "127.0.0.1"
    assert command_parser().parse_args(["dashboard"]).host == "127.0.0.1"
