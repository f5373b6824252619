"""Archives of bundles: what is written is read, and what could do harm is refused unread."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.evidence import bundle
from tuner.evidence.bundle import read_archive, write_archive
from tuner.search_spaces.errors import InputError

MEMBERS = {"bundle.json": b"{}", "run/trace/power/p0001.csv.gz": bytes(range(256)) * 40}


def zipped(path: Path, add: Callable[[zipfile.ZipFile], object]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        add(made)
    return path


def test_members_are_read_as_written_and_equal_ones_make_equal_files(tmp_path: Path) -> None:
    first = write_archive(tmp_path / "a.zip", MEMBERS)
    assert read_archive(tmp_path / "a.zip") == MEMBERS
    assert write_archive(tmp_path / "b.zip", MEMBERS) == first
    assert stat.S_IMODE((tmp_path / "a.zip").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "run/../../outside",
        "/etc/outside",
        "run//outside",
        "run\\..\\outside",
        "run/.hidden",
        "run/\x1b[2J",
        "a/b/c/d/e/f",
        "run/folder/",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    path = zipped(tmp_path / "x.zip", lambda z: z.writestr(name, b"text"))
    with pytest.raises(InputError, match="name that is not allowed"):
        read_archive(path)
    with pytest.raises(InputError, match="cannot be the name"):
        write_archive(tmp_path / "y.zip", {name: b"text"})


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("run/study.toml")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = zipped(tmp_path / "x.zip", lambda z: z.writestr(link, b"/etc/passwd"))
    with pytest.raises(InputError, match="is a link"):
        read_archive(path)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    def add(made: zipfile.ZipFile) -> None:
        made.writestr("run/a", b"1")
        made.writestr("run/A", b"2")

    with pytest.raises(InputError, match="name that is not allowed"):
        read_archive(zipped(tmp_path / "x.zip", add))


def test_a_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MAX_FILE_BYTES", 10_000)
    monkeypatch.setattr(bundle, "MAX_TOTAL_BYTES", 15_000)
    path = zipped(tmp_path / "one.zip", lambda z: z.writestr("run/big", bytes(10_001)))
    with pytest.raises(InputError, match="larger than"):
        read_archive(path)

    def two(made: zipfile.ZipFile) -> None:
        made.writestr("run/a", bytes(9_000))
        made.writestr("run/b", bytes(9_000))

    with pytest.raises(InputError, match="unpacked"):
        read_archive(zipped(tmp_path / "two.zip", two))


def test_a_bomb_that_states_a_small_size_is_not_unpacked_beyond_it(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.zip", lambda z: z.writestr("run/big", bytes(1_000_000)))
    data = path.read_bytes()
    true, stated = struct.pack("<I", 1_000_000), struct.pack("<I", 100)
    assert data.count(true) == 2
    path.write_bytes(data.replace(true, stated))
    with pytest.raises(InputError, match="damaged"):
        read_archive(path)


def test_many_files_are_refused_by_the_end_of_the_archive_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MAX_FILES", 20)

    def add(made: zipfile.ZipFile) -> None:
        for number in range(21):
            made.writestr(f"run/{number}", b"")

    path = zipped(tmp_path / "x.zip", add)
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("the directory was parsed"))
    with pytest.raises(InputError, match="more than 20 files"):
        read_archive(path)


def test_what_is_no_archive_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as made:
        made.writestr("bundle.json", b"{}" * 500)
    cut = whole.getvalue()
    for data in (b"", b"PK", b"PK\x05\x06" + bytes(18), b"text" * 100, cut[:200] + cut[-80:]):
        path.write_bytes(data)
        if data.endswith(bytes(18)):
            assert read_archive(path) == {}
            continue
        with pytest.raises(InputError, match=r"x\.zip"):
            read_archive(path)
    with pytest.raises(InputError, match="cannot read"):
        read_archive(tmp_path / "missing.zip")
    with pytest.raises(InputError, match=r"cannot read|regular"):
        read_archive(tmp_path)
