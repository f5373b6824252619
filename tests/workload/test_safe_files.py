"""Writes to a run folder that another user filled: no link is followed, no foreign folder taken."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.studies import write_table
from tests.waiting import wait_until
from tuner.cli.main import main
from tuner.problem.run_folder import RunFolder, find_run
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import (
    SCRIPT_MODE,
    make_folder,
    open_plain,
    require_own,
    write_bytes,
    write_text,
)

CANARY = "private\n"
#: Any user that is neither root nor, most likely, the one that runs the tests.
FOREIGN = 54321
#: Four launches: a study over the default space of this job takes seconds.
SPACE = Path(__file__).parents[1] / "data" / "four-launches.toml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated study of two probes, with its report, launch files and an export."""
    runs = tmp_path_factory.mktemp("made") / "runs"
    assert optimize(runs, probes=2) == 0
    assert main(["apply", "study", "--runs-dir", str(runs)]) == 0
    assert main(["export", "study", "--runs-dir", str(runs), "--to", "csv"]) == 0
    return runs / "study"


def optimize(runs: Path, *, probes: int) -> int:
    words = ["tiny-gpt", "--cluster", "h200-8", "--executor", "simulated", "--space", str(SPACE)]
    words += ["--plain"]
    words += ["--max-probes", str(probes), "--runs-dir", str(runs), "--name", "study"]
    return main(["optimize", *words])


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs" / "study"))


def names(made: Path) -> list[str]:
    return sorted(str(p.relative_to(made)) for p in made.rglob("*") if p.is_file())


#: The commands that write to a run, without the run.
WRITING = {
    "apply": ["apply"],
    "report": ["show", "--html"],
    "csv": ["export", "--to", "csv"],
    "optimize": ["optimize"],
}
#: Files that writing commands make aside or in passing.
PASSING = ("study.toml.new", "trace/.reserve", "trace/probes.jsonl.torn", "best/options.json")


def command(what: str, run: Path) -> int:
    if what == "optimize":
        return optimize(run.parent, probes=3)
    words = WRITING[what]
    return main([*words, str(run), "--runs-dir", str(run.parent)])


def test_there_is_a_file_of_each_kind(made: Path) -> None:
    expected = {".lock", "best/launch.sh", "report.html", "study.csv", "study.journal"}
    assert expected < set(names(made))
    assert (made / "best" / "clocks.sh").stat().st_mode & 0o777 == 0o700
    assert (made / "study.toml").stat().st_mode & 0o111 == 0


@pytest.mark.parametrize("link", ["symbolic", "hard"])
@pytest.mark.parametrize("what", WRITING)
def test_no_command_writes_through_a_link(
    what: str, link: str, run: Path, made: Path, tmp_path: Path
) -> None:
    """Every file of the run is a link to its content elsewhere, so that it reads as before."""
    elsewhere = tmp_path / "elsewhere"
    before: dict[Path, tuple[bytes, int]] = {}
    for name in (*names(made), *PASSING):
        target = elsewhere / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (run / name).exists():
            (run / name).rename(target)
        else:
            target.write_text(CANARY)
        target.chmod(0o600)
        (run / name).parent.mkdir(exist_ok=True)
        if link == "symbolic":
            (run / name).symlink_to(target)
        else:
            (run / name).hardlink_to(target)
        before[target] = target.read_bytes(), target.stat().st_mode
    # A torn line would be cut off and put aside.
    trace = elsewhere / "trace" / "probes.jsonl"
    trace.write_bytes(trace.read_bytes() + b'{"torn')
    before[trace] = trace.read_bytes(), trace.stat().st_mode
    # What a command opens in place is refused; what it replaces is written all the same.
    assert command(what, run) == (2 if what == "optimize" else 0)
    for target, (content, mode) in before.items():
        assert target.read_bytes() == content, target
        assert target.stat().st_mode == mode, target


