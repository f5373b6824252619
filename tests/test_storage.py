"""Where a study is kept: PostgreSQL for real, studies made again, newer releases, passwords."""

from __future__ import annotations

import threading
import tomllib
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from tests.support.postgresql import PASSWORD, QUOTED, Server, postgresql
from tests.support.studies import LONG_JOB, FormulaRunner, run_optimize
from tuner.cli.main import main
from tuner.executors.local import InlineExecutor
from tuner.problem.constraints import Constraints
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space
from tuner.study.recorder import StudyRecorder, open_storage, storage_trouble
from tuner.workload.records.trace import compact, read_trace, recover_pending

pytestmark = pytest.mark.usefixtures("next_candidates")


def optimize(folder: Path, **more):
    options = {"cluster": "cpu-2", "name": "study", "report": False, "max_probes": 4, **more}
    return run_optimize(
        LONG_JOB,
        executor=InlineExecutor(FormulaRunner(), keep_in=folder / options["name"]),
        runs_dir=folder,
        **options,
    )


def trials(run: RunFolder, storage: str | None = None) -> list[tuple]:
    study = optuna.load_study(study_name=run.name, storage=open_storage(storage, run.journal))
    return sorted(
        (t.user_attrs["probe_id"], t.user_attrs["configuration"], t.state.name, *(t.values or []))
        for t in study.get_trials()
    )


# A study made again.


def test_a_damaged_journal_is_made_again_by_the_same_command(
    tmp_path: Path, finished_study
) -> None:
    run = RunFolder(finished_study.copy_into(tmp_path))
    before = trials(run)
    run.journal.write_bytes(b"not a journal\n" * 50)
    with pytest.raises(InputError, match="remove it, and the same command makes it again"):
        optimize(tmp_path, max_probes=8)
    run.journal.unlink()
    optimize(tmp_path, max_probes=8)
    assert trials(run) == before
    # It goes on as if nothing had been.
    assert optimize(tmp_path, max_probes=9).spent.probes == 9


def test_a_lost_database_is_made_again_by_the_same_command(tmp_path: Path, finished_study) -> None:
    run, url = RunFolder(finished_study.copy_into(tmp_path)), f"sqlite:///{tmp_path / 'study.db'}"
    for _ in range(2):  # a second time there is nothing to tell
        optimize(tmp_path, max_probes=8, storage=url)
        assert trials(run, url) == trials(run)


# Kept records.


def test_a_record_is_kept_only_until_it_is_in_the_trace(tmp_path: Path) -> None:
    optimize(tmp_path)
    assert recover_pending(tmp_path / "study") == ()
    assert len(read_trace(tmp_path / "study" / "trace" / "probes.jsonl").records) == 4


# A storage in trouble, and one that is not.


def book_in(folder: Path) -> StudyRecorder:
    candidates = load_space("default").candidates(load_job("tiny-gpt"), load_cluster("cpu-2"))
    return StudyRecorder(
        name="study",
        storage=open_storage(None, folder / "study.journal"),
        candidates=candidates,
        steps=10,
        constraints=Constraints(None, None, None),
    )


def test_what_is_no_trouble_of_the_storage_goes_out_as_it_is(tmp_path: Path) -> None:
    book = book_in(tmp_path)
    trial = book.study.ask()
    book.study.tell(trial, [1.0, 2.0])
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError), storage_trouble("here"):
        trial.set_user_attr("late", 1)
    with pytest.raises(PermissionError), storage_trouble("here"):  # of another file
        raise PermissionError("of the report")


def test_the_driver_keeps_little_of_what_is_in_the_trace(finished_study) -> None:
    for record in read_trace(RunFolder(finished_study.result.run_dir).trace).records:
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


# Other releases.


@pytest.mark.extra("tuner.display.report", "tuner.simulated.runner")
@pytest.mark.parametrize("schema", ["schema = 99", "schema = 1", ""])
@pytest.mark.parametrize(
    "command",
    [
        ["show", "study"],
        ["choose", "study", "--deadline", "1h"],
        ["show", "study", "--html"],
        ["optimize", "tiny-gpt", "--executor", "simulated", "--cluster", "a100-8"],
    ],
)
def test_a_study_of_another_release_is_refused_in_a_sentence(
    tmp_path: Path, capsys, finished_study, command: list[str], schema: str
) -> None:
    run = RunFolder(finished_study.copy_into(tmp_path))
    text = run.study_file.read_text()
    version = tomllib.loads(text)["versions"]["joulefront"]
    run.study_file.write_text(text.replace("schema = 2", schema))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    if command[0] == "optimize":
        command = [*command, "--name", "study"]
    assert main([*command, "--runs-dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"was written by joulefront {version}" in message
    assert "give another name" in message
    assert len(message.splitlines()) == 1
    assert {path: path.read_bytes() for path in before} == before


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
@pytest.mark.needs("postgresql")
def test_a_study_on_postgresql_is_continued(server: Server, tmp_path: Path) -> None:
    """Beside it another study makes the tables at the same time."""
    errors: list[BaseException] = []

    def drive(name: str) -> None:
        try:
            optimize(tmp_path, storage=server.url, name=name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=drive, args=[name]) for name in ("study", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    run = RunFolder(tmp_path / "study")
    assert [state for _, _, state, *_ in trials(run, server.url)] == ["COMPLETE"] * 4
    for path in tmp_path.rglob("*"):
        text = path.read_bytes() if path.is_file() else b""
        assert PASSWORD.encode() not in text
        assert QUOTED.encode() not in text
    assert optimize(tmp_path, storage=server.url, max_probes=5).spent.probes == 5
    assert len(trials(run, server.url)) == 5


@pytest.mark.slow
@pytest.mark.needs("postgresql")
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


def test_an_interrupt_while_the_storage_writes_stays_one() -> None:
    def write() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("did not possess lock")

    with pytest.raises(KeyboardInterrupt), storage_trouble("the storage"):
        write()
