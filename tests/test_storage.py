"""Where a study is kept: PostgreSQL for real, rebuilding, older and newer releases, passwords."""

from __future__ import annotations

import json
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

import tuner
from tuner.cli.main import main
from tuner.executors.local import InlineExecutor
from tuner.problem.constraints import Constraints
from tuner.problem.run_folder import RunFolder
from tuner.search.optuna_samplers import make_sampler
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space
from tuner.storage import StorageError, open_storage, without_password
from tuner.study.rebuild import rebuild
from tuner.study.recorder import STORAGE_TRIES, StudyRecorder
from tuner.testing.postgresql import PASSWORD, QUOTED, Server, postgresql
from tuner.testing.studies import LONG_JOB, ModelRunner, run_optimize, run_replay
from tuner.workload.pending import recover_pending
from tuner.workload.trace import compact, read_trace

OLD = Path(__file__).parent / "data" / "older-release"


def optimize(folder: Path, **more):
    options = {"cluster": "cpu-2", "name": "study", "report": False, "max_probes": 4, **more}
    return run_optimize(
        LONG_JOB,
        executor=InlineExecutor(ModelRunner(), keep_in=folder / "study"),
        runs_dir=folder,
        **options,
    )


def trials(run: RunFolder, storage: str | None = None) -> list[tuple]:
    study = optuna.load_study(study_name=run.name, storage=open_storage(storage, run.journal))
    return sorted(
        (t.user_attrs["probe_id"], t.user_attrs["configuration"], t.state.name, *(t.values or []))
        for t in study.get_trials()
    )


# Rebuilding.