@pytest.mark.slow
def test_each_link_alone(
    run: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file at a time, so that a refusal of the first link does not hide the others."""
    for name in ("study.journal", "study.toml", "report.html", "trace/.reserve"):
        shutil.rmtree(run)
        shutil.copytree(made, run)
        target = tmp_path / "canary"
        there = run / name
        content = there.read_bytes() if there.exists() else CANARY.encode()
        target.write_bytes(content)
        target.chmod(0o600)
        there.unlink(missing_ok=True)
        there.symlink_to(target)
        code = command("optimize", run)
        error = capsys.readouterr().err
        assert code == 0 or (code == 2 and "symbolic link" in error), (name, error)
        assert target.read_bytes() == content, name
        assert stat.S_IMODE(target.stat().st_mode) == 0o600, name


@pytest.mark.parametrize("folder", ["best", "trace", "trace/power"])
def test_no_folder_of_a_run_leads_elsewhere(folder: str, run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    if (run / folder).exists():
        (run / folder).rename(elsewhere)
    elsewhere.mkdir(exist_ok=True)
    (run / folder).symlink_to(elsewhere)
    before = {p: p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()}
    if folder.startswith("trace"):
        assert command("optimize", run) == (2 if folder == "trace" else 0)
    else:
        assert command("apply", run) == (2 if folder == "best" else 0)
    assert {p: p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()} == before


def test_power_samples_and_records_follow_no_link(tmp_path: Path) -> None:
    from tests.support.studies import request
    from tuner.workload.records.probe import MeterInfo, PowerSample
    from tuner.workload.records.trace import (
        PENDING_NAME,
        partial_record,
        save_pending,
        write_power_samples,
    )

    canary = tmp_path / "canary"
    canary.write_text(CANARY)
    run = tmp_path / "run"
    power, kept = run / "trace" / "power" / "p0000.csv.gz", run / "probes" / "p0000" / PENDING_NAME
    for path in (power, kept, kept.with_name(f"{PENDING_NAME}.new")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(canary)
    write_power_samples(run, "p0000", [PowerSample(0.0, 1.0)])
    meter = MeterInfo("estimated", "node", "", estimated=True)
    save_pending(run, partial_record(request(), (), meter))
    assert canary.read_text() == CANARY
    assert power.read_bytes()[:2] == b"\x1f\x8b"
    assert json.loads(kept.read_text())
    shutil.rmtree(run / "probes" / "p0000")
    (run / "probes" / "p0000").symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        save_pending(run, partial_record(request(), (), meter))


def test_a_log_that_is_a_link_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from tuner.workload.node import rank_launch as logs

    monkeypatch.setattr(logs, "LOG_LIMIT_BYTES", 100)
    monkeypatch.setattr(logs, "KEPT_BYTES", 10)
    monkeypatch.setattr(logs, "PERIOD_S", 0.02)
    canary = tmp_path / "canary"
    canary.write_text("x" * 1000)
    folder = tmp_path / "probe"
    folder.mkdir()
    (folder / "rank0.log").symlink_to(canary)
    (folder / "rank1.log").write_text("y" * 990 + "0123456789")
    told: dict[str, object] = {}
    with logs.bounded_logs(folder, told):
        wait_until(lambda: "rank1.log" in told)
        time.sleep(0.1)
    assert (folder / "rank1.log").read_text() == "0123456789"
    assert canary.read_text() == "x" * 1000
    assert set(told) == {"rank1.log"}


def test_the_hook_of_launch_files_is_written_anew(tmp_path: Path) -> None:
    """Bytecode that was left in its folder would be run in place of the hook's."""
    from tuner.deploy.script_program import _write_hook

    hook = tmp_path / "joulefront_hook"
    (hook / "__pycache__").mkdir(parents=True)
    (hook / "__pycache__" / "engine.cpython-311.pyc").write_bytes(b"planted")
    (hook / "json.py").write_text("planted")
    _write_hook(hook)
    assert {p.name for p in hook.iterdir()} >= {"__init__.py", "__main__.py", "engine.py"}
    assert not (hook / "__pycache__").exists()
    assert not (hook / "json.py").exists()
    elsewhere = tmp_path / "elsewhere"
    hook.rename(elsewhere)
    (elsewhere / "__main__.py").write_text(CANARY)
    hook.symlink_to(elsewhere)
    _write_hook(hook)
    assert (elsewhere / "__main__.py").read_text() == CANARY
    assert not hook.is_symlink()


# The helpers themselves.


def test_a_file_is_replaced_with_the_umasks_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "é\r\n")
        write_text(tmp_path / "b.sh", "", mode=SCRIPT_MODE)
        write_bytes(tmp_path / "a", b"new", durable=True)
    finally:
        os.umask(before)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "b.sh").stat().st_mode) == 0o700
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b.sh"]


