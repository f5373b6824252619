"""Runs of a folder: list, remove."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.studies import LONG_JOB, FormulaRunner, run_optimize, run_replay, write_table
from tuner.cli.main import main
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.run_folder import RunFolder, list_runs
from tuner.search_spaces.errors import InputError

pytestmark = pytest.mark.usefixtures("next_candidates")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder of two runs, which tests copy."""
    folder = tmp_path_factory.mktemp("recorded")
    table = write_table(folder / "table", shapes=(1, 4))
    for name in ("one", "two"):
        run_replay(table, runs_dir=folder / "mine", max_probes=2, name=name, report=False)
    return folder / "mine"


@pytest.fixture
def runs(recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOULEFRONT_RUNS", str(tmp_path / "mine"))
    return Path(shutil.copytree(recorded, tmp_path / "mine"))


def listed(capsys):
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["items"]}


def test_a_search_is_stopped_from_another_terminal(tmp_path, capsys):
    """The file appears during the third probe, after which none is started or verified."""
    runner = FormulaRunner()
    folder = RunFolder(tmp_path / "runs" / "long")

    class Stopping(SimulatedExecutor):
        made = 0

        def wait(self, timeout_s=None):
            self.made += 1
            if self.made == 3:
                assert main(["runs", "stop", "long", "--runs-dir", str(tmp_path / "runs")]) == 0
            return super().wait(timeout_s)

    options = {"cluster": "cpu-2", "max_probes": 12, "name": "long", "report": False}
    options["runs_dir"] = tmp_path / "runs"
    result = run_optimize(LONG_JOB, executor=Stopping(runner, capacity=1), **options)
    assert "ends after the running probes" in capsys.readouterr().out
    assert result.spent.probes == 3
    assert result.stopped.startswith("It was stopped by `tuner runs stop`")
    words = ["runs", "stop", "long", "--runs-dir", str(tmp_path / "runs")]
    assert main(words) == 2  # nothing holds it any more
    assert "nothing to stop" in capsys.readouterr().err
    resumed = run_optimize(LONG_JOB, executor=SimulatedExecutor(runner, capacity=1), **options)
    assert resumed.spent.probes == 12
    assert not folder.stop_file.exists()


def test_a_list_tells_what_each_run_is(runs, capsys):
    found = listed(capsys)
    assert found.keys() == {"one", "two"}
    one = found["one"]
    assert (one["job"], one["kind"], one["state"], one["probes"]) == (
        *("made-up", "recording", "done", 2),
    )
    files = [path for path in (runs / "one").rglob("*") if path.is_file()]
    assert one["size_bytes"] == sum(path.stat().st_size for path in files)
    assert main(["runs"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    (runs / "two" / "study.toml").write_text("= broken")
    assert listed(capsys)["two"]["state"] == "unreadable"


def test_a_run_in_use_is_told_and_kept(runs, capsys):
    with RunFolder(runs / "one").locked():
        assert listed(capsys)["one"]["state"] == "running"
        assert main(["runs", "rm", "one"]) == 2
        assert "is being run" in capsys.readouterr().err
    assert listed(capsys)["one"]["state"] == "done"


def test_a_run_is_removed(runs, capsys):
    assert main(["runs", "rm", "one"]) == 0
    assert not (runs / "one").exists()
    assert listed(capsys).keys() == {"two"}


def test_other_folders_and_links_are_kept(runs, capsys, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "study.toml").write_text("")
    os.symlink(tmp_path / "elsewhere", runs / "link")
    for name in ("../elsewhere", "link", "tow"):
        assert main(["runs", "rm", name]) == 2
    assert "did you mean 'two'?" in capsys.readouterr().err
    assert (tmp_path / "elsewhere" / "study.toml").exists()
    assert main(["runs", "rm"]) == 2
    assert main(["runs", "list", "one"]) == 2
    assert listed(capsys).keys() >= {"one", "two"}


PIPES = [
    *("study.toml", ".lock", "trace/probes.jsonl", "plan.json", "study.journal", "report.html"),
    *("trace/power/p0000.csv.gz", "probes/p0000/.joulefront-record.json"),
]
TUNER = [sys.executable, "-c", "import sys, tuner.cli.main as m; sys.exit(m.main(sys.argv[1:]))"]


def tuner(*words):
    """Run a command that must end by itself."""
    return finished([*TUNER, *words], timeout=60)


def put_pipe(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def test_pipes_in_runs_do_not_block_the_others(runs):
    for number, name in enumerate(PIPES):
        put_pipe(Path(shutil.copytree(runs / "one", runs / f"piped-{number}")) / name)
    done = tuner("runs")
    assert done.returncode == 0, done.stderr
    assert "two" in done.stdout
    locked = runs / f"piped-{PIPES.index('.lock')}"
    assert tuner("runs", "rm", locked.name).returncode == 0
    assert not locked.exists()


@pytest.mark.extra("tuner.planner.plan")
@pytest.mark.parametrize("name", ["trace/probes.jsonl", "plan.json"])
def test_a_pipe_in_a_run_is_refused_where_that_run_is_shown(runs, name):
    if name == "plan.json":  # of a plan's run
        study = runs / "one" / "study.toml"
        study.write_text(f"{study.read_text()}\n[plan]\ngpus = [8]\nseconds = 1.0\n")
    put_pipe(runs / "one" / name)
    done = tuner("show", "one")
    assert done.returncode == 2
    assert name in done.stderr
    assert "it is not a regular file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", ["trace", ".", "trace/probes.jsonl"])
def test_a_closed_folder_of_another_user_does_not_hide_the_others(runs, closed):
    """The list is read by a process without root's right to enter every folder."""
    for path in [runs, *runs.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    for parent in runs.parents:
        if parent.stat().st_uid == os.geteuid() and parent.is_relative_to(tempfile.gettempdir()):
            parent.chmod(parent.stat().st_mode | 0o755)
    list_runs(runs)  # what it imports may lie in a folder that the other user cannot enter
    (runs / "one" / closed).chmod(0)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "failed"
        try:
            if os.geteuid() == 0:
                os.setuid(4242)
            text = json.dumps({entry.name: entry.state for entry in list_runs(runs)})
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        states = json.loads(pipe.read())
    os.waitpid(pid, 0)
    (runs / "one" / closed).chmod(0o755)
    assert states["two"] == "done"
    assert states.get("one", "unreadable") == "unreadable"


def test_files_that_vanish_meanwhile_do_not_end_the_list(runs):
    going = True

    def replace_files():
        while going:
            for number in range(20):
                draft = runs / "one" / f"draft-{number}"
                draft.touch()
                draft.replace(runs / "one" / "kept")

    thread = threading.Thread(target=replace_files)
    thread.start()
    try:
        for _ in range(100):
            assert {entry.name for entry in list_runs(runs)} == {"one", "two"}
    finally:
        going = False
        thread.join()


def test_a_search_starts_while_another_process_looks_at_its_run(runs, monkeypatch):
    monkeypatch.setattr("tuner.problem.run_folder._POLL_S", 60.0)  # the look ends sooner
    folder = RunFolder(runs / "one")
    with folder.locked():
        pass
    with open(folder.path / ".lock") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        timer = threading.Timer(0.2, looked_at.close)
        timer.start()
        with folder.locked():  # which waits for the look
            monkeypatch.setattr("tuner.problem.run_folder._POLL_S", 0.2)
            with pytest.raises(InputError, match="is being run by process"), folder.locked():
                pass
        timer.join()
