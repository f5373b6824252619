"""Runs of a folder: list, remove."""

from __future__ import annotations

import json
import os

import pytest

from tuner.cli.main import main
from tuner.executors.local import SimulatedExecutor
from tuner.problem.run_folder import RunFolder
from tuner.testing.studies import LONG_JOB, ModelRunner, run_optimize, write_table


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOULEFRONT_RUNS", str(tmp_path / "mine"))
    table = str(write_table(tmp_path / "table", shapes=(1, 4)))
    for name in ("one", "two"):
        assert main(["dev", "replay", table, "--max-probes", "2", "--quiet", "--name", name]) == 0
    return tmp_path / "mine"


def listed(capsys):
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["items"]}


def test_a_search_is_stopped_from_another_terminal(tmp_path, capsys):
    """The file appears during the third probe, after which none is started or verified."""
    runner = ModelRunner()
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