def test_a_rebuilt_study_is_the_one_that_was(tmp_path: Path, capsys) -> None:
    optimize(tmp_path)
    run = RunFolder(tmp_path / "study")
    before = trials(run)
    run.journal.write_bytes(b"not a journal\n" * 50)
    assert main(["rebuild", "study", "--runs-dir", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["probes"] == 4
    assert trials(run) == before
    assert (run.path / "study.journal.old").read_bytes().startswith(b"not a journal")
    # It goes on as if nothing had been.
    assert optimize(tmp_path, max_probes=6).spent.probes == 6
    assert not list(run.path.glob("study.journal.new*"))


def test_a_rebuilt_study_may_go_into_a_database(tmp_path: Path) -> None:
    optimize(tmp_path)
    run, url = RunFolder(tmp_path / "study"), f"sqlite:///{tmp_path / 'study.db'}"
    made = rebuild(run, storage=url)
    assert made.measurements == 4
    assert trials(run, url) == trials(run)
    assert rebuild(run, storage=url).notes == ()  # a second time there is nothing to tell
    assert len(trials(run, url)) == 4


def test_a_replayed_table_is_rebuilt(tmp_path: Path) -> None:
    from tuner.testing.studies import write_table

    table = write_table(tmp_path / "table")
    options = {"runs_dir": tmp_path, "name": "study", "report": False}
    run_replay(table, max_probes=4, **options)
    run = RunFolder(tmp_path / "study")
    before = trials(run)
    rebuild(run)
    assert trials(run) == before
    assert run_replay(table, max_probes=5, **options).spent.probes == 5


def test_what_cannot_be_rebuilt_is_one_sentence(tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "study.toml").write_text('name = "empty"\n')
    (tmp_path / "empty" / "trace").mkdir()
    (tmp_path / "empty" / "trace" / "probes.jsonl").touch()
    assert main(["rebuild", "empty", "--runs-dir", str(tmp_path)]) == 2
    assert "nothing to rebuild" in capsys.readouterr().err
    optimize(tmp_path)
    with RunFolder(tmp_path / "study").locked():
        assert main(["rebuild", "study", "--runs-dir", str(tmp_path)]) == 2
    assert "being run by process" in capsys.readouterr().err


# Kept records.


def test_a_record_is_kept_only_until_it_is_in_the_trace(tmp_path: Path) -> None:
    optimize(tmp_path)
    assert recover_pending(tmp_path / "study") == ()
    assert len(read_trace(tmp_path / "study" / "trace" / "probes.jsonl").records) == 4


# A storage in trouble, and one that is not.


def following(folder: Path, said: list[str]) -> StudyRecorder:
    """A study on a journal, which waits for its storage."""
    candidates = load_space("default").candidates(load_job("tiny-gpt"), load_cluster("cpu-2"))
    book = StudyRecorder(
        name="study",
        storage=open_storage(None, folder / "study.journal"),
        sampler=make_sampler("random", candidates),
        steps=10,
        constraints=Constraints(None, None, None),
        driver="me",
        identity="this one",
    )
    book.follow(lambda: [], said.append)
    return book


def test_what_is_no_trouble_of_the_storage_goes_out_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    book = following(tmp_path, said)
    trial = book.study.ask()
    book.study.tell(trial, [1.0, 2.0])
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        book.patiently(lambda: trial.set_user_attr("late", 1))
    with pytest.raises(PermissionError):  # of a file that is not the storage's
        book.patiently(lambda: (_ for _ in ()).throw(PermissionError("of the report")))
    assert said == []


def test_a_call_that_fails_while_the_storage_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    book, calls = following(tmp_path, said), []
    monkeypatch.setattr("tuner.study.recorder.STORAGE_RETRY_S", 0.0)

    def refused() -> None:
        calls.append(1)
        raise optuna.exceptions.StorageInternalError("no room for this row")

    with pytest.raises(StorageError, match="no room for this row"):
        book.patiently(refused)
    assert len(calls) == STORAGE_TRIES
    assert sum("answers again" in sentence for sentence in said) == STORAGE_TRIES - 1


def test_the_journal_forgets_the_places_of_lines_that_it_read(tmp_path: Path) -> None:
    book = following(tmp_path, [])
    for number in range(5):
        trial = book.study.ask()
        trial.set_user_attr("probe_id", f"p{number:04d}")
        book.study.tell(trial, [1.0, 2.0])
    assert len(book.study._storage._backend._log_number_offset) <= 3
    again = open_storage(None, tmp_path / "study.journal")
    names = [
        t.user_attrs["probe_id"]
        for t in optuna.load_study(study_name="study", storage=again).get_trials()
    ]
    assert names == [f"p{number:04d}" for number in range(5)]
    # A reader that asks for an earlier line reads from the start.
    backend = book.study._storage._backend
    assert len(list(backend.read_logs(2))) == len(list(backend.read_logs(0))) - 2


def test_the_driver_keeps_little_of_what_is_in_the_trace(tmp_path: Path) -> None:
    optimize(tmp_path)
    for record in read_trace(tmp_path / "study" / "trace" / "probes.jsonl").records:
        full = replace(
            record,
            environment={"torch": "2"},
            measurements=tuple(replace(m, step_times_s=(1.0,) * 9) for m in record.measurements),
        )
        kept = compact(full)
        assert kept.environment == {}
        assert [m.step_times_s for m in kept.measurements] == [()]
        told = [(m.live, m.step_time_s, m.power_W, m.energy_J) for m in full.measurements]
        assert told == [(m.live, m.step_time_s, m.power_W, m.energy_J) for m in kept.measurements]
        assert (kept.request, kept.energy_J, kept.wall_s) == (
            full.request,
            full.energy_J,
            full.wall_s,
        )


# Older and newer releases.


def test_a_study_of_an_older_release_opens(tmp_path: Path, capsys) -> None:
    """The folder was written by the first release: no schema in study.toml, fewer fields."""
    run = RunFolder(tmp_path / "older-release")
    shutil.copytree(OLD, run.path)
    assert "schema" not in (run.read_study() or {})
    result = tuner.load_result(run.path)
    assert result.spent.probes == 13
    assert result.best is not None
    for words in (["front"], ["compare"], ["apply"], ["report"], ["rebuild"]):
        assert main([*words, str(run.path)]) == 0, capsys.readouterr().err
    states = [state for _, _, state, *_ in trials(run)]
    assert states.count(TrialState.COMPLETE.name) == result.spent.measurements


def test_a_study_of_a_newer_release_is_refused_in_a_sentence(tmp_path: Path, capsys) -> None:
    optimize(tmp_path, max_probes=2)
    run = RunFolder(tmp_path / "study")
    assert (run.read_study() or {})["schema"] == 1
    text = run.study_file.read_text()
    run.study_file.write_text(text.replace("schema = 1", "schema = 99"))
    assert main(["front", "study", "--runs-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "schema 99" in said
    assert "newer" in said
    assert len(said.splitlines()) == 1


# Passwords.


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@host/db",
        "postgresql//me:hunter2@host",
        "mysql+pymysql://me:hunter2@host/db?charset=utf8",
        "postgresql://host/db?user=me&password=hunter2",
        "me:hunter2@host",
    ],
)
def test_no_password_of_a_url_is_ever_shown(tmp_path: Path, url: str) -> None:
    assert "hunter2" not in without_password(url)
    assert "hunter2" not in without_password("FATAL: no entry for hunter2", url) or "://" not in url
    with pytest.raises(InputError) as caught:
        optimize(
            tmp_path,
            storage=url.replace("@host", "@127.0.0.1:1").replace("//host", "//127.0.0.1:1"),
        )
    assert "hunter2" not in str(caught.value)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes()


# PostgreSQL.


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgresql() as running:
        yield running


@pytest.mark.slow
@pytest.mark.postgres
def test_several_drivers_share_one_study_on_postgresql(server: Server, tmp_path: Path) -> None:
    """Three at once, which also make the tables at once; each tells its own, none another's."""
    errors: list[BaseException] = []

    def drive(folder: Path) -> None:
        try:
            optimize(folder, storage=server.url)
        except BaseException as error:
            errors.append(error)

    folders = [tmp_path / name for name in ("a", "b", "c")]
    threads = [threading.Thread(target=drive, args=[folder]) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    told = trials(RunFolder(folders[0] / "study"), server.url)
    assert [state for _, _, state, *_ in told] == ["COMPLETE"] * 12
    for folder in folders:
        asked = (RunFolder(folder / "study").read_study() or {})["driver"]
        assert len(read_trace(folder / "study" / "trace" / "probes.jsonl").records) == 4
        assert asked
        for path in folder.rglob("*"):
            text = path.read_bytes() if path.is_file() else b""
            assert PASSWORD.encode() not in text
            assert QUOTED.encode() not in text
    # Each may be gone on with, and rebuilt, without touching the others' trials.
    assert optimize(folders[1], storage=server.url, max_probes=5).spent.probes == 5
    rebuild(RunFolder(folders[2] / "study"), storage=server.url)
    assert len(trials(RunFolder(folders[0] / "study"), server.url)) == 13


@pytest.mark.slow
@pytest.mark.postgres
def test_a_wrong_password_is_one_sentence_without_it(server: Server, tmp_path: Path) -> None:
    url = server.url.replace(QUOTED, "wr0ng%40one")
    with pytest.raises(InputError, match="password authentication failed") as caught:
        optimize(tmp_path, storage=url)
    assert "wr0ng" not in str(caught.value)


def test_a_study_toml_of_any_size_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "study.toml").open("wb") as file:
        file.truncate(2**30)  # a sparse file
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="more than 16 MiB"):
            RunFolder(tmp_path).read_study()
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
