"""Bundles: a run is packed, opened elsewhere, and found to answer the same, or not."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

import tuner
from tuner.cli.main import main
from tuner.evidence.archive import read_archive, write_archive
from tuner.evidence.bundle import MANIFEST, make_bundle
from tuner.evidence.opened import open_bundle
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.errors import InputError

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A measured run with power samples, of a host and a user with names."""
    folder = tmp_path_factory.mktemp("runs") / "measured"
    shutil.copytree(DATA / "before-redesign", folder)
    lines = []
    for line in (folder / "trace" / "probes.jsonl").read_text().splitlines():
        record = json.loads(line)
        record["host"] = "gpu-n03.cluster.example"
        record["environment"]["argv"] = ["/home/zqadmin/train.py", "--token", "hush-hush"]
        lines.append(json.dumps(record))
    (folder / "trace" / "probes.jsonl").write_text("\n".join(lines) + "\n")
    return RunFolder(folder)


@pytest.fixture(scope="module")
def bundle(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(run, tmp_path_factory.mktemp("out") / "b.zip", facts={"host": "here"}).path


def changed(bundle: Path, to: Path, change: Any) -> Path:
    """Return a copy of a bundle whose members `change` edits."""
    members = read_archive(bundle)
    change(members)
    write_archive(to, members)
    return to


def test_an_opened_bundle_is_a_run_that_answers_the_same(
    run: RunFolder, bundle: Path, tmp_path: Path
) -> None:
    opened = open_bundle(bundle, runs_dir=tmp_path / "runs")
    assert opened.sound
    assert opened.run == tmp_path / "runs" / "measured"
    here, there = tuner.load_result(opened.run), tuner.load_result(run.path)
    assert here.to_json()["points"] == there.to_json()["points"]
    assert (opened.run / "trace" / "power" / "p0000.csv.gz").is_file()
    assert (opened.run / "report.html").stat().st_size > 100_000
    summary = (opened.run / "evidence" / "summary.html").read_text()
    assert there.recommendation is not None
    assert "Whole training" in summary
    assert "<script" not in summary
    assert "energy (estimated)" in summary
    assert "( (" not in summary
    assert json.loads((opened.run / "evidence" / "doctor.json").read_text()) == {"host": "here"}
    again = tuner.replay(
        opened.run,
        name="again",
        runs_dir=tmp_path / "runs",
        report=False,
        search=tuner.SearchSettings(max_probes=3, verify=False),
    )
    assert again.points
    with pytest.raises(InputError, match="--name"):
        open_bundle(bundle, runs_dir=tmp_path / "runs")


def test_a_changed_measurement_is_found(bundle: Path, tmp_path: Path) -> None:
    def cheaper(members: dict[str, bytes]) -> None:
        lines = members["run/trace/probes.jsonl"].splitlines()
        record = json.loads(lines[1])
        for window in record["measurements"]:
            window["energy_J"] *= 0.9
            window["power_W"] *= 0.9
        lines[1] = json.dumps(record).encode()
        members["run/trace/probes.jsonl"] = b"\n".join(lines) + b"\n"

    path = changed(bundle, tmp_path / "x.zip", cheaper)
    opened = open_bundle(path, runs_dir=tmp_path / "runs")
    assert opened.changed == ("run/trace/probes.jsonl",)
    assert opened.differences
    assert not opened.sound
    assert "CHANGED: run/trace/probes.jsonl" in "\n".join(opened.lines())


def test_added_and_missing_files_and_another_answer_are_found(bundle: Path, tmp_path: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        del members["doctor.json"]
        members["run/best/launch.sh"] = b"rm -rf ~\n"
        manifest = json.loads(members[MANIFEST])
        manifest["answer"]["choice"] = "micro_batch=64"
        members[MANIFEST] = json.dumps(manifest).encode()

    path = changed(bundle, tmp_path / "x.zip", edit)
    opened = open_bundle(path, runs_dir=tmp_path / "runs")
    assert opened.changed == ("doctor.json", "run/best/launch.sh")
    assert any("choice" in sentence for sentence in opened.differences)


def test_a_redacted_bundle_names_nobody_and_answers_the_same(
    run: RunFolder, tmp_path: Path
) -> None:
    facts = {"host": "gpu-n03", "compilers": {"g++": "/opt/zqadmin/bin/g++"}}
    path = make_bundle(run, tmp_path / "r.zip", redact=True, facts=facts).path
    with zipfile.ZipFile(path) as archive:
        text = b"".join(archive.read(name) for name in archive.namelist())
    for name in (b"zqadmin", b"gpu-n03", b"cluster.example", b"hush-hush"):
        assert name not in text, name
    opened = open_bundle(path, runs_dir=tmp_path / "runs")
    assert opened.sound
    assert opened.redacted


def test_a_redacted_export_names_nobody(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run.path), "--to", "t4", "--redact"]) == 0
    text = (tmp_path / "measured-redacted.t4.json").read_text()
    assert "gpu-n03" not in text
    assert main(["export", str(run.path), "--to", "nothing", "--redact"]) == 2


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda m: m.pop(MANIFEST), "holds no bundle.json"),
        (lambda m: m.update({MANIFEST: b"{"}), "cannot be read"),
        (lambda m: m.update({MANIFEST: b"[]"}), "states no schema"),
        (lambda m: m.update({MANIFEST: b'{"schema": 99}'}), "newer joulefront"),
        (lambda m: m.update({MANIFEST: b'{"schema": 1}'}), "files in bundle.json"),
        (lambda m: m.pop("run/study.toml"), "study.toml"),
        (lambda m: m.update({"run/study.toml": b"= ="}), "cannot read"),
    ],
)
def test_what_is_no_bundle_is_one_sentence_and_leaves_nothing(
    bundle: Path, tmp_path: Path, edit: Any, sentence: str
) -> None:
    path = changed(bundle, tmp_path / "x.zip", edit)
    with pytest.raises(InputError, match=sentence):
        open_bundle(path, runs_dir=tmp_path / "runs", name="opened")
    assert not list((tmp_path / "runs").glob("*")) + list((tmp_path / "runs").glob(".j*"))


def test_the_commands(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(tmp_path / "runs")
    assert main(["open", str(bundle), "--runs-dir", runs, "--name", "theirs"]) == 0
    assert "all as stated" in capsys.readouterr().out
    out = tmp_path / "again.zip"
    assert main(["bundle", "theirs", "--runs-dir", runs, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(out)
    assert main(["open", str(bundle), "--runs-dir", runs, "--name", "../out"]) == 2
