"""Zip files of runs: one is written, read elsewhere, and answers the same."""

from __future__ import annotations

import json
import shutil
import stat
import zipfile
from pathlib import Path

import pytest

import tuner
from tuner.cli.main import main
from tuner.exchange.archive import write_zip
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.errors import InputError

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A measured run with power samples, of a host and a user with names."""
    folder = tmp_path_factory.mktemp("runs") / "measured"
    shutil.copytree(DATA / "measured", folder)
    lines = []
    for line in (folder / "trace" / "probes.jsonl").read_text().splitlines():
        record = json.loads(line)
        record["host"] = "gpu-n03.cluster.example"
        record["environment"]["argv"] = ["/home/zqadmin/train.py", "--token", "hush-hush"]
        lines.append(json.dumps(record))
    (folder / "trace" / "probes.jsonl").write_text("\n".join(lines) + "\n")
    return RunFolder(folder)


@pytest.fixture(scope="module")
def archive(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("out") / "measured.zip"
    write_zip(run, path)
    return path


def unpacked(archive: Path, runs: Path) -> RunFolder:
    with zipfile.ZipFile(archive) as file:
        file.extractall(runs)
    (run,) = runs.iterdir()
    return RunFolder(run)


def test_a_zip_file_answers_as_its_run(run: RunFolder, archive: Path, tmp_path: Path) -> None:
    opened = unpacked(archive, tmp_path / "runs")
    assert opened.name == "measured"
    there = tuner.load_result(run.path)
    for here in (tuner.load_result(opened.path), tuner.load_result(archive)):
        assert here.to_json()["points"] == there.to_json()["points"]
    assert (opened.path / "trace" / "power" / "p0000.csv.gz").is_file()
    assert opened.report.stat().st_size > 100_000


@pytest.mark.parametrize("redact", [False, True])
@pytest.mark.parametrize("linked", ["best", "table", "trace", "trace/power", "plan.json"])
def test_no_link_of_a_run_is_followed(
    run: RunFolder, tmp_path: Path, linked: str, redact: bool
) -> None:
    """Review 2, finding 8: a folder that was handed over led to private keys."""
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    outside = tmp_path / "home"
    place = copy / linked
    if place.exists():
        shutil.move(place, outside)
    elif "." in linked:
        outside.write_text('{"key": "PRIVATE"}')
    else:
        outside.mkdir()
        (outside / "0.csv.gz").write_text("PRIVATE")
    place.symlink_to(outside)
    taken = linked == "plan.json" or linked.startswith("trace") or not redact
    if not taken or not any(outside.iterdir() if outside.is_dir() else [outside]):
        write_zip(RunFolder(copy), tmp_path / "out.zip", redact=redact)
        return
    with pytest.raises(InputError, match="reached by a link"):
        write_zip(RunFolder(copy), tmp_path / "out.zip", redact=redact)
    assert not (tmp_path / "out.zip").exists()


@pytest.mark.parametrize("to", ["zip", "csv"])
def test_what_is_redacted_names_nobody(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run.path), "--to", to, "--redact"]) == 0
    (path,) = tmp_path.iterdir()
    text = path.read_bytes()
    if to == "zip":
        with zipfile.ZipFile(path) as archive:
            text = b"".join(archive.read(name) for name in archive.namelist())
        assert tuner.load_result(path).best == tuner.load_result(run.path).best
    for name in (b"zqadmin", b"gpu-n03", b"cluster.example", b"hush-hush"):
        assert name not in text, name


def test_a_plan_is_packed_too(tmp_path: Path) -> None:
    made = tuner.plan("tiny-gpt", cluster="cpu-2", space="clocks", runs_dir=tmp_path, name="plan")
    for redact in (False, True):
        write_zip(RunFolder(tmp_path / "plan"), tmp_path / "p.zip", redact=redact)
        assert tuner.load_result(tmp_path / "p.zip").front_points == made.front_points


def test_equal_runs_make_equal_zip_files(run: RunFolder, archive: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.zip"
    write_zip(run, again)
    assert again.read_bytes() == archive.read_bytes()
    assert stat.S_IMODE(again.stat().st_mode) == 0o600


def test_a_zip_file_is_exported_again(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "measured.zip"
    shutil.copy(archive, own)
    assert main(["export", str(own), "--to", "zip", "--out", str(own)]) == 2
    assert "name another file with --out" in capsys.readouterr().err
    out = tmp_path / "again.zip"
    assert main(["export", str(archive), "--to", "zip", "--out", str(out)]) == 0
    assert f"tuner show {out}" in capsys.readouterr().out
    assert out.read_bytes() == archive.read_bytes()


@pytest.mark.parametrize("name", ["study.toml", "plan.json"])
def test_a_redacted_zip_file_of_a_torn_file_is_refused(tmp_path: Path, name: str) -> None:
    from tuner.exchange.archive import write_zip

    run = RunFolder(tmp_path / "kept")
    shutil.copytree(DATA / "measured", run.path)
    (run.path / name).write_bytes(b"\xd2 [")
    with pytest.raises(InputError):
        write_zip(run, tmp_path / "out.zip", redact=True)
