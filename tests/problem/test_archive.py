"""Runs in zip files: the same answers as from their folders, and nothing outside of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import tuner
from tuner.cli.main import main
from tuner.problem import run_folder
from tuner.search_spaces.errors import InputError

RUN = Path(__file__).resolve().parents[1] / "data" / "measured"
FILES = {
    path.relative_to(RUN).as_posix(): path.read_bytes()
    for path in sorted(RUN.rglob("*"))
    if path.is_file()
}
Make = Callable[[zipfile.ZipFile], None]
#: Where the run may stand in a zip file.
TOPS = ("", "measured/", "./measured/", "theirs/")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of temporary files of its own, in which unpacked runs are seen."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(run_folder, "_unpacked", {})
    monkeypatch.chdir(tmp_path)
    return folder


def zipped(path: Path, top: str = "", more: Make | None = None, run: bool = True) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if run:
            for name, data in FILES.items():
                archive.writestr(top + name, data)
        if more is not None:
            more(archive)
    return path


def entry(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo("x")
    made.filename = name  # the constructor changes some names
    made.external_attr = mode << 16
    return made


@pytest.mark.parametrize(
    "words", [["show"], ["choose", "--minimize", "energy"], ["compare"], ["explain"]]
)
def test_a_zip_file_of_a_run_answers_as_its_folder(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words
    code = main([command, str(RUN), *rest])
    of_folder = capsys.readouterr()
    for top in TOPS:
        path = str(zipped(tmp_path / "measured.ZIP", top))
        assert main([command, path, *rest]) == code
        of_archive = capsys.readouterr()
        assert of_archive.out.replace("theirs", "measured") == of_folder.out
        assert of_archive.err == of_folder.err


def test_a_zip_file_of_a_run_is_compared_with_a_folder_and_shown_as_json(tmp_path: Path) -> None:
    for top in TOPS:
        path = str(zipped(tmp_path / "measured.ZIP", top))
        assert tuner.load_result(path).to_json()["run_dir"] == path
    assert main(["compare", path, str(RUN)]) == 0
    assert main(["show", "measured.ZIP", "--json"]) == 0


def test_a_replay_of_a_zip_file_continues_under_its_name(tmp_path: Path) -> None:
    path = zipped(tmp_path / "measured.zip", "measured/")
    options = {"name": "again", "runs_dir": tmp_path, "progress": False, "report": False}
    first = tuner.replay(path, **options)
    run_folder._unpacked.clear()  # as in another process
    second = tuner.replay(path, **options)
    assert first.points == second.points != ()
    assert str(path) in (tmp_path / "again" / "study.toml").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["show", "--html"],
        ["export", "--to", "csv"],
        ["apply"],
        ["apply", "--out", "best"],
        ["run"],
        ["runs", "stop"],
    ],
)
def test_nothing_is_written_to_an_archive_or_started_from_it(
    tmp_path: Path, temporary: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(zipped(tmp_path / "measured.zip"))
    named = [*words, path] if words[0] == "runs" else [words[0], path, *words[1:]]
    assert main(named) == 2
    assert "is an archive" in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == {"measured.zip", "temporary"}


def test_a_report_of_an_archive_goes_where_it_is_asked_for(tmp_path: Path) -> None:
    path = str(zipped(tmp_path / "measured.zip"))
    assert main(["show", path, "--html", "--out", "report.html"]) == 0
    assert (tmp_path / "report.html").stat().st_size > 100_000


#: Commands that read an archive; all of them unpack it in the same place.
READERS = (["show"], ["choose"], ["compare"], ["replay"], ["export", "--to", "csv"])


def refused(
    path: Path,
    temporary: Path,
    capsys: pytest.CaptureFixture[str],
    readers: Sequence[Sequence[str]] = READERS[:1],
) -> str:
    """Return the one sentence with which an archive is refused, by each of these commands."""
    outside = {each for each in path.parent.rglob("*") if temporary not in each.parents}
    sentences = set()
    for words in readers:
        assert main([words[0], str(path), *words[1:]]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1, captured.err
        assert not captured.out
        sentences.add(captured.err)
    assert not list(temporary.iterdir())
    assert {each for each in path.parent.rglob("*") if temporary not in each.parents} == outside
    assert len(sentences) == 1, sentences
    return sentences.pop()


NAMES = [
    *("../evil", "trace/../../evil", "/tmp/evil", "//evil", "trace//evil", "..", "/", "C:\\evil"),
    *("trace\\..\\evil", "trace/power/\0evil", "tra\nce", "\x1b[2Jevil", "trace/./../x", "\u202ex"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top", ["", "run/"])
def test_names_that_leave_the_folder_are_refused(
    tmp_path: Path, temporary: Path, name: str, top: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = zipped(tmp_path / "x.zip", top, lambda archive: archive.writestr(entry(name), b"evil"))
    assert "does not lead into the run's folder" in refused(path, temporary, capsys)


@pytest.mark.parametrize(
    "kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK]
)
def test_links_and_devices_are_refused(
    tmp_path: Path, temporary: Path, kind: int, capsys: pytest.CaptureFixture[str]
) -> None:
    link = entry("trace/power", kind | 0o777)
    path = zipped(tmp_path / "x.zip", more=lambda archive: archive.writestr(link, b"/etc"))
    assert "is a link or a device" in refused(path, temporary, capsys)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["study.toml"], "two files named 'study.toml'"),
        (["./study.toml"], "two files named './study.toml'"),
        (["trace"], "'trace' in it is a file and a folder"),
        (["study.toml/x"], "'study.toml' in it is a file and a folder"),
        (["study.toml/"], "'study.toml' in it is a file and a folder"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_stand_for_two_files_are_refused(
    tmp_path: Path,
    temporary: Path,
    names: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def add(archive: zipfile.ZipFile) -> None:
        for name in names:
            archive.writestr(entry(name), b"" if name.endswith("/") else b"another")

    assert sentence in refused(zipped(tmp_path / "x.zip", more=add), temporary, capsys)


def test_several_runs_and_none_are_refused(
    tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(archive: zipfile.ZipFile) -> None:
        archive.writestr("b/study.toml", b"schema = 2")

    path = zipped(tmp_path / "x.zip", "a/", add)
    assert "several runs, such as 'a' and 'b'" in refused(path, temporary, capsys)
    path = zipped(tmp_path / "y.zip", "a/b/")
    assert "no study.toml" in refused(path, temporary, capsys)
    path = zipped(tmp_path / "z.zip", run=False)
    assert "no study.toml" in refused(path, temporary, capsys)


def test_huge_contents_are_refused_before_they_are_unpacked(
    tmp_path: Path,
    temporary: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_folder, "MAX_UNPACKED_BYTES", 2**20)
    zeros = bytes(2**20)

    def add(archive: zipfile.ZipFile) -> None:
        archive.writestr("table/table.csv", zeros)

    path = zipped(tmp_path / "x.zip", more=add)
    assert path.stat().st_size < 100_000
    assert "more than 1 MiB unpacked" in refused(path, temporary, capsys)
    # Logs of a whole run may be larger: they are not unpacked.
    path = zipped(tmp_path / "y.zip", more=lambda archive: archive.writestr("probes/p/log", zeros))
    assert main(["show", str(path)]) == 0


def test_an_entry_longer_than_it_states_is_refused(
    tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = zipped(tmp_path / "x.zip")
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("study.toml").file_size
    data = path.read_bytes()
    assert data.count(struct.pack("<L", size)) >= 2
    path.write_bytes(data.replace(struct.pack("<L", size), struct.pack("<L", 10)))
    assert "not a whole zip file" in refused(path, temporary, capsys)


def entries(number: int) -> bytes:
    """Return a zip file that is only a table of contents: `number` entries with short names."""
    one = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 3, 20, 0, *[0] * 14)
    table = b"".join(
        one[:28] + struct.pack("<H", 7) + one[30:] + b"%07d" % index for index in range(number)
    )
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(table), 0, 0)
    return table + end


@pytest.mark.parametrize(
    ("number", "sentence"),
    [(1_000_000, "table of contents exceeds 8 MiB"), (50_001, "more than 50,000 entries")],
)
def test_a_million_entries_are_refused(
    tmp_path: Path,
    temporary: Path,
    number: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(entries(number))
    assert sentence in refused(path, temporary, capsys)


def test_encrypted_and_foreign_compression_are_refused(
    tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = zipped(tmp_path / "x.zip")
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    assert "it is encrypted" in refused(path, temporary, capsys)

    def add(archive: zipfile.ZipFile) -> None:
        archive.writestr("x", b"x", zipfile.ZIP_LZMA)

    path = zipped(tmp_path / "y.zip", more=add)
    assert "compressed otherwise than by deflate" in refused(path, temporary, capsys)


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"not a zip file", b"PK\5\6" + bytes(18), b"\x1f\x8b" * 40, bytes(2**20)]
)
def test_what_is_not_a_zip_file_is_refused(
    tmp_path: Path, temporary: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(data)
    assert "cannot read the run in" in refused(path, temporary, capsys, READERS)


def test_a_damaged_zip_file_is_an_error_of_input(tmp_path: Path, temporary: Path) -> None:
    whole = zipped(tmp_path / "x.zip", "measured/").read_bytes()
    rest = len(whole) - whole.index(b"PK\1\2")
    path = tmp_path / "damaged.zip"
    for at in range(1, rest, 3):
        data = bytearray(whole)
        data[-at] ^= 0xFF
        path.write_bytes(data)
        with contextlib.suppress(InputError):
            run_folder.unpacked(path)
        run_folder._unpacked.clear()
    for end in range(0, len(whole), len(whole) // 50):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError):
            run_folder.unpacked(path)


def test_odd_files_in_place_of_a_zip_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.zip")
    (tmp_path / "folder.zip").mkdir()
    (tmp_path / "dangling.zip").symlink_to("nowhere")
    for name in ("pipe.zip", "folder.zip", "dangling.zip", "missing.zip", "x\0.zip"):
        with pytest.raises(InputError, match="unknown run"):
            tuner.load_result(name, runs_dir=tmp_path)


def test_the_unpacked_run_is_removed_with_the_process(tmp_path: Path, temporary: Path) -> None:
    import subprocess

    path = zipped(tmp_path / "measured.zip")
    code = f"import tuner; print(len(tuner.load_result({str(path)!r}).points))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) > 0
    assert not list(temporary.iterdir())


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.zip", "a/")
    assert tuner.load_result(path).name == "a"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(f"other/{name}", content)
    path.write_bytes(data.getvalue())
    assert tuner.load_result(path).name == "other"
    assert json.dumps(tuner.load_result(path).to_json())