def test_a_failed_write_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "full").touch()
    with pytest.raises(OSError, match="folder") as caught:
        write_text(tmp_path / "folder", "text")
    assert caught.value.filename == str(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("pipe", "null"):
        with pytest.raises(OSError, match="not a regular file"):
            write_text(tmp_path / name, "text")
    with pytest.raises(OSError, match="not a regular file"):
        open_plain(tmp_path / "pipe", os.O_CREAT)
    assert (tmp_path / "null").is_symlink()


def test_opening_in_place_wants_a_file_with_one_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(CANARY)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic link"):
        open_plain(tmp_path / "link", os.O_CREAT)
    os.close(open_plain(tmp_path / "file", os.O_CREAT))
    (tmp_path / "second").hardlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="hard link"):
        open_plain(tmp_path / "second", os.O_CREAT)
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "missing", 0)


def test_a_folder_is_made_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "runs").symlink_to("real")  # above the run: the user's own
    run = tmp_path / "runs" / "study"
    make_folder(run / "a" / "b", inside=run)
    assert (tmp_path / "real" / "study" / "a" / "b").is_dir()
    (run / "c").symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        make_folder(run / "c" / "d", inside=run)
    assert not (tmp_path / "d").exists()


# Folders of other users.


def give_away(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, FOREIGN, FOREIGN, follow_symlinks=False)


@pytest.mark.root
@pytest.mark.parametrize("what", [*WRITING, "run", "dashboard"])
def test_another_users_run_is_not_written_to(
    what: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give_away(run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    if what in WRITING:
        assert command(what, run) == 2
    else:
        assert main([what, str(run)]) == 2
    error = capsys.readouterr().err
    assert f"{run} belongs to user {FOREIGN}" in error
    assert f"cp -r --no-preserve=ownership {run} mine" in error
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.root
def test_another_users_run_is_not_started_from_elsewhere(run: Path, tmp_path: Path) -> None:
    give_away(run)
    assert main(["apply", str(run), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.root
def test_another_users_run_can_be_read_and_copied(run: Path, tmp_path: Path) -> None:
    give_away(run)
    for words in (
        ["show", str(run)],
        ["explain", str(run)],
        ["choose", str(run)],
        ["show", "--html", str(run), "--out", str(tmp_path / "report.html")],
        ["export", str(run), "--to", "csv", "--out", str(tmp_path / "front.csv")],
        ["replay", str(run), "--runs-dir", str(tmp_path / "replays"), "--max-probes", "1"],
    ):
        assert main(words) == 0, words
    mine = tmp_path / "mine"
    assert os.system(f"cp -r --no-preserve=ownership {run} {mine}") == 0
    assert main(["apply", str(mine)]) == 0


@pytest.mark.root
def test_a_link_of_another_user_to_a_folder_of_ours(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    require_own(tmp_path / "link")
    os.chown(tmp_path / "link", FOREIGN, FOREIGN, follow_symlinks=False)
    with pytest.raises(InputError, match="belongs to"):
        require_own(tmp_path / "link")


def table_study(folder: Path, name: str) -> list[str]:
    table = write_table(folder / "table")
    words = ["replay", str(table), "--runs-dir", str(folder / "runs"), "--name", name]
    return [*words, "--max-probes", "1", "--no-verify"]


@pytest.mark.root
def test_runs_that_another_user_made_where_all_may_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its owner could put another folder in place of the run's at any moment."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o777)
    os.chown(tmp_path / "runs", FOREIGN, FOREIGN)
    words = table_study(tmp_path, "study")
    tmp_path.chmod(0o1777)
    assert main(words) == 2
    assert "--runs-dir" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "study").exists()
    tmp_path.chmod(0o755)  # a project folder that its owner shares on purpose
    assert main(words) == 0


@pytest.mark.root
def test_files_of_nobody_are_roots_on_a_network_file_system_and_no_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, 65_534, 65_534)
    require_own(tmp_path)
    os.chown(tmp_path, FOREIGN, FOREIGN)
    with pytest.raises(InputError, match="belongs to"):
        require_own(tmp_path)
    os.chown(tmp_path, 65_534, 65_534)
    monkeypatch.setattr(os, "geteuid", lambda: FOREIGN)
    with pytest.raises(InputError, match="belongs to"):
        require_own(tmp_path)


# A run by name or by path.


def test_a_bare_name_is_a_run_of_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/one", "one", "two", "runs/runs/one"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "study.toml").touch()
    found: Callable[..., RunFolder] = find_run
    assert found("one").path == Path("runs/one")
    assert found("./one").path == Path("one")
    assert found("runs/one").path == Path("runs/one")  # not runs/runs/one
    assert found("two").path == Path("two")
    assert found(Path("one")).path == Path("one")
    assert found(str(tmp_path / "one")).path == tmp_path / "one"
    monkeypatch.chdir("one")
    assert found(".").path == Path()
